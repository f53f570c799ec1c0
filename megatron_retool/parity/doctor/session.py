"""What every step gets to know: which machine this is, and where steps leave what later ones need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_retool.parity.doctor.outcome import Skipped, StepFailed
from megatron_retool.parity.ranks import Nodes, RankFailed, answer_of_ranks

MOST_RANKS = 8
"""Steps with several ranks take no more: what a layout can break, it breaks on eight."""


@dataclass(frozen=True)
class DoctorSession:
    """
    Attributes:
        directory: of this call, where steps leave files and logs.
        gpus: that steps may use; 0: a host without CUDA.
        asked: GPUs that --gpus asks for; None: as many as there are.
        nodes: hosts that take part; None: only this one.
    """

    directory: Path
    gpus: int
    asked: int | None = None
    nodes: Nodes | None = None

    @property
    def ranks(self) -> int:
        """Processes of steps that need several: the largest power of two that the GPUs allow; two without GPUs."""
        return 2 if not self.gpus else min(MOST_RANKS, 1 << (self.gpus.bit_length() - 1))

    @property
    def learner_dtype(self) -> str:
        """What learner and engine compute in where they are compared."""
        return "bfloat16" if self.gpus else "float32"

    @property
    def device(self) -> str:
        """torch's name of the device that a step without a learner computes on."""
        return "cuda:0" if self.gpus else "cpu"

    def need_gpus(self, count: int, why: str) -> None:
        """
        Raises:
            Skipped: there are fewer GPUs than ``count``.
        """
        if self.gpus < count:
            has = "this host has none" if not self.gpus else f"{self.gpus} may be used here"
            raise Skipped(f"{why} needs {'a GPU' if count == 1 else f'{count} GPUs'}, and {has}")

    def run_ranks(
        self, function: Callable[..., Any], world_size: int, *arguments: Any, nodes: Nodes | None = None
    ) -> Any:
        """``answer_of_ranks`` for a step, whose process group they belong to and end with.

        Where there is no GPU they are forked from the step's process, which may not have used torch's threads before.

        Raises:
            StepFailed: with the error of a rank that failed.
        """
        context: Any = multiprocessing.get_context("spawn" if self.gpus else "fork")
        try:
            return answer_of_ranks(context, function, world_size, arguments, self.directory, nodes=nodes)
        except RankFailed as error:
            raise StepFailed(error.summary) from error
