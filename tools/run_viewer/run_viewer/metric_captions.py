"""What a metric is and what is good or bad of it, out of docs/metrics.md, which says it once for everybody."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GLOSSARY = Path(__file__).with_name("metrics.md")
_BORDER = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Caption:
    """
    Attributes:
        meaning: the formula, as plain text.
        good: what to look for.
    """

    meaning: str
    unit: str
    good: str


def caption_of(name: str) -> Caption | None:
    """None: the glossary has no such metric."""
    return next((caption for pattern, caption in glossary() if pattern.fullmatch(name)), None)


@functools.cache
def glossary() -> tuple[tuple[re.Pattern[str], Caption], ...]:
    """Pattern of names and caption of each, in the order of the page; none where the page is not there."""
    if not GLOSSARY.is_file():
        return ()
    return tuple(_rows(GLOSSARY.read_text(encoding="utf-8")))


def _rows(page: str) -> Iterator[tuple[re.Pattern[str], Caption]]:
    for line in page.splitlines():
        if line.startswith("| `"):
            names, *cells = (cell.strip() for cell in _BORDER.split(line.strip())[1:-1])
            meaning, unit, good = [_plain(cell) for cell in (*cells, "", "", "")][:3]
            for name in re.findall(r"`([^`]+)`", names):
                parts = re.split(r"\{([^}]*)\}", name)
                choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
                for words in itertools.product(*choices):
                    pieces = re.split(r"<\w+>", "".join(words))
                    yield re.compile("[^/]+".join(map(re.escape, pieces))), Caption(meaning, unit, good)


def _plain(cell: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("\\|", "|")
