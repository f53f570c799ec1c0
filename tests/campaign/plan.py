"""Whom a campaign strikes, when, and how: drawn from a seed. No process is touched here."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # A guard's command line holds that of its server, so guards come first.
    ("engine guard", ("process_guard.py",)),
    ("SGLang scheduler", ("sglang::scheduler",)),
    ("SGLang detokenizer", ("sglang::detoken",)),
    ("SGLang server", ("sglang.launch_server",)),
    ("EngineWorker", ("ray::EngineWorker",)),
    ("learner rank", ("ray::LearnerWorker",)),
    ("shared-memory manager", ("torch_shm_manager",)),
    ("sandbox server", ("code_interpreter.server",)),
    ("sandbox", ("code_interpreter/warden.py",)),
    ("reward process", ("megatron_retool.rewards.",)),
    ("Ray's GCS", ("gcs_server",)),
    ("Ray's raylet", ("raylet/raylet",)),
    ("Ray's agent", ("dashboard/agent.py", "runtime_env/agent/main.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent")),
    ("Ray's monitor", ("log_monitor.py", "autoscaler/_private/monitor.py")),
)
"""Victims by words of their command lines; the first that fits. The driver is known by its process id."""

DRIVER = "driver"

VARIANTS = {
    "demo": (),
    "namespaces": ("tools.code_interpreter.isolation=namespaces",),
    "bubblewrap": ("tools.code_interpreter.isolation=bubblewrap",),
    "rlimits": ("tools.code_interpreter.isolation=rlimits",),
    "async": ("trainer.mode=async", "trainer.max_age=2"),
    "agent": (f"rollout.agent={EXAMPLES / 'run_tools_agent.py'}:run",),
}
"""Settings of a run beside the demo's: each isolation of the sandbox, clocks of their own, an agent on the gateway."""


def variant_of(number: int, names: Sequence[str]) -> str:
    """The variant of a campaign's ``number``-th run, from 1: those of ``names`` in turn."""
    return names[(number - 1) % len(names)]


@dataclass(frozen=True)
class Strike:
    """One blow.

    Attributes:
        continues_after: seconds after which a stopped process goes on; None: never, or it is killed.
    """

    kind: str
    process: int
    signal: signal.Signals
    continues_after: float | None = None

    def __str__(self) -> str:
        if self.signal is not signal.SIGSTOP:
            return self.signal.name
        return "SIGSTOP" if self.continues_after is None else f"SIGSTOP, {self.continues_after:.0f} s"


def kind_of(command_line: str) -> str | None:
    """What a process below the driver is; None for what is not struck."""
    for kind, words in KINDS:
        if any(word in command_line for word in words):
            return kind
    return None


def by_kind(driver: int, processes: Mapping[int, str]) -> dict[str, list[int]]:
    """Process ids by kind, in order.

    Args:
        processes: command lines of the run's processes, by process id.
    """
    found: dict[str, list[int]] = {DRIVER: [driver]}
    for process in sorted(processes):
        kind = kind_of(processes[process]) if process != driver else None
        if kind is not None:
            found.setdefault(kind, []).append(process)
    return found


class Plan:
    """Draws moments and strikes. The same seed and the same processes give the same campaign.

    Args:
        stops: the share of strikes that stop a process instead of killing it.
        terms: the share that asks it to end (SIGTERM), as a scheduler or an operator would.
        only: kinds to choose from; all where it is empty.
    """

    def __init__(self, seed: int, *, stops: float = 0.2, terms: float = 0.0, only: Iterable[str] = ()) -> None:
        self._random = random.Random(seed)
        self._stops, self._terms = stops, terms
        self._only = frozenset(only)
        self._struck: dict[str, int] = {}

    def moment(self, longest: float) -> float:
        """Seconds to wait."""
        return self._random.uniform(0.0, longest)

    def strike(self, found: Mapping[str, Sequence[int]]) -> Strike | None:
        """Choose among the kinds that were struck least, so that a short campaign meets many; None: nobody is there."""
        kinds = sorted(kind for kind in found if not self._only or kind in self._only)
        if not kinds:
            return None
        fewest = min(self._struck.get(kind, 0) for kind in kinds)
        kind = self._random.choice([kind for kind in kinds if self._struck.get(kind, 0) == fewest])
        self._struck[kind] = fewest + 1
        process = self._random.choice(list(found[kind]))
        drawn = self._random.random()
        if drawn >= self._stops:
            asked = drawn < self._stops + self._terms
            return Strike(kind, process, signal.SIGTERM if asked else signal.SIGKILL)
        # Nobody is left who could see that the driver stands still.
        forever = kind != DRIVER and self._random.random() < 0.5
        return Strike(kind, process, signal.SIGSTOP, None if forever else self._random.uniform(1.0, 15.0))
