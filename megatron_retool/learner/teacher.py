"""A frozen model in the learner's processes whose distribution the policy learns from (on-policy distillation).

Before an update the teacher reads the mini-batch's micro-batches in the same layout as the policy, and each last
pipeline stage keeps the teacher's last hidden states of the tokens that its head reads (``teacher_loss.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from megatron_retool.config import Config
from megatron_retool.learner.initial import initial_chunks
from megatron_retool.learner.model import PolicyModel, build_transformer_config
from megatron_retool.learner.packing import MicroBatch
from megatron_retool.learner.pipeline import forward
from megatron_retool.learner.precision import Acceleration


class FrozenTeacher:
    """This rank's part of the teacher.

    Args:
        config: the run's configuration.
        policy: the policy's architecture.

    Attributes:
        chunks: this rank's virtual pipeline stages; nothing changes their weights.
        architecture: the teacher's.

    Raises:
        ConfigError: see ``DistillationConfig.teacher_architecture``.
    """

    def __init__(self, config: Config, policy: Architecture, acceleration: Acceleration) -> None:
        learner, distillation = config.learner, config.algorithm.distillation
        self.architecture = distillation.teacher_architecture(policy, learner, config.model.families)
        self.chunks = initial_chunks(
            PolicyModel,
            self.architecture,
            build_transformer_config(
                self.architecture,
                learner,
                learner.layout(self.architecture),
                acceleration,
                deterministic=config.trainer.deterministic,
            ),
            acceleration,
            hf_dir=distillation.teacher_path,
            mcore_dir=None,
            verify=config.trainer.verify_checkpoints,
            share_prefixes=learner.share_prefixes,
        )
        for chunk in self.chunks:
            chunk.requires_grad_(False).eval()

    @torch.no_grad()
    def hidden_states(self, micro_batches: Sequence[MicroBatch], max_tokens: int) -> list[Tensor]:
        """The last hidden states at each micro-batch's head positions: [n, h]; an empty list on earlier stages."""
        found: list[Tensor] = []
        forward(
            self.chunks,
            micro_batches,
            {"hidden_states": True},
            max_tokens,
            lambda _, output: found.append(output),
        )
        return found

    def head_weight(self) -> Tensor:
        """[V / TP, h]: this rank's rows of its output layer; only on the last pipeline stage."""
        last = self.chunks[-1]
        assert isinstance(last, PolicyModel)
        return last.head_weight()
