"""Which metrics the validations of a configuration have, and names that are none of them."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_retool.config import ConfigError, DataConfig, RolloutConfig, TrainerConfig
from megatron_retool.data.prompts import read_validation_prompts
from megatron_retool.loop.metrics import rollout_metrics
from megatron_retool.rewards.difficulty import difficulties
from megatron_retool.rewards.evaluation import EvaluationRecord, evaluation_metrics
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory
from run_files.phases import VALIDATION_PREFIXES

BEHAVIOUR = ("num_turns/mean", "num_turns/max", "num_turns/min", "tool/use_rate", "tool/success_rate", "code/")
"""How the names of ``metrics.rollout_metrics`` begin that a validation has too, as val-aux/<name>."""

ALL = "all"
"""The data source that stands for all of them."""

_SHOWN = 60


def is_validation_metric(name: str) -> bool:
    """Whether only validations have it."""
    return name.startswith(VALIDATION_PREFIXES)


def quick_name(name: str) -> str:
    """What a metric of a full validation is called in a quick one: val-quick/all/acc/mean@4 of val-core/…."""
    return f"val-quick/{name.partition('/')[2]}"


def validation_metrics(
    rollout: RolloutConfig, trainer: TrainerConfig, groups: Mapping[str, Iterable[str]]
) -> list[str]:
    """Names of what a run's validations have whatever the reward function returns beside score, acc and pred.

    Args:
        groups: data source -> its groups by difficulty.
    """
    full = _names(rollout.val.n, groups)
    full += [
        f"val-aux/{source}/acc/{group}/mean@{rollout.val.n}" for source, result in groups.items() for group in result
    ]
    quick = _names(rollout.quick_val.n, groups) if trainer.quick_test_freq else []
    return list(dict.fromkeys(full + [quick_name(name) for name in quick]))


def check_named_metrics(trainer: TrainerConfig, data: DataConfig, rollout: RolloutConfig) -> None:
    """Whether validations will have the metrics that early stopping and ``trainer.best_metric`` name, as far as can be
    told before they are held.

    Data sources and their difficulties are those of data.val_files; before these are there any may come. What a reward
    function returns beside score, acc and pred is known only at the first validation, which is checked as well.

    Raises:
        ConfigError: they will not; naming the nearest of those that they have.
        DataError: a validation file is damaged.
    """
    asked = {"trainer.early_stopping.metric": trainer.early_stopping.metric, "trainer.best_metric": trainer.best_metric}
    asked = {key: name for key, name in asked.items() if name}
    groups = _groups(data) if asked else None
    for key, name in asked.items():
        known = validation_metrics(rollout, trainer, groups or dict.fromkeys({ALL, _source_of(name)}, ()))
        if name not in known and not (is_validation_metric(name) and _may_come(name, rollout, groups)):
            raise ConfigError(unknown_metric(key, name, known))


def unknown_metric(key: str, name: str, known: Sequence[str]) -> str:
    """What a user reads whose ``key`` names none of ``known``."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    nearest = f"the nearest are {', '.join(near)}; " if near else ""
    shown = [each for each in known if f"/{ALL}/acc/" in each or each.count("/") == 2]
    shown = [each for each in shown if not each.endswith("/std")][:_SHOWN]
    return (
        f"{key}={name} is no metric of this run's validations: {nearest}they have {', '.join(shown)}, and more that "
        "docs/metrics.md lists"
    )


def _names(n: int, sources: Iterable[str]) -> list[str]:
    """Of validations with n samples, told by evaluating made-up ones."""
    made_up = [EvaluationRecord(source, 0, 1.0, 1.0, "1", 2) for source in sources for _ in range(n)]
    names = list(evaluation_metrics(made_up, bootstrap_draws=1))
    return list(dict.fromkeys([*names, *(f"val-aux/{name}" for name in _behaviour()), "val-aux/reward/scored"]))


@functools.cache
def _behaviour() -> tuple[str, ...]:
    """What is said of how the model behaves, told by made-up responses that do everything; without tools' names."""
    calls = [ToolCall("tool", '{"code": "1"}', status, 0.0, position=0) for status in ("error", "ok")]
    token = np.zeros(1, np.int32)
    rows = [
        Trajectory(
            token, token, np.ones(1, np.bool_), np.zeros(1, np.float32), np.zeros(1, np.int16), token, 0, index,
            FinishReason.STOP, reward=float(index), reward_info={"acc": float(index)}, tool_calls=calls,
        )
        for index in (0, 1)
    ]  # fmt: skip
    return tuple(
        name for name in rollout_metrics(rows) if name.startswith(BEHAVIOUR) and not name.startswith("tool/use_rate/")
    )


def _groups(data: DataConfig) -> dict[str, list[str]] | None:
    """Groups by difficulty of each data source of data.val_files; None where not all of these are files."""
    val_files = data.val_files
    if not val_files or not all(Path(file).exists() for file in val_files):
        return None
    prompts = read_validation_prompts(data)
    groups: dict[str, list[str]] = {ALL: []}
    known = difficulties([(prompt.data_source, prompt.extra_info) for prompt in prompts])
    for prompt, difficulty in zip(prompts, known, strict=True):
        result = groups.setdefault(prompt.data_source, [])
        if difficulty is not None and difficulty.group not in result:
            result.append(difficulty.group)
    return {source: sorted(result) if len(result) > 1 else [] for source, result in groups.items()}


def _source_of(name: str) -> str:
    """The data source that a metric's name may mean."""
    return re.split(r"/(?:acc|reward)/", name.partition("/")[2])[0] or ALL


def _may_come(name: str, rollout: RolloutConfig, groups: Mapping[str, Iterable[str]] | None) -> bool:
    """Whether it is what a tool or the reward function may add, or a group of files that are not there yet."""
    prefix, _, rest = name.partition("/")
    if prefix == "val-core":
        return False
    quick = prefix == "val-quick"
    if rest.startswith(("tool/use_rate/", "reward/failures/")):
        return True
    n = rollout.quick_val.n if quick else rollout.val.n
    match = re.fullmatch(rf"(?P<source>.+)/(?P<name>[^/]+)/(?:mean|std)@{n}", rest)
    if match is None or match["name"] in ("acc", "reward"):
        return False
    return groups is None or match["source"] in groups
