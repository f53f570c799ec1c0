"""Mamba-2 (arXiv:2405.21060, section 7): what stands in attention's place in layers of Granite 4 and Nemotron-H.

Megatron-Core's own module needs kernels of another package.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conversion.model.attention_config import MambaSizes
from megatron_retool.learner.attention import LOCAL_LINEARS, LocalPackedSequences, ParallelLinears
from megatron_retool.learner.recurrent import RecurrentLayer, split_by_heads
from megatron_retool.learner.state_space import state_space


class Mamba2(RecurrentLayer):
    """A state-space layer over packed sequences.

    Args:
        sizes: of all ranks together.
        linears: see ``RecurrentLayer``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: MambaSizes,
        linears: ParallelLinears = LOCAL_LINEARS,
        **_: Any,
    ) -> None:
        super().__init__(config, sizes, sizes.groups, sizes.heads, linears, bias=True)
        self.sizes = sizes
        self.D = split_by_heads(torch.ones(sizes.heads), config)
        self.norm = NormOfGated(config, sizes.value_size, sizes.value_size // sizes.groups)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: LocalPackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [t, 1, h] and bias, for the packed hidden states [t, 1, h]."""
        sizes, values = self.sizes, self.sizes.value_size // self.sizes.groups
        projected, _bias = self.in_proj(hidden_states)
        gate, convolved, steps = (
            projected.squeeze(1)
            .unflatten(-1, (self.groups, -1))
            .split([values, values + 2 * sizes.state_dim, sizes.heads // sizes.groups], -1)
        )
        out = self._mixed(convolved, steps, packed_seq_params).flatten(1)
        result: tuple[Tensor, Tensor | None] = self.out_proj(self.norm(out, gate.flatten(1)).unsqueeze(1))
        return result

    def _grid(self, convolved: Tensor, rates: Tensor, group: Any = None) -> Tensor:
        decay, bias, skip = (self._own(each, group).float() for each in (self.A_log, self.dt_bias, self.D))
        value, write, read = self._parts(self._convolved(convolved, group))
        step = F.softplus(rates.flatten(2).float() + bias)
        out = state_space(value, write, read, -decay.exp() * step, step)
        return (out + skip.unsqueeze(-1) * value).to(convolved.dtype)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., heads, head_dim] and two of [..., groups, state_dim], of [..., groups, features] that are convolved."""
        size = self.sizes.state_dim
        values, write, read = mixed.split([mixed.size(-1) - 2 * size, size, size], -1)
        return values.unflatten(-1, (-1, self.sizes.head_dim)).flatten(-3, -2), write, read

    def _shared_out(self, convolved: Tensor, ranks: int) -> Tensor:
        """Each group's heads become several groups with copies of its two vectors, where ``ranks`` are more."""
        pieces = ranks // math.gcd(self.groups, ranks)
        values, vectors = convolved.tensor_split([convolved.size(-1) - 2 * self.sizes.state_dim], -1)
        copies = vectors.unsqueeze(-2).expand(*vectors.shape[:-1], pieces, -1)
        return torch.cat([values.unflatten(-1, (pieces, -1)), copies], -1).flatten(-3, -2)

    def _split_parameters(self) -> dict[str, Tensor]:
        return super()._split_parameters() | {"D": self.D, "norm.weight": self.norm.weight}


class NormOfGated(torch.nn.Module):
    """RMSNorm of each group's features times silu of a gate.

    Args:
        size: features of all ranks together.
        group_size: of a group.
    """

    def __init__(self, config: TransformerConfig, size: int, group_size: int) -> None:
        super().__init__()
        self.eps, self.group_size = config.layernorm_epsilon, group_size
        self.weight = split_by_heads(torch.ones(size), config)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Two tensors [..., features of this rank] -> the same."""
        gated = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, self.group_size))
        normalized = F.rms_norm(gated, (self.group_size,), eps=self.eps).flatten(-2)
        return (self.weight.float() * normalized).to(x.dtype)
