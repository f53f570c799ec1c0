"""How long the phases of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from run_files.phases import Phase


class StepTimer:
    """Seconds by phase of one step, as timing_s/<phase>. Phases of the same name add up.

    Attributes:
        running: phases under way, the latest last.
        spans: (phase, when it began, its seconds) of each time that a phase has ended; from the timer's own beginning.
        last_change: time.monotonic() when a phase last began or ended, or ``touch`` was called.
    """

    def __init__(self) -> None:
        self.running: list[Phase] = []
        self.spans: list[tuple[Phase, float, float]] = []
        self._began = time.perf_counter()
        self.touch()

    def touch(self) -> None:
        """Note that the phase under way is getting on."""
        self.last_change = time.monotonic()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count the time inside as ``phase``."""
        start = time.perf_counter()
        self.running.append(phase)
        self.touch()
        try:
            yield
        finally:
            self.running.remove(phase)
            self.touch()
            self.spans.append((phase, start - self._began, time.perf_counter() - start))

    @property
    def seconds(self) -> dict[Phase, float]:
        """Of each phase that has ended."""
        result: dict[Phase, float] = {}
        for phase, _, seconds in self.spans:
            result[phase] = result.get(phase, 0.0) + seconds
        return result

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase by its metric's name."""
        return {phase.metric: seconds for phase, seconds in self.seconds.items()}
