"""metrics.jsonl, the record of a run: one JSON object per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order. A last line cut off by a crash is left out."""
    rows = []
    path = Path(path)
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def drop_rows_from(path: Path, step: int) -> None:
    """Cut metrics.jsonl off before the first row of ``step`` or later, or before a half-written line.

    This needs no room, which a disk may lack when a run resumes.
    """
    if not path.exists():
        return
    end = 0
    with open(path, "rb+") as handle:
        for line in handle:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                    break
            except json.JSONDecodeError:
                break
            end += len(line)
        handle.truncate(end)
