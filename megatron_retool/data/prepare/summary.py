"""A manifest for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(manifest: dict[str, Any], directory: Path, console: Console) -> None:
    """Print what was read, written and dropped of each output, and its rows by level, subject and the like."""
    source = manifest["source"]
    revision = f" at {source['revision']}" if source["revision"] else ""
    console.print(f"{manifest['name']} from {source['where']}{revision}", markup=False, highlight=False)
    table = Table("file", "", "rows")
    for entry in manifest["outputs"].values():
        table.add_row(str(directory / entry["file"]), "read", f"{entry['rows_read']:,}")
        table.add_row("", "written", f"{entry['rows_written']:,}")
        for reason, dropped in entry["dropped"].items():
            table.add_row("", f"dropped: {reason} (first: {'; '.join(dropped['first'])})", f"{dropped['rows']:,}")
        for name, values in entry["counts"].items():
            shown = ", ".join(f"{value}: {rows}" for value, rows in values.items())
            table.add_row("", f"written by {name}: {shown}", "")
    table.columns[2].justify = "right"
    console.print(table)
