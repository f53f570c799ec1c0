from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untrusted import (
    MOST_LEVELS,
    MOST_QUOTED,
    MOST_TOLD,
    clipped,
    load_json,
    load_own_json,
    quoted,
    without_surrogates,
)
from untrusted.errors import InputError


@pytest.mark.parametrize(
    ("text", "clean"),
    [("plain", "plain"), ("π", "π"), ("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600"), ("\udc80", "\ufffd")],
)
def test_surrogates_are_joined_or_replaced(text, clean):
    assert without_surrogates(text) == clean


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_left_is_utf_8(text):
    assert without_surrogates(text).encode().decode() == without_surrogates(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value at character 0"),
        ('{"a": 1', "Expecting ',' delimiter at character 7"),
        (b'{"a": "\xff"}', "no UTF-8 at byte 7"),
        ("9" * 4301, "a number has too many digits"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ("[-Infinity]", "-Infinity is no number of JSON"),
        ('{"a": [1e999]}', "1e999 is beyond the range of a float"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1), "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_a_value_error_of_one_line(text, reason):
    with pytest.raises(ValueError, match=f"^{reason}$"):
        load_json(text)


def test_what_can_be_read_is():
    for value in (
        json.loads("[" * (MOST_LEVELS - 1) + "]" * (MOST_LEVELS - 1)),
        {"a": ["\ud800", 10**4299, None]},
        "x",
    ):
        assert load_json(json.dumps(value)) == value
    assert load_json('"a\n"', strict=False) == "a\n"


def test_what_others_may_have_is_read_again_from_a_file_of_our_own():
    deepest = load_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)
    written = json.dumps([{"value": deepest, "measured": [float("inf"), -float("inf")]}])
    assert load_own_json(written) == json.loads(written)


def test_a_message_keeps_what_it_begins_and_ends_with():
    told = str(InputError(f"key={'x' * 100_000}: too long: shorten it"))
    assert len(told) == MOST_TOLD and told.startswith("key=x") and told.endswith("x: too long: shorten it")
    assert clipped("short") == "short" and quoted("a\n") == r"'a\n'" and quoted([1]) == "[1]"
    assert len(quoted("x" * 100_000)) == MOST_QUOTED + 2 and len(quoted(["x" * 100_000])) == MOST_QUOTED


def test_the_examples_of_the_readme():
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False)
    assert tried and not failed
