"""Runs a notebook's cells one after the other in IPython's own shell, in the process that was made for them.

No kernel and no sockets: the cells' output goes where the process's output goes, and what they display, their errors
and where each one begins and ends are written as records, one JSON object a line:

    {"start": cell, "at", "stdout", "stderr"}           seconds since the first cell, bytes of output so far
    {"display": {media type: data}}                     binary data as base64
    {"error": {"ename", "evalue", "traceback"}}
    {"end": status, "at", "stdout", "stderr"}           status: ok, error or timeout

As in Jupyter, an exception ends only its cell.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

MOST_DISPLAYS = 4096
"""Objects that a notebook may display, and exceptions that it may show, together; further ones are dropped."""
INLINE_BACKEND = "module://matplotlib_inline.backend_inline"
"""matplotlib's backend that displays the figures of a cell, as PNG, at its end or by ``plt.show()``."""

_MOST_ERROR_CHARACTERS, _MOST_ERROR_LINES = 20_000, 50
_GRACE_SECONDS, _NOTICED_GRACE_SECONDS = 2.0, 10.0
"""When the process is ended: so long after the limit of a cell that does not notice the interruption (a loop in C), and
so long after the interruption of one that does, and then has an error to format."""


class CellTimeout(BaseException):
    """The cell ran longer than it may. No ``except Exception`` of the cell's own ends it."""


class Records:
    """Writes records as long as they have room.

    Args:
        descriptor: of the stream.
        room: bytes that displayed objects may take up together.
    """

    def __init__(self, descriptor: int, room: int) -> None:
        self._descriptor = descriptor
        self._room = room
        self._left = MOST_DISPLAYS
        self._process = os.getpid()
        self._started = time.monotonic()

    def write(self, **record: Any) -> None:
        """Write a record as a line of JSON; a process that the code has forked writes nothing."""
        if os.getpid() == self._process:  # else one that the code forked
            with contextlib.suppress(OSError):
                os.write(self._descriptor, json.dumps(record).encode() + b"\n")

    def mark(self, **record: Any) -> None:
        """A record with the time and the lengths of the output so far."""
        at = time.monotonic() - self._started
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the code may have replaced or closed them
                stream.flush()
        self.write(**record, at=at, stdout=os.fstat(1).st_size, stderr=os.fstat(2).st_size)

    def display(self, data: Mapping[str, Any]) -> None:
        """What ``display`` shows, or the value of a cell's last expression."""
        shown = {
            str(kind): base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for kind, value in data.items()
        }
        try:
            size = len(json.dumps(shown, allow_nan=False))
        except (TypeError, ValueError, RecursionError):  # of a media type whose data is no text
            shown = {"text/plain": str(data.get("text/plain", type(data).__name__))}
            size = len(json.dumps(shown))
        if size > self._room:
            shown = {"text/plain": f"[{size} bytes left out]"}
        self._room -= min(size, self._room)
        self._left -= 1
        if self._left >= 0:
            self.write(display=shown)

    def error(self, kind: type[BaseException], value: object, lines: list[str]) -> None:
        """Write what a cell raised, within limits."""
        try:
            text = str(value)
        except Exception:
            text = "<exception str() failed>"
        name = kind.__name__
        if name == "_IncompleteInputError":  # Python's own name, since 3.13, for code that ends too early
            name = "SyntaxError"
            lines = [line.replace(kind.__name__, name) for line in lines]
        self._left -= 1
        if self._left >= 0:
            kept = [line[:_MOST_ERROR_CHARACTERS] for line in lines[:_MOST_ERROR_LINES]]
            self.write(error={"ename": name, "evalue": text[:_MOST_ERROR_CHARACTERS], "traceback": kept})


def make_shell(records: Records) -> Any:
    """IPython's shell, made to tell its displays and errors to ``records``."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)

    def show(data: Mapping[str, Any], *_: object, **__: object) -> None:
        records.display(data)

    def run_command(command: str) -> None:
        sys.stdout.flush()
        shell.system_raw(command)

    def end() -> None:
        shell.exit_now = True

    def nothing(*_: object, **__: object) -> None:
        pass

    vars(shell.displayhook).update(write_output_prompt=nothing, write_format_data=show, finish_displayhook=nothing)
    vars(shell.display_pub).update(publish=show, clear_output=nothing)
    vars(shell).update(
        _showtraceback=records.error,
        _tee=lambda channel: contextlib.nullcontext(),  # IPython keeps a copy of all output, which is never read
        system=run_command,  # IPython's own needs a terminal
        enable_gui=nothing,
        ask_exit=end,
    )
    return shell


def run_cells(cells: list[str], cell_timeout: float, descriptor: int, room: int) -> int:
    """Run them and return the exit status, which is 0 whatever they raise.

    Args:
        cell_timeout: seconds of each; 0: no limit.
        descriptor: of the records.
        room: bytes that displayed objects may take up together.
    """
    records = Records(descriptor, room)
    process = os.getpid()
    sys.argv = [""]
    os.environ["MPLBACKEND"] = INLINE_BACKEND
    shell = make_shell(records)
    if "matplotlib" in sys.modules:  # imported along with the sandbox, it knows nothing of this shell
        shell.enable_matplotlib("inline")
    for index, cell in enumerate(cells):
        records.mark(start=index)
        status = "timeout"
        with contextlib.suppress(CellTimeout), _limited(cell_timeout):
            try:
                result = shell.run_cell(cell, store_history=True)
                failure = result.error_before_exec or result.error_in_exec
            except Exception as error:  # a cell that IPython itself stumbles over
                failure = error
                records.error(type(error), error, [f"{type(error).__name__}: {error}"])
            status = "ok" if failure is None else "timeout" if isinstance(failure, CellTimeout) else "error"
        if os.getpid() != process:
            os._exit(0)
        records.mark(end=status)
        if shell.exit_now:
            break
    return 0


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise CellTimeout in the block after ``seconds``; where nothing comes of it, end the process."""
    if not seconds:
        yield
        return

    def interrupt(*_: object) -> None:
        __tracebackhide__ = True  # IPython leaves such frames out
        faulthandler.dump_traceback_later(_NOTICED_GRACE_SECONDS, exit=True, file=nowhere)
        raise CellTimeout(f"the cell ran longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    with open(os.devnull, "w") as nowhere:
        # Its thread needs no Python: it also ends a loop in C code.
        faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True, file=nowhere)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
