"""A step of a run on disk: its responses, and what the learner computed of those it trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_retool.errors import InputError
from megatron_retool.loop.rollout_files import read_estimates, step_path, stored_steps
from megatron_retool.parquet_files import read_parquet
from megatron_retool.runs.metrics_file import check_run_directory
from megatron_retool.trajectory import RowKey, Trajectory, read_trajectories

Estimates = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class ViewedStep:
    """
    Attributes:
        trajectories: in the order of the file, without routed experts.
        prompts: the prompt of each as text; "" where the file has none.
        estimates: columns [R] by the row's key, of the responses that were trained on.
    """

    number: int
    trajectories: list[Trajectory]
    prompts: list[str]
    estimates: Mapping[RowKey, Estimates]

    def find(self, group_id: int, index: int, segment: int = 0) -> int:
        """Row of a response.

        Raises:
            ValueError: the step has none such; the message says which it has.
        """
        rows = {t.key: row for row, t in enumerate(self.trajectories)}
        if (group_id, index, segment) in rows:
            return rows[group_id, index, segment]
        segments = sorted(third for *rollout, third in rows if rollout == [group_id, index])
        if segments:
            raise InputError(f"--segment {segment}: response {group_id}/{index} has segments {segments}")
        responses = sorted({second for first, second, _ in rows if first == group_id})
        if responses:
            raise InputError(f"--index {index}: group {group_id} of step {self.number} has responses {responses}")
        groups = list(dict.fromkeys(group for group, *_ in rows))
        raise InputError(f"--group {group_id}: step {self.number} has groups {', '.join(map(str, groups))}")


def load_step(run_dir: Path, number: int | None = None) -> ViewedStep:
    """Step ``number``, or the newest.

    Raises:
        FileNotFoundError: there is no such run, or it has not stored the step.
        UnreadableFile: a file is damaged.
    """
    check_run_directory(run_dir)
    folder = run_dir / "rollouts"
    steps = stored_steps(folder)
    if not steps:
        raise FileNotFoundError(f"{folder} has no step_N.parquet: the run has not finished a step yet")
    if number is not None and number not in steps:
        raise FileNotFoundError(
            f"{folder} has no {step_path(folder, number).name}: --step can be one of {steps[0]} to {steps[-1]}"
        )
    number = steps[-1] if number is None else number
    path, learner = step_path(folder, number), step_path(folder, number, "learner")
    trajectories = read_trajectories(path, routed_experts=False)
    texts = read_parquet(path, [], ["prompt"])
    prompts = texts["prompt"].to_pylist() if "prompt" in texts.column_names else [""] * len(trajectories)
    return ViewedStep(number, trajectories, prompts, read_estimates(learner) if learner.is_file() else {})
