"""One live line for work that takes a while: a bar, a count, the time left, and a few figures that change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressLine:
    """Handle on the live line: ``advance`` moves the bar, ``extend`` raises its total, ``note`` sets the text."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: int = 1) -> None:
        self._progress.advance(self._task, amount)

    def extend(self, amount: int) -> None:
        self._progress.update(self._task, total=(self._progress.tasks[self._task].total or 0) + amount)

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=text)


@contextmanager
def progress_line(console: Console, title: str, total: int) -> Iterator[ProgressLine]:
    """Show a progress line for the length of the block; it leaves nothing behind on the screen."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        # A file or a pipe gets the step table only.
        disable=not console.is_terminal,
    )
    with progress:
        yield ProgressLine(progress, progress.add_task(title, total=total, note=""))
