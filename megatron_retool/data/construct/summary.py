"""The counts of a construction for people."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table


def show(counts: Counter[str], directory: Path, console: Console) -> None:
    """Print what was accepted, rejected by reason, and has no answer yet."""
    table = Table("traces", str(counts["traces"]))
    table.add_row(f"accepted ({directory / 'train.parquet'})", str(counts["accepted"]))
    table.add_row("  blocks of code in these", str(counts["calls"]))
    table.add_row("  of which the output is another than the model wrote", str(counts["replaced"]))
    for name, count in sorted(counts.items()):
        if name.startswith("rejected: "):
            table.add_row(name, str(count))
    if counts["unanswered"]:
        table.add_row("without an answer: the same command asks again", str(counts["unanswered"]))
    table.columns[1].justify = "right"
    console.print(table)
