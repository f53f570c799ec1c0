"""Frozen models in the learner's processes whose distributions the policy learns from (on-policy distillation).

Before an update each teacher reads the micro-batches of its rows in the same layout as the policy, and each last
pipeline stage keeps the teacher's last hidden states of the tokens that its head reads (``teacher_loss.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from megatron_retool.config import Config, LearnerConfig, TrainerConfig
from megatron_retool.learner.initial import initial_chunks
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.learner.model import PolicyModel
from megatron_retool.learner.pipeline import forward
from megatron_retool.learner.precision import Acceleration
from megatron_retool.learner.specs import build_transformer_config
from megatron_retool.trajectory import TrajectoryBatch

Int64Array = npt.NDArray[np.int64]


class FrozenTeacher:
    """This rank's part of the teacher.

    Args:
        learner: its layout and precision, which are those of the policy's learner.
        trainer: whether the run is deterministic.
        architecture: the teacher's, of ``DistillationConfig.teacher_architectures``.
        path: its Hugging Face directory.

    Attributes:
        chunks: this rank's virtual pipeline stages; nothing changes their weights.
    """

    def __init__(
        self,
        learner: LearnerConfig,
        trainer: TrainerConfig,
        architecture: Architecture,
        path: str,
        acceleration: Acceleration,
    ) -> None:
        self.chunks = initial_chunks(
            PolicyModel,
            architecture,
            build_transformer_config(
                architecture,
                learner,
                learner.layout(architecture),
                acceleration,
                deterministic=trainer.deterministic,
            ),
            acceleration,
            hf_dir=path,
            mcore_dir=None,
            verify=trainer.verify_checkpoints,
            share_prefixes=learner.share_prefixes,
        )
        for chunk in self.chunks:
            chunk.requires_grad_(False).eval()

    @torch.no_grad()
    def hidden_states(self, micro_batches: Sequence[MicroBatch], max_tokens: int) -> list[Tensor]:
        """The last hidden states at each micro-batch's head positions: [n, h]; an empty list on earlier stages."""
        result: list[Tensor] = []
        forward(
            self.chunks,
            micro_batches,
            {"hidden_states": True},
            max_tokens,
            lambda _, output: result.append(output),
        )
        return result

    def head_weight(self) -> Tensor:
        """[V / TP, h]: this rank's rows of its output layer; only on the last pipeline stage."""
        last = self.chunks[-1]
        assert isinstance(last, PolicyModel)
        return last.head_weight()


def teachers_of(
    config: Config, architectures: Sequence[Architecture], acceleration: Acceleration
) -> list[FrozenTeacher]:
    """This rank's parts of the teachers that have a path, in the order of the configuration.

    Args:
        architectures: of ``DistillationConfig.teacher_architectures``; none: there are no teachers.
        acceleration: the policy's, for teachers read its micro-batches.
    """
    paths = config.algorithm.distillation.paths if architectures else []
    return [
        FrozenTeacher(config.learner, config.trainer, architecture, path, acceleration)
        for architecture, path in zip(architectures, paths, strict=True)
    ]


def last_hidden_states(
    teachers: Sequence[FrozenTeacher], micro_batches: Sequence[MicroBatch], max_tokens: int
) -> list[Tensor]:
    """``FrozenTeacher.hidden_states`` of each micro-batch by the teacher of its number, in the order of
    ``micro_batches``, which are in the order of their teachers."""
    result: list[Tensor] = []
    for number, teacher in enumerate(teachers):
        own = [each for each in micro_batches if each.part == number]
        if own:
            result += teacher.hidden_states(own, max_tokens)
    return result


def teacher_of_rows(batch: TrajectoryBatch) -> Int64Array:
    """int64 [N]: number of the teacher of each row: its column ``teacher``, which is the same for all of its tokens.

    A row without a response token has the first one.
    """
    ends = np.cumsum(batch.response_lengths, dtype=np.int64)
    first = np.minimum(ends - batch.response_lengths, max(batch.num_response_tokens - 1, 0))
    numbers: Int64Array = np.where(batch.response_lengths > 0, batch.columns["teacher"][first], 0).astype(np.int64)
    return numbers
