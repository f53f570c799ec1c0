"""The end of a run whose validations get no better: ``trainer.early_stopping``.

All that is remembered are the metric's values by step. They are in every checkpoint, so that a resumed run judges
by what it saw before; what they mean is worked out again each time, under the present patience and min_delta.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_retool.config import ConfigError, EarlyStoppingConfig
from megatron_retool.loop.validation_metrics import is_validation_metric, unknown_metric


@dataclass(frozen=True)
class StoppingVerdict:
    """What a row of values comes to.

    Attributes:
        best, best_step: the last value that was better than all before it by more than min_delta, and its step.
        waited: values since.
    """

    best: float
    best_step: int
    waited: int


def judge(values: Sequence[tuple[int, float]], mode: str, min_delta: float) -> StoppingVerdict:
    """
    Args:
        values: (step, value) in the order of the steps; at least one.
        mode: ``early_stopping.mode``, max or min.
        min_delta: a value counts as better where it exceeds the best one by more than this.
    """
    sign = 1.0 if mode == "max" else -1.0
    (best_step, best), waited = values[0], 0
    for step, value in values[1:]:
        if sign * (value - best) > min_delta:
            best_step, best, waited = step, value, 0
        else:
            waited += 1
    return StoppingVerdict(best, best_step, waited)


class EarlyStopping:
    """Watches one metric over the validations of a run."""

    def __init__(self, settings: EarlyStoppingConfig) -> None:
        self._settings = settings
        self._values: list[tuple[int, float]] = []

    @property
    def stops(self) -> bool:
        """Whether patience is at its end."""
        return bool(self._values) and self._verdict.waited >= self._settings.patience

    @property
    def reason(self) -> str:
        """Why the run ends, in a sentence without a full stop."""
        settings, verdict = self._settings, self._verdict
        better = "greater" if settings.mode == "max" else "smaller"
        margin = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
        return (
            f"early stopping: {settings.metric} was {verdict.best:.4g} in step {verdict.best_step} and is not {better}"
            f"{margin} in the {verdict.waited} validations since (trainer.early_stopping.patience={settings.patience})"
        )

    def record(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the metric's value of ``step`` where ``metrics`` have one; a value of that step from before is replaced.

        Returns:
            early_stopping/{best,best_step,waited} once it was taken; else nothing.

        Raises:
            ConfigError: a validation of the metric's kind lacks it, and it is one of those that are always there.
        """
        name = self._settings.metric
        value = metrics.get(name, math.nan) if name else math.nan
        if not math.isfinite(value):
            self._check_name(metrics)
            return {}
        self._values = [each for each in self._values if each[0] != step] + [(step, float(value))]
        verdict = self._verdict
        return {
            "early_stopping/best": verdict.best,
            "early_stopping/best_step": float(verdict.best_step),
            "early_stopping/waited": float(verdict.waited),
        }

    def _check_name(self, metrics: Mapping[str, float]) -> None:
        """Only validations have metrics named by what a reward function returns, as means over samples."""
        name = self._settings.metric
        if "@" not in name or name in metrics:
            return
        kind = name.partition("/")[0]
        there = [each for each in metrics if is_validation_metric(each)]
        if any(each.startswith(f"{kind}/") for each in there):
            raise ConfigError(unknown_metric("trainer.early_stopping.metric", name, there))

    def state_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {"metric": self._settings.metric, "values": [list(each) for each in self._values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; the values of another metric say nothing of this one."""
        if state.get("metric") == self._settings.metric:
            self._values = [(int(step), float(value)) for step, value in state["values"]]

    @property
    def _verdict(self) -> StoppingVerdict:
        return judge(self._values, self._settings.mode, self._settings.min_delta)
