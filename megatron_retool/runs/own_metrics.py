"""Metrics of one's own: functions of trajectories that ``trainer.metrics`` names.

They are called with what a step generated, and with what a validation did. A run outlives one that fails: its metrics
are left out of that step, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_retool.config import ConfigError, TrainerConfig
from megatron_retool.registry import Extension, ExtensionError, Registry
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory

logger = logging.getLogger(__name__)

PREFIX = "own/"
StepMetric = Callable[..., Mapping[str, float]]
"""metric(trajectories, *, settings) -> numbers by name."""

step_metrics: Registry[StepMetric] = Registry(
    "trainer.metrics", takes=("trajectories",), kwargs_key="trainer.metrics_kwargs"
)


def own_metrics(config: TrainerConfig, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """own/<name>: what the functions of ``config.metrics`` say of scored trajectories, without those that fail."""
    result: dict[str, float] = {}
    for target in config.metrics if trajectories else ():
        try:
            result |= _called(_bound(config, target), trajectories)
        except ExtensionError as error:
            logger.warning("%s: left out of this step", error)
    return result


def check_own_metrics(config: TrainerConfig) -> None:
    """Try each function on made-up trajectories.

    Raises:
        ConfigError: one cannot be loaded, raises, or returns no numbers by name; or keyword arguments are for none.
    """
    for target in config.metrics_kwargs:
        if target not in config.metrics:
            raise ConfigError(f"trainer.metrics_kwargs.{target}: {target} is none of trainer.metrics={config.metrics}")
    try:
        for target in config.metrics:
            _called(_bound(config, target), _made_up())
    except ExtensionError as error:
        raise ConfigError(str(error)) from error


def _bound(config: TrainerConfig, target: str) -> Extension[StepMetric]:
    return step_metrics.bind(target, config.metrics_kwargs.get(target))


def _called(metric: Extension[StepMetric], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    result: Any = metric.attempt(trajectories)
    if not isinstance(result, Mapping):
        raise ExtensionError(f"{metric.label}: it returned {type(result).__name__}: return numbers by name, as a dict")
    for name, value in result.items():
        if not isinstance(name, str) or not name or not hasattr(value, "__float__"):
            raise ExtensionError(f"{metric.label}: it returned {str(value)[:40]!r} as {name!r}: return numbers by name")
    return {f"{PREFIX}{name}": float(value) for name, value in result.items()}


def _made_up() -> list[Trajectory]:
    """Two answers to a prompt: a right one in two turns, with a tool call between them, and a wrong one in one turn."""
    call = ToolCall("code_interpreter", '{"code": "print(1)"}', "ok", 0.1)
    common: dict[str, Any] = {"prompt_ids": [1, 2], "group_id": 0, "extra_info": {"data_source": "made_up"}}
    right: dict[str, Any] = {
        "response_ids": [3, 4, 5, 6], "loss_mask": [True, True, False, True], "turn_ids": [0, 0, -1, 1],
        "rollout_log_probs": [-0.5, -1.0, 0.0, -0.2], "weight_versions": [1, 1, -1, 1], "index": 0, "reward": 1.0,
        "reward_info": {"score": 1.0, "acc": 1.0, "pred": "1"}, "tool_calls": [call],
    }  # fmt: skip
    wrong: dict[str, Any] = {
        "response_ids": [7], "loss_mask": [True], "turn_ids": [0], "rollout_log_probs": [-2.0], "weight_versions": [1],
        "index": 1, "reward": -1.0, "reward_info": {"score": -1.0, "acc": 0.0, "pred": ""},
    }  # fmt: skip
    return [
        Trajectory(**common, **right, finish_reason=FinishReason.STOP),
        Trajectory(**common, **wrong, finish_reason=FinishReason.LENGTH),
    ]
