"""Text and JSON that others wrote: models, tools, data files, clients.

Python's own decoder raises three kinds of errors, and accepts what its encoder, deeper down the stack, refuses.
"""

from __future__ import annotations

import json
import math
from typing import Any

MOST_LEVELS = 64
"""Of lists and mappings within each other."""
MOST_QUOTED = 200
"""Characters that a message quotes of a value."""
MOST_TOLD = 2000
"""Characters of a message that may quote values."""
_LEVELS_AROUND = 8
"""Of lists and mappings that this project's own files put around others' values."""


def without_surrogates(text: str) -> str:
    """``text`` as UTF-8 can hold it: pairs of surrogates joined, single ones replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def printable(text: str) -> str:
    """``text`` for a terminal: control characters that a model may sample are shown as a replacement mark."""
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.replace("\t", "    ")
    )


def clipped(text: str, most: int = MOST_TOLD) -> str:
    """``text``, without its middle where it is longer than ``most``: a message's end often says what to do."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 1]}…{text[len(text) - end :]}"


def quoted(value: Any, most: int = MOST_QUOTED) -> str:
    """``value`` as Python writes it, as far as a message should quote it."""
    return repr(clipped(value, most)) if isinstance(value, str) else clipped(repr(value), most)


def load_json(text: str | bytes, *, strict: bool = True, finite: bool = True) -> Any:
    """The value in ``text``.

    Args:
        strict: refuse control characters within strings.
        finite: refuse NaN, Infinity and what is beyond the range of a float.

    Raises:
        ValueError: it is no JSON or no UTF-8, nested deeper than ``MOST_LEVELS``, or holds a number of more digits than
            Python converts, beyond the range of a float, or NaN or Infinity, which JSON lacks. The message is one
            line.
    """
    return _loaded(text, strict, finite, MOST_LEVELS)


def load_own_json(text: str | bytes) -> Any:
    """What this project wrote: others' values, NaN among them, within lists and mappings of its own.

    Raises:
        ValueError: as ``load_json``.
    """
    return _loaded(text, False, False, MOST_LEVELS + _LEVELS_AROUND)


def _loaded(text: str | bytes, strict: bool, finite: bool, levels: int) -> Any:
    numbers: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _finite} if finite else {}
    try:
        value = json.loads(text, strict=strict, **numbers)
    except _NotFinite as error:
        raise ValueError(str(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        raise ValueError("a number has too many digits") from error
    check_levels(value, levels)
    return value


class _NotFinite(ValueError):
    """A number that JSON cannot hold."""


def _no_number(written: str) -> Any:
    raise _NotFinite(f"{written} is no number of JSON")


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise _NotFinite(f"{written[:20]} is beyond the range of a float")
    return value


def check_levels(value: Any, levels: int = MOST_LEVELS) -> None:
    """Raise ValueError where ``value`` is nested deeper than ``levels``."""
    level = [value]
    for _ in range(levels):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list, tuple))
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    raise ValueError("nested too deeply")


def retry_after_seconds(header: str | None, longest: float) -> float:
    """The seconds of a server's Retry-After, at most ``longest``; 0 where there is none, or a date."""
    try:
        seconds = float(header or 0.0)
    except ValueError:
        return 0.0
    return min(seconds, longest) if seconds > 0.0 else 0.0
