"""Strikes a run again and again, and sees to it that it reaches its end with nothing lost and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.campaign.checks import rows_of, violations
from tests.campaign.demo import Prepared
from tests.campaign.plan import DRIVER, VARIANTS, Plan, Strike, by_kind, variant_of
from tests.campaign.processes import WatchedRun

HANG_SHARE = 0.4
"""Of the limit: what is left is for the next start."""
POLL_SECONDS = 0.25
ORPHAN_SECONDS = 30.0
AGENT_SECONDS = 75.0
LATE_SECONDS = 60.0
"""So long after a strike's recovery it may still end the run: Ray's servers take SIGTERM in their own time."""
DOOMED_STARTS = 4
"""So many starts in a row without a new step are a violation."""


@dataclass
class Blow:
    """A strike and what came of it."""

    run: str
    victim: str
    signal: str
    moment: float
    """Seconds since the run's start."""
    step: int
    """Last step in metrics.jsonl."""
    outcome: str = ""
    recovery: float | None = None
    """Seconds to the end of the first whole step, or to the run's."""
    exits: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    said: str = ""


class Campaign:
    """Strikes until ``kills`` are done, then lets the last run end.

    Args:
        limit: seconds without a new step, after which a run counts as standing still.
            The run itself ends sooner where it hangs (trainer.hang_timeout_seconds), to be started again.
        longest_waits: seconds to a run's first strike at most, so that it may meet the start or any step, and from a
            recovery to the next strike.
        report: called with each blow, when it is known what came of it.
        variants: names of ``plan.VARIANTS``, which the runs take in turn.
        settings: of all runs, beside those of the demo. Runs with these, or of another variant than the demo, are not
            compared with the one that nobody struck.
    """

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        kills: int,
        *,
        limit: float = 300.0,
        longest_waits: tuple[float, float] = (75.0, 25.0),
        report: Callable[[Blow], None] = lambda blow: None,
        variants: Sequence[str] = ("demo",),
        settings: Sequence[str] = (),
    ) -> None:
        self.prepared = prepared
        self.plan = plan
        self.kills = kills
        self.limit = limit
        self.hang_seconds = HANG_SHARE * limit
        self.longest_waits = longest_waits
        self.report = report
        self.variants = tuple(variants)
        self.settings = tuple(settings)
        self.blows: list[Blow] = []
        self.run_violations: dict[str, list[str]] = {}

    @property
    def failed(self) -> bool:
        return any(blow.violations for blow in self.blows) or any(self.run_violations.values())

    def run(self) -> None:
        number = 0
        while len(self.blows) < self.kills:
            number += 1
            variant = variant_of(number, self.variants)
            settings = [*VARIANTS[variant], *self.settings]
            turn = (number - 1) // len(self.variants)
            self._one_run(f"run_{number:03d}_{variant}", settings, replay=turn % 2 == 0 and not settings)

    def _one_run(self, name: str, settings: Sequence[str], replay: bool) -> None:
        run_dir = self.prepared.runs_dir / name
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [*self.prepared.command(name, self.hang_seconds, replay), *settings]
        with _temporary_directory() as temporary:
            run = WatchedRun(command, temporary, self.prepared.runs_dir / f"{name}.log")
            run.log.unlink(missing_ok=True)
            try:
                run.start()
                self._strike_until_the_end(name, run, run_dir)
                found = violations(run_dir, self.prepared.expected, self.prepared.uninterrupted() if replay else None)
                orphans = run.orphans(ORPHAN_SECONDS)
                if orphans and run.idle_agents(orphans):
                    orphans = run.orphans(AGENT_SECONDS)
                found += [f"still alive: {command}" for command in orphans.values()]
                run.kill()
                found += [f"left behind: {path}" for path in run.left_behind()]
            except RunStandsStill as error:
                found = [str(error)]
            finally:
                run.kill()
        self.run_violations[name] = found

    def _strike_until_the_end(self, name: str, run: WatchedRun, run_dir: Path) -> None:
        start, (longest, next_longest) = time.monotonic(), self.longest_waits
        while True:
            moment = time.monotonic() + self.plan.moment(longest)
            if not self._runs_until(run, moment) or len(self.blows) >= self.kills:
                break
            strike = self.plan.strike(by_kind(run.driver, run.processes()))
            if strike is None:
                continue
            blow = Blow(name, strike.kind, str(strike), round(time.monotonic() - start, 1), _last_step(run_dir))
            self.blows.append(blow)
            try:
                self._deliver(strike, run, run_dir, blow)
            finally:
                self.report(blow)
            longest = next_longest
        self._to_the_end(run, run_dir)

    def _runs_until(self, run: WatchedRun, moment: float) -> bool:
        """Whether the run is still on at that moment; also learns of its processes, which may be gone later."""
        while time.monotonic() < moment:
            if run.exit_code() is not None:
                return False
            run.processes()
            time.sleep(POLL_SECONDS)
        return run.exit_code() is None

    def _deliver(self, strike: Strike, run: WatchedRun, run_dir: Path, blow: Blow) -> None:
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(strike.process, strike.signal)
        if strike.continues_after is not None:
            time.sleep(strike.continues_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(strike.process, signal.SIGCONT)
        least, deadline, starts = len(rows_of(run_dir)), began + self.limit, 0
        blow.outcome = "went on"
        while True:
            code = run.exit_code()
            if code == 0:
                blow.outcome = blow.outcome if blow.exits else "reached its end"
                break
            if code is not None:
                blow.exits.append(code)
                blow.said = run.tail()
                starts += 1
                self._after_an_exit(strike, run, blow, code)
                if starts >= DOOMED_STARTS:
                    blow.violations.append(f"{starts} starts in a row came no step further: {blow.said}")
                    raise RunStandsStill(blow.violations[-1])
                blow.outcome = f"ended with {', '.join(map(str, blow.exits))}; resumed"
                run.start()
                deadline = max(deadline, time.monotonic() + self.limit)
            rows = len(rows_of(run_dir))
            if rows > least + 1:  # one more whole step after the one under way, which may have been past all harm
                break
            least = min(least, rows)
            if time.monotonic() > deadline:
                blow.outcome = "stands still"
                blow.said = run.tail()
                blow.violations.append(f"no step for {self.limit:.0f} s after {blow.signal} of {blow.victim}")
                raise RunStandsStill(blow.violations[-1])
            run.processes()
            time.sleep(POLL_SECONDS)
        blow.recovery = round(time.monotonic() - began, 1)

    def _after_an_exit(self, strike: Strike, run: WatchedRun, blow: Blow, code: int) -> None:
        """What must be so when the command has ended before its time."""
        if code < 0 and strike.kind != DRIVER:
            blow.violations.append(f"the command was killed by signal {-code}, which nobody sent")
        orphans = run.orphans(ORPHAN_SECONDS)
        if orphans and not run.idle_agents(orphans):
            blow.violations += [f"still alive after the command's end: {command}" for command in orphans.values()]

    def _to_the_end(self, run: WatchedRun, run_dir: Path) -> None:
        least, deadline = _last_step(run_dir), time.monotonic() + self.limit
        struck_until, blow = time.monotonic() + LATE_SECONDS, self.blows[-1] if self.blows else None
        while (code := run.exit_code()) != 0:
            if code is not None:
                if blow is None or blow.run != run_dir.name or time.monotonic() > struck_until:
                    raise RunStandsStill(f"ended with {code} without a strike: {run.tail()}")
                blow.exits.append(code)
                blow.outcome += f", ended late with {code}; resumed"
                struck_until = 0.0  # a strike ends a run once
                run.start()
            if (step := _last_step(run_dir)) > least:
                least, deadline = step, time.monotonic() + self.limit
            if time.monotonic() > deadline:
                raise RunStandsStill(f"no step for {self.limit:.0f} s after step {least}: {run.tail()}")
            run.processes()
            time.sleep(POLL_SECONDS)


class RunStandsStill(Exception):
    """A run came no step further, and was given up."""


def write_blow(path: Path, blow: Blow) -> None:
    """Append it to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(blow)) + "\n")


def _last_step(run_dir: Path) -> int:
    return max((int(row["step"]) for row in rows_of(run_dir)), default=-1)


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """A new one with a short path, for Ray's sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
