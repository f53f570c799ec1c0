"""A full or failing disk must not end a run for the sake of what only describes it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_retool.tracebacks import drop_tracebacks

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WriteErrors:
    """Counts and names files that could not be written, and lets the run continue.

    Attributes:
        count: failed writes since the start.
    """

    def __init__(self, console: Console) -> None:
        self.count = 0
        self._console = console
        self._reported: set[tuple[Path, int | None]] = set()

    @contextlib.contextmanager
    def tolerated(self, path: str | Path) -> Iterator[None]:
        """An OSError in the block, which writes ``path``, is counted and not raised.

        It is printed once for its directory and cause, and again only after something was written there meanwhile.
        """
        path = Path(path)
        try:
            yield
        except OSError as error:
            self.count += 1
            cause = (path.parent, error.errno)
            if cause not in self._reported:
                self._reported.add(cause)
                # The console's own output may go to the disk that is full.
                with contextlib.suppress(OSError):
                    self._console.print(
                        f"{path} was not written: {error.strerror or error}. The run continues without it, and without "
                        "what cannot be written there after it (monitor/write_errors counts)",
                        style="bold red",
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )
            drop_tracebacks(error)
        else:
            self._reported = {cause for cause in self._reported if cause[0] != path.parent}


def print_to_full_disks() -> None:
    """Where stdout and stderr are files, what these have no room for is lost in place of raising OSError."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            continue
        stream.flush()
        raw = _LosingFile(descriptor, "w", closefd=False)
        text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)


class _LosingFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return len(memoryview(data).cast("B"))
