"""Waiting for the end of a child together with other events, without pidfds, which some container runtimes lack."""

from __future__ import annotations

import contextlib
import os
import signal


class ChildSignal:
    """A descriptor for ``poll`` that becomes readable whenever a child of this process ends.

    Only for single-threaded processes without signal handling of their own. ``forget`` it in forked children.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def fileno(self) -> int:
        """The descriptor that is readable once a child has ended."""
        return self._reader

    def drain(self) -> None:
        """Take what was signalled."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def forget(self) -> None:
        """Restore the default of SIGCHLD, and close the descriptors."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)
