"""What is shown of work that takes a while: a live line on a terminal, now and then a plain one in a file or pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_SECONDS = 20.0
"""Before the first plain line, and between the next ones."""
_GROWTH = 0.1
"""After some minutes the pauses are this part of the time gone by."""


class ProgressLine:
    """A count, its total and a few words. ``advance`` counts, ``extend`` raises the total, ``note`` sets the words."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self.total = total
        self.text = ""
        self.changed: Callable[[], object] = lambda: None

    def advance(self, amount: int = 1) -> None:
        """``amount`` more are done."""
        self.done += amount
        self.changed()

    def extend(self, amount: int) -> None:
        """``amount`` more are to be done."""
        self.total += amount
        self.changed()

    def note(self, text: str) -> None:
        """Show ``text`` beside the count."""
        self.text = text
        self.changed()


@contextmanager
def progress_line(console: Console, title: str, total: int) -> Iterator[ProgressLine]:
    """Show how far the block has come: a bar that leaves nothing behind on a terminal, plain lines elsewhere."""
    line = ProgressLine(total)
    with ExitStack() as stack:
        if console.is_terminal:
            progress = stack.enter_context(_bar(console))
            task = progress.add_task(title, total=total, note="")
            line.changed = lambda: progress.update(task, completed=line.done, total=line.total, note=line.text)
        else:
            stack.enter_context(
                _repeated(
                    lambda seconds: _print_plain(
                        console,
                        f"{title}: {line.done} of {line.total} after {seconds:.0f} s"
                        + (line.text and f", {line.text}"),
                    )
                )
            )
        yield line


class Activities:
    """What is being started or sent, several things side by side.

    On a terminal one live line names them. Elsewhere each has a line when it begins and one when it is done, and what
    takes long is named again.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: list[str] = []
        self._display = ExitStack()
        self._show: Callable[[str], object] = lambda text: None

    @contextmanager
    def part(self, text: str) -> Iterator[None]:
        """``text`` is under way for the length of the block, as in "starting 2 engines"."""
        began = time.monotonic()
        if not self._console.is_terminal:
            _print_plain(self._console, text)
        self._change(lambda: self._running.append(text))
        try:
            yield
            if not self._console.is_terminal:
                _print_plain(self._console, f"{text}: done after {time.monotonic() - began:.1f} s")
        finally:
            self._change(lambda: self._running.remove(text))

    def _change(self, change: Callable[[], None]) -> None:
        before = bool(self._running)
        change()
        if before and not self._running:
            self._display.close()
        elif not before and self._running:
            self._open()
        if self._running:
            self._show(", ".join(self._running))

    def _open(self) -> None:
        if self._console.is_terminal:
            status = self._display.enter_context(self._console.status(""))
            self._show = status.update
        else:
            self._display.enter_context(
                _repeated(
                    lambda seconds: _print_plain(
                        self._console, f"still {', '.join(self._running)} after {seconds:.0f} s"
                    )
                )
            )


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )


def pause(seconds: float) -> float:
    """Seconds until the next plain line about work that began ``seconds`` ago."""
    return max(PLAIN_SECONDS, _GROWTH * seconds)


@contextmanager
def _repeated(report: Callable[[float], None]) -> Iterator[None]:
    """Call ``report(seconds since the block began)`` from a thread, at growing distances, until the block ends."""
    ended = threading.Event()
    began = time.monotonic()

    def run() -> None:
        while not ended.wait(pause(time.monotonic() - began)):
            report(time.monotonic() - began)

    thread = threading.Thread(target=run, name="plain-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
