"""Tasks of the package reasoning_gym, made as they are needed and scored by the package's own checks."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_retool.config import ConfigError
from sglang_rollout.environments.base import Action, Environment, Start, Step, row_number

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnvironment(Environment):
    """One question and one answer, in <answer> tags. A row of the data stands for a task: the same one for the whole
    group, in every epoch.

    Args:
        dataset: name of the task, such as chain_sum.
        size: how many tasks there are; rows share them out.
        seed: of the tasks.
        settings: of the data set, such as {min_terms: 2}.

    Raises:
        ConfigError: the package is missing, or knows no such task or setting.
    """

    replays = True

    def __init__(
        self, *, dataset: str, size: int = 10_000, seed: int = 0, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._tasks = _tasks(dataset, size, seed, json.dumps(dict(settings or {}), sort_keys=True))
        self._size = size
        self._answer = ""

    def reset(self, row: Mapping[str, Any]) -> Start:
        """The question of the row's task."""
        self._task = self._tasks[row_number(row) % self._size]
        question = f"{self._task['question']}\n\nGive the final answer in <answer></answer>."
        return Start([{"role": "user", "content": question}])

    def step(self, action: Action) -> Step:
        """Take the last <answer> of the turn; the episode ends."""
        result = _ANSWER.findall(action.text)
        self._answer = result[-1].strip() if result else ""
        return Step(done=True)

    def score(self) -> dict[str, Any]:
        """The task's own score of the answer, and whether it is full."""
        score = float(self._tasks.score_answer(self._answer or None, entry=self._task))
        return {"reward": score, "acc": float(score == 1.0), "pred": self._answer}


@functools.cache
def _tasks(dataset: str, size: int, seed: int, settings: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"rollout.environment=reasoning_gym needs the package of that name ({error}): pip install reasoning-gym"
        ) from error
    try:
        return reasoning_gym.create_dataset(dataset, size=size, seed=seed, **json.loads(settings))
    except Exception as error:
        raise ConfigError(f"rollout.environment_kwargs: reasoning_gym makes no such tasks: {error}") from error
