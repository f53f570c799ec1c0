"""Which modules a declaration of low precision names: by name, by pattern or by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from conversion.model.config_reader import UnsupportedArchitecture, shown

CURE = "start from the full-precision weights"
_MOST_PATTERNS = 1000
_MOST_PATTERN_LENGTH = 1000
_PATTERN_SECONDS = 1.0


@dataclass(frozen=True)
class Names:
    """Modules that a list of names means.

    Attributes:
        whole: names.
        below: whether everything below one of ``whole`` is meant too.
        prefixes: how names begin.
        patterns: regular expressions that match from a name's beginning on.
        parts: what may stand between two points of a name; those of ``part_patterns`` match all of it.
        linear: whether every linear layer is meant.
        embeddings: whether every embedding is.
    """

    whole: frozenset[str] = frozenset()
    below: bool = False
    prefixes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    parts: frozenset[str] = frozenset()
    part_patterns: tuple[str, ...] = ()
    linear: bool = False
    embeddings: bool = False

    def by_name(self, module: str) -> bool:
        """Whether the module's name is meant."""
        pieces = module.split(".")
        above = (".".join(pieces[:count]) for count in range(1, len(pieces)))
        return (
            module in self.whole
            or module.startswith(self.prefixes)
            or (self.below and any(name in self.whole for name in above))
            or not self.parts.isdisjoint(pieces)
            or any(_matches(pattern, module) for pattern in self.patterns)
            or any(_matches(pattern, piece) for pattern in self.part_patterns for piece in pieces)
        )

    def by_class(self, module: str) -> bool:
        """Whether the module's class is meant."""
        return self.embeddings if module.rpartition(".")[2].startswith("embed") else self.linear


@lru_cache(maxsize=_MOST_PATTERNS)
def _compiled(pattern: str) -> Any:
    import regex

    return regex.compile(pattern)


def _matches(pattern: str, name: str) -> bool:
    try:
        return _compiled(pattern).match(name, timeout=_PATTERN_SECONDS) is not None
    except TimeoutError:
        raise UnsupportedArchitecture(
            f"the pattern {shown(pattern)} takes more than a second for {name}: write a simpler one, or {CURE}"
        ) from None


def check_patterns(patterns: Sequence[str], place: str) -> None:
    """Raise UnsupportedArchitecture, with the key ``place``, where there are too many patterns, or one is none."""
    import regex

    if len(patterns) > _MOST_PATTERNS:
        raise UnsupportedArchitecture(f"{place} has {len(patterns)} patterns: no more than {_MOST_PATTERNS} are read")
    for pattern in patterns:
        try:
            if len(pattern) > _MOST_PATTERN_LENGTH:
                raise ValueError(f"more than {_MOST_PATTERN_LENGTH} characters")
            _compiled(pattern)
        except (ValueError, OverflowError, RecursionError, regex.error) as error:
            raise UnsupportedArchitecture(f"{place}: {shown(pattern)} is no pattern: {error}") from None
