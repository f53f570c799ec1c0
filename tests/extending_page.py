"""The files that docs/extending.md shows, by name."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def snippets() -> dict[str, str]:
    """File name -> content of every snippet; each begins with a comment that names its file."""
    found = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


def write_snippets(directory: Path) -> None:
    for name, content in snippets().items():
        (directory / name).write_text(content, encoding="utf-8")
