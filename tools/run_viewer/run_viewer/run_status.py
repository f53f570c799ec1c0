"""Whether a run is under way, at its end or dead, from what lies on disk: there is no one to ask."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from run_files import ENVIRONMENT_FILE, METRICS_FILE, PIPELINE_FILE
from run_files.phases import Phase
from run_files.process import still_runs
from run_viewer.curves import Curves, is_number
from run_viewer.json_numbers import values_for_json

State = Literal["running", "finished", "died", "not started"]
_QUIET_SECONDS = 300.0
"""Without a word for this long, and for as many steps as below, a run is taken for dead."""
_QUIET_STEPS = 5.0


@dataclass(frozen=True)
class RunStatus:
    """
    Attributes:
        step: the last one with a row of metrics; None: none has.
        reason: on what the state is founded.
    """

    state: State
    step: int | None
    total_steps: int | None
    reason: str


def run_status(
    run_dir: Path, settings: Mapping[str, Any], curves: Curves, problems: list[str], now: float | None = None
) -> RunStatus:
    """The run's state. Its process is asked for where it ran on this host; else silence is what tells.

    Args:
        problems: gets a sentence for a file that cannot be read.
        now: seconds since 1970; the clock's by default.
    """
    total = _whole(settings.get("trainer.total_steps"))
    step = max(curves.steps, default=None)

    def status(state: State, reason: str) -> RunStatus:
        return RunStatus(state, step, total, reason)

    if step is not None and total is not None and step >= total:
        return status("finished", f"step {step} of {total} is the last one")
    exported = read_json(run_dir / PIPELINE_FILE, problems).get("steps")
    if step is not None and isinstance(exported, dict) and exported.get("export") == step:
        return status("finished", f"its end was reached: the model of step {step} was exported")
    alive = still_runs(read_json(run_dir / ENVIRONMENT_FILE, problems))
    if alive:
        return status("running", "its process is at work on this host")
    written = _last_written(run_dir)
    if written is None:
        return status("not started", "there are no metrics, logs or checkpoints")
    silence = max(0.0, (time.time() if now is None else now) - written)
    seconds = [row[Phase.STEP.metric] for row in curves.rows if is_number(row.get(Phase.STEP.metric))]
    allowed = max(_QUIET_SECONDS, _QUIET_STEPS * median(seconds) if seconds else 0.0)
    if alive is None and silence <= allowed:
        return status("running", f"something was written {silence:.0f} s ago")
    complete = max(map(_step_of_checkpoint, (run_dir / "checkpoints").glob("global_step_*/COMPLETE")), default=0)
    resume = f"checkpoint of step {complete} is complete" if complete else "no checkpoint is complete"
    sign = f"nothing was written for {silence:.0f} s" if alive is None else "its process is gone from this host"
    return status("died", f"{sign}, and the last step was not reached; {resume}")


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """A file of the run that may be missing; ``problems`` gets a sentence where it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return {}
    if not isinstance(result, dict):
        problems.append(f"{path} is no JSON object")
        return {}
    return {key: values_for_json(value) for key, value in result.items()}


def _step_of_checkpoint(marker: Path) -> int:
    digits = marker.parent.name.removeprefix("global_step_")
    return int(digits) if digits.isdecimal() else 0


def _last_written(run_dir: Path) -> float | None:
    """When a log, the metrics, a rollout or a checkpoint was last written; seconds since 1970."""
    paths: Sequence[Path] = [
        run_dir / METRICS_FILE,
        *(
            path
            for folder in ("logs", "rollouts", "checkpoints", "validation")
            for path in (run_dir / folder).glob("*")
        ),
    ]
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # gone since it was listed
            continue
    return max(times, default=None)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
