"""A stage of fine-tuning: its data, the order of its batches, and the means of its metrics."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_retool.config import SFTStage
from megatron_retool.data.preference_dataset import PreferenceDataset
from megatron_retool.data.scored_dataset import ScoredDataset
from megatron_retool.data.sft_dataset import BatchOrder, SFTDataset

Dataset = SFTDataset | PreferenceDataset | ScoredDataset


@dataclass
class FineTuningStage:
    """One stage with its data. Its steps are ``first_step`` … ``last_step`` of the run, counted from 1."""

    settings: SFTStage
    train: Dataset
    val: Dataset | None
    order: BatchOrder
    first_step: int
    last_step: int
    report: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of the stage."""
        return self.last_step - self.first_step + 1

    def describe(self) -> dict[str, Any]:
        """What the order of its batches depends on, and its loss where it is not the usual one."""
        described = {
            "name": self.settings.name,
            "steps": self.steps,
            "batch_size": self.settings.batch_size,
            "conversations": len(self.train),
        }
        return described if self.settings.loss == "cross_entropy" else {**described, "loss": self.settings.loss}


class Window:
    """Means over the steps since the last row of metrics."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._tokens = 0
        self._seconds = 0.0
        self._peak_seconds: list[float] = []

    def add(self, metrics: dict[str, float], tokens: int, peak_seconds: float | None, seconds: float) -> None:
        """Count a step's metrics, tokens and seconds."""
        for name, value in metrics.items():
            self._values[name].append(value)
        self._tokens += tokens
        self._seconds += seconds
        if peak_seconds is not None:
            self._peak_seconds.append(peak_seconds)

    def metrics(self) -> dict[str, float]:
        """sft/loss, grad_norm (means) and lr (the last), perf/throughput (tokens/s), time_per_step and mfu."""
        row = {f"sft/{name}": float(np.mean(values)) for name, values in self._values.items()}
        row["sft/lr"] = self._values["lr"][-1]
        row["perf/throughput"] = self._tokens / self._seconds
        row["perf/time_per_step"] = self._seconds / len(self._values["lr"])
        if self._peak_seconds:
            row["perf/mfu/sft"] = sum(self._peak_seconds) / self._seconds
        return row
