"""What SIGINT and SIGTERM do to a command: it stops once, in order, and says one line.

    end_when_interrupted()              # from the first line on: nothing runs yet, so the process ends at once
    with interrupts():                  # KeyboardInterrupt, whose way out is the clean-up
        ...
    with interrupts(task.cancel):       # or whatever else begins the clean-up
        ...

Only the first signal counts. Those that follow would stop the clean-up itself, so they are ignored; only when it has
taken ``PATIENCE_SECONDS`` does one end the process as it is, and what it started ends with it.

Imports only the standard library, for it is at work before anything else is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType

from megatron_retool.scratch import remove_own_scratch, scratch_directory

INTERRUPTED = 130
"""Exit status of a command that a signal stopped."""

PATIENCE_SECONDS = 30.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STAGE_OF = "MEGATRON_RETOOL_STAGE_OF"
_STAGE_END_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def raise_interrupt() -> None:
    """Raise KeyboardInterrupt: what SIGINT does to a command by default."""
    raise KeyboardInterrupt


def end_at_once() -> None:
    """End this process, which has started no other, without what Python does at its end."""
    _say("stopped: nothing was running yet")
    remove_own_scratch()
    os._exit(INTERRUPTED)


class _State:
    action: Callable[[], object] = staticmethod(end_at_once)
    first_signal: float | None = None
    how_to_go_on: Callable[[], str] | None = None
    is_stage = False


def end_when_interrupted() -> None:
    """Take the signals over for the whole process. A stage also ends when the command ends that started it."""
    parent = os.environ.pop(_STAGE_OF, None)
    if parent is not None:
        _State.is_stage = True
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            os._exit(INTERRUPTED)
    take_signals()


def take_signals() -> None:
    """Take the signals over, again where a library has taken them for itself."""
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


@contextlib.contextmanager
def interrupts(
    action: Callable[[], object] = raise_interrupt, *, how_to_go_on: Callable[[], str] | None = None
) -> Iterator[None]:
    """For the length of the block, the first signal calls ``action`` in the main thread.

    Args:
        how_to_go_on: asked when all has stopped: what the user reads beside that.
    """
    previous, _State.action = _State.action, action
    if how_to_go_on is not None:
        _State.how_to_go_on = how_to_go_on
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, _on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _State.action = previous


def stopped(error: BaseException) -> bool:
    """Whether ``error`` is how a command looks that a signal stopped; if it is, say so in one line."""
    if _State.first_signal is None and not isinstance(error, KeyboardInterrupt):
        return False
    for number in _SIGNALS:
        # Python gives up its handlers before it ends, and one more signal would then kill.
        signal.signal(number, signal.SIG_IGN)
    how = f"; {_State.how_to_go_on()}" if _State.how_to_go_on is not None else ""
    _say(f"stopped: every process of the run has ended{how}")
    return True


def run_interruptible(command: Callable[[], int]) -> int:
    """Run a whole command, with a directory for its temporary files; its exit status (1: a fault), or INTERRUPTED."""
    try:
        with scratch_directory(), interrupts():
            return command()
    except (KeyboardInterrupt, Exception) as error:
        if stopped(error):
            return INTERRUPTED
        traceback.print_exc()
        from megatron_retool.errors import FAULT  # not before it is known that packages are there

        print(FAULT, file=sys.stderr)
        return 1


def run_stage(command: Sequence[str], while_running: Callable[[int], AbstractContextManager[None]]) -> int:
    """Run a command of this project as a stage of this one; its exit status.

    It has a session of its own, so that a terminal's Ctrl-C reaches only this process, which then tells the stage.

    Args:
        while_running: given the stage's process id; entered for as long as it runs.

    Raises:
        KeyboardInterrupt: this process was told to stop. The stage has ended.
    """
    environment = {**os.environ, _STAGE_OF: str(os.getpid())}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        with while_running(process.pid):
            return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STAGE_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _on_signal(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if _State.first_signal is None:
        _State.first_signal = now
        _State.action()
    elif now - _State.first_signal > PATIENCE_SECONDS:
        os._exit(INTERRUPTED)


def _say(text: str) -> None:
    """Print, unless this is a stage: the command that it belongs to speaks for it."""
    if not _State.is_stage:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            os.write(1, f"{text}\n".encode())
