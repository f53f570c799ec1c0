import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.rewards.code_purpose import Purpose, purpose_of

EXAMPLES = {
    Purpose.CALCULATION: [
        "print(2 ** 10 % 7)",
        "from math import comb\nprint(comb(10, 3))",
        "total = 0\nfor k in range(1, 11):\n    total += k\nprint(total)",
        "import sympy as sp\nx = sp.symbols('x')\nprint(sp.solve(x**2 - 4, x))",
        # A guard is neither a check nor a search; nor is a loop that runs down.
        "d = 4 - 8\nif d < 0:\n    print('no roots')\nelse:\n    print(d ** 0.5)",
        "n = 96\nwhile n % 2 == 0:\n    n //= 2\nprint(n)",
        "same = 1 + 1 == 2\nprint(3)",
        "from sympy import product, symbols\nk = symbols('k')\nprint(product(k, (k, 1, 5)))",
        "numbers = [k * k for k in range(5)]\nprint(sum(numbers))",
    ],
    Purpose.VERIFICATION: [
        "assert 3 + 4 == 7",
        "print(3 + 4 == 7)",
        "print('sums agree:', 3 + 4 == 7, 5)",
        "print(f'{1 + 1 == 2}')",
        "ok = abs(0.1 + 0.2 - 0.3) < 1e-9\nprint(ok)",
        "import math\nprint(math.isclose(0.1 + 0.2, 0.3))",
        "print(all(n * (n + 1) // 2 == sum(range(n + 1)) for n in range(50)))",
        "a = 6 * 7\nif a == 42:\n    print('right')\nelse:\n    print('wrong')",
        "x = 5\nx > 3 and x < 9",
        "print(not (2 > 3))",
        # It searches too; the check comes first.
        "found = [n for n in range(99) if n % 7 == 3]\nassert found[0] == 3",
    ],
    Purpose.SEARCH: [
        "for a in range(1, 50):\n    for b in range(a, 50):\n        if a * b == 391:\n            print(a, b)",
        "print(sum(1 for n in range(1000) if str(n) == str(n)[::-1]))",
        "n = 1\nwhile True:\n    n += 1\n    if n ** 3 > 5000:\n        break\nprint(n)",
        "from itertools import permutations\nprint(len(list(permutations('abcd'))))",
        "import itertools as it\nprint(len(list(it.product(range(6), repeat=3))))",
        "from itertools import *\nprint(len(list(combinations(range(6), 3))))",
        "print(list(filter(str.isdigit, 'a1b2')))",
        "best = 0\nfor x in range(9):\n    best = x if x * (9 - x) > best else best\nprint(best)",
        "def primes(n):\n    for k in range(2, n):\n        if k % 2:\n            yield k\nprint(list(primes(9)))",
    ],
    Purpose.PLOT: [
        "import matplotlib.pyplot as plt\nplt.bar([1], [2])\nplt.show()",
        "from matplotlib import pyplot\npyplot.show()",
        "from sympy import plot, symbols\nx = symbols('x')\nplot(x**2)",
        "frame.plot()\nassert True",
    ],
    Purpose.UNPARSED: [
        "", "\n\n", "# nothing but a comment", "print(", "x = 1\n  y = 2", "!pip install sympy", "print 3", "x = 1\0",
        "\ud800", "9" * 5000, "(" * 1000, "[" * 300 + "]" * 300, "-" * 100_000 + "1", "x" + "+x" * 100_000,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("purpose", "code"), [(purpose, code) for purpose, codes in EXAMPLES.items() for code in codes],
    ids=lambda value: str(value)[:24].encode("ascii", "replace").decode().replace("\0", "?"),
)  # fmt: skip
def test_the_rule(purpose, code):
    assert purpose_of(code) is purpose


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="print(x)=:\n forif[]{}'\"\\#é", max_size=60))
def test_any_text_has_a_purpose(code):
    assert purpose_of(code) in Purpose


def test_nothing_is_run_and_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert purpose_of("import sys\nsys.exit('\\d' == open('/nowhere'))") is Purpose.CALCULATION
