"""The known key that somebody may have meant by an unknown one; none where no key is really near."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """One of ``known``, or None: a name of the same section, else of another one, that is the same, or misspelt, or
    shortened, or made longer.

    Names are compared and not whole keys: the sections' names make any two keys look alike. Names that mean
    something else in each section (n, path, enable, …) are looked for only in the key's own part of the tree.
    """
    section, _, name = key.rpartition(".")
    top = key.partition(".")[0]
    siblings = [each for each in known if each.rpartition(".")[0] == section]
    nearby = [each for each in known if each.startswith(f"{top}.")]
    counts = Counter(each.rpartition(".")[2] for each in known)
    elsewhere = [each for each in known if not section or counts[each.rpartition(".")[2]] == 1]
    for candidates in (siblings, sorted(nearby, key=_depth), sorted(elsewhere, key=_depth)):
        for is_near in (_equal, _misspelt, _parts_of_one_another):
            for candidate in candidates:
                if is_near(name, candidate.rpartition(".")[2]):
                    return candidate
    return None


def _depth(key: str) -> int:
    return key.count(".")


def _equal(name: str, other: str) -> bool:
    return name == other


def _misspelt(name: str, other: str) -> bool:
    """One letter in six is wrong, missing or too many; at least one may be, in names of four letters or more."""
    shortest, longest = sorted((len(name), len(other)))
    most = max(1, longest // 6)
    return longest >= 4 and longest - shortest <= most and _edits(name, other) <= most


def _parts_of_one_another(name: str, other: str) -> bool:
    """learning_rate_decay and learning_rate, tensor_parallel_size and tensor_model_parallel_size, test_frequency and
    test_freq."""
    shorter, longer = sorted((name, other), key=len)
    words = shorter.split("_")
    return len(words) > 1 and (longer.startswith(shorter) or set(words) < set(longer.split("_")))


def _edits(one: str, other: str) -> int:
    """Letters to put in, take out or change between two words (Levenshtein's distance)."""
    row = list(range(len(other) + 1))
    for index, letter in enumerate(one, start=1):
        above, row[0] = row[0], index
        for column, against in enumerate(other, start=1):
            above, row[column] = row[column], min(above + (letter != against), row[column] + 1, row[column - 1] + 1)
    return row[-1]
