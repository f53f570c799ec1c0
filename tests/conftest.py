"""What all tests share: a directory for temporary files, theirs and of all that they start, which goes at the end; and
signals as they were before each test.

``--basetemp`` keeps what tests wrote below ``tmp_path``.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron_retool import interruption
from megatron_retool.scratch import scratch_directory

_until_the_end = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    # With torch, transformers and Megatron-Core loaded, a round of the collector takes a second of the tests' time.
    gc.set_threshold(100_000)
    _until_the_end.enter_context(scratch_directory())
    config.add_cleanup(_until_the_end.close)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command that was told to stop ignores signals from then on, as would every process that later tests start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    interruption._State.first_signal = None
    for number, handler in kept.items():
        if handler is not None:
            signal.signal(number, handler)
