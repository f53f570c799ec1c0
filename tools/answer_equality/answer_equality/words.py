"""Words: which runs of letters are products of variables, which are names, and which are plain language."""

from __future__ import annotations

import re

from answer_equality.spelling import GREEK_LETTERS, listed
from answer_equality.tokens import UnreadableError

GREEK = frozenset([*GREEK_LETTERS, "ell", "hbar"])
# Functions that Python and plain text write without a backslash, with their argument in brackets.
BARE_FUNCTIONS = frozenset(
    listed("sqrt cbrt abs floor ceil factorial binomial root asinh acosh atanh Fraction Rational")
)
_GLUED = re.compile(r"(arcsin|arccos|arctan|sin|cos|tan|sec|csc|cot|log|ln)([a-zA-Z])\Z")
_ANSWER_WORDS = frozenset(listed("yes no true false none odd even nan null undefined dne"))
_SHORT_WORDS = frozenset(
    listed(
        "no if is of or to on in at it an as by we he me my so up us do go be th st nd rd not and but the all any one "
        "two six ten odd yes non for may bad dad cab dab"
    )
)
_NUMBERS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: number for number, word in enumerate(_NUMBERS)}
_MONTH_NAMES = listed("january february march april may june july august september october november december")
_MONTHS = {name: index + 1 for index, name in enumerate(_MONTH_NAMES)}
_MONTHS |= {name[:3]: number for name, number in _MONTHS.items()}
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2})(?::(\d{2}))?)?([ap]m)?\Z", re.IGNORECASE)
_ISO_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})\Z")
_DATE = re.compile(
    rf"(?:({'|'.join(_MONTHS)})\s+(\d{{1,2}})|(\d{{1,2}})\s+({'|'.join(_MONTHS)}))(?:,?\s*(\d{{4}}))?\Z", re.IGNORECASE
)


def split_word(word: str) -> list[str]:
    """The factors that a run of letters stands for: xy is x times y, AB one name, sinx the sine of x.

    Raises:
        UnreadableError: it is a word of plain language.
    """
    if len(word) == 1:
        return [word]
    if word.lower() in _ANSWER_WORDS or word in _SHORT_WORDS:
        raise UnreadableError(word)
    if word.isupper():
        return [word]
    glued = _GLUED.match(word)
    if glued:
        return [glued[1], glued[2]]
    if len(word) > 2 and not _is_product(word):
        raise UnreadableError(word)
    return list(word)


def is_plain_language(word: str) -> bool:
    """Is a run of letters a word, which no variables side by side could be?"""
    try:
        split_word(word)
    except UnreadableError:
        return True
    return False


def _is_product(word: str) -> bool:
    """Three or four letters are variables if they read like no word: abc, xyz, nRT."""
    if len(word) > 4:
        return False
    vowels = [letter for letter in word.lower() if letter in "aeiou"]
    return not vowels or set(word) <= set("abcd") or (vowels == ["a"] and word[0] == "a")


def number_word(words: str) -> int | None:
    """The number that a word from zero to twenty names."""
    return _NUMBER_WORDS.get(words.strip().lower())


def clock_time(text: str) -> tuple[int, str] | None:
    """(seconds, "a", "p" or "") of 3:30 PM."""
    match = _CLOCK.match(text.replace(" ", "").replace(".", ""))
    if not match or not (match[2] or match[4]) or int(match[2] or 0) > 59 or int(match[1]) > 24:
        return None
    hour, half = int(match[1]), (match[4] or "")[:1].lower()
    if half and not 1 <= hour <= 12:
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    elif hour > 12 or hour == 0:
        half = "p" if hour > 12 and hour != 24 else "a"
    return hour * 3600 + int(match[2] or 0) * 60 + int(match[3] or 0), half


def calendar_date(text: str) -> tuple[int | None, int, int] | None:
    """(year, month, day) of July 4, 1776 or 4 July 1776."""
    iso = _ISO_DATE.match(text.replace(" ", ""))
    if iso:
        return int(iso[1]), int(iso[2]), int(iso[3])
    match = _DATE.match(re.sub(r"(\d) ?(?:st|nd|rd|th)\b", r"\1", text))
    if not match:
        return None
    month, day = (match[1], match[2]) if match[1] else (match[4], match[3])
    return int(match[5]) if match[5] else None, _MONTHS[month.lower()], int(day)


def plain_words(text: str) -> str:
    """``text`` for comparison as text: case, articles, LaTeX's upright wrapper and spaces do not count.

    Single letters and names in capitals keep their case: X is not x.
    """
    text = re.sub(r"\\text\s*", " ", text).replace("{", " ").replace("}", " ").strip(" .\"'")
    words = re.findall(r"[A-Za-z]+|\d+(?:\.\d+)?|\S", text)
    kept = [
        word.lower() if len(word) > 3 or not word.isupper() or word.lower() in _ANSWER_WORDS else word for word in words
    ]
    kept = [word if len(word) > 1 else original for word, original in zip(kept, words, strict=True)]
    while len(kept) > 1 and kept[0] in ("a", "an", "the", "A"):
        kept = kept[1:]
    return " ".join(kept)
