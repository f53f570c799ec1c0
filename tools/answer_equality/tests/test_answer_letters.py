"""A variable that is multiplied in changes an answer, whatever unit its letter may stand for elsewhere."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from answer_equality.equality import equivalent

LETTERS = "abcdghjklmnpqrstuvwxyzABCDFGHJKLMNPQRSTUVWXYZ"
FACTORS = st.sampled_from(
    ["2", "17", "\\pi", "\\sqrt{3}", "\\frac{1}{2}", "r^2", "l", "w", "m", "g", "b", "x", "(a+b)"]
)
PRODUCTS = st.lists(FACTORS, min_size=1, max_size=3).map(lambda parts: " \\cdot ".join(parts))
SUMS = st.lists(PRODUCTS, min_size=1, max_size=2).map(" + ".join)


@settings(deadline=None, max_examples=300)
@given(
    PRODUCTS, st.sampled_from(["x", "n", "\\pi", "l"]), st.sampled_from(LETTERS), st.sampled_from([" ", "", "\\,", "~"])
)
@example("\\pi r^2", "x", "h", " ")
@example("\\frac12 b", "x", "h", " ")
@example("2", "n", "m", "")
def test_another_variable_changes_an_expression(product, symbol, letter, space):
    expression = f"{product} \\cdot {symbol}"
    larger = f"{expression}{space or (' ' if symbol == chr(92) + 'pi' else '')}{letter}"
    assert not equivalent(larger, expression)
    assert not equivalent(expression, larger)


@settings(deadline=None, max_examples=200)
@given(SUMS, st.sampled_from("xyn"), st.sampled_from(LETTERS))
def test_another_variable_changes_a_term(total, symbol, letter):
    assert not equivalent(f"{symbol} + {total} {letter}", f"{symbol} + {total}")
    assert not equivalent(f"{symbol} + {total}", f"{symbol} + {total} {letter}")


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 10**6), st.sampled_from(LETTERS), st.sampled_from(LETTERS))
def test_letters_beside_a_number_are_variables(number, one, two):
    for larger in (f"{number}{one}", f"{number} {one} {two}", f"\\frac{{1}}{{{number}}}{one}"):
        smaller = f"\\frac{{1}}{{{number}}}" if "frac" in larger else str(number)
        assert not equivalent(larger, smaller)
        assert not equivalent(smaller, larger)
