"""Gated delta net (arXiv:2412.06464, section 3.3): what stands in attention's place in most layers of Qwen3-Next.

Megatron-Core's own module needs kernels of another package.  A group of heads is a key head with its value heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conversion.model.attention_config import DeltaNetSizes
from megatron_retool.learner.attention import LOCAL_LINEARS, LocalPackedSequences, ParallelLinears
from megatron_retool.learner.delta_rule import gated_delta_rule
from megatron_retool.learner.recurrent import RecurrentLayer


class GatedDeltaNet(RecurrentLayer):
    """Linear attention over packed sequences.

    Args:
        sizes: of all ranks together.
        linears: see ``RecurrentLayer``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: DeltaNetSizes,
        linears: ParallelLinears = LOCAL_LINEARS,
        **_: Any,
    ) -> None:
        super().__init__(config, sizes, sizes.key_heads, sizes.value_heads, linears, bias=False)
        self.sizes = sizes
        self.share = sizes.value_heads // sizes.key_heads
        self.out_norm = GatedRMSNorm(config, sizes.value_dim)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: LocalPackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [t, 1, h] and bias, for the packed hidden states [t, 1, h]."""
        sizes, values = self.sizes, self.share * self.sizes.value_dim
        projected, _bias = self.in_proj(hidden_states)
        features = sizes.key_dim * 2 + values
        convolved, gate, rates = (
            projected.squeeze(1).unflatten(-1, (self.groups, -1)).split([features, values, 2 * self.share], -1)
        )
        out = self._mixed(convolved, rates, packed_seq_params)
        out = self.out_norm(out, gate.unflatten(-1, (self.share, -1)).flatten(1, 2))
        result: tuple[Tensor, Tensor | None] = self.out_proj(out.flatten(1).unsqueeze(1))
        return result

    def _grid(self, convolved: Tensor, rates: Tensor, group: Any = None) -> Tensor:
        decay, bias = self._own(self.A_log, group), self._own(self.dt_bias, group)
        query, key, value = self._heads(self._convolved(convolved, group))
        beta, step = (x.flatten(2).float() for x in rates.chunk(2, -1))
        log_decay = -decay.float().exp() * F.softplus(step + bias.float())
        return gated_delta_rule(query, key, value, log_decay, beta.sigmoid()).to(convolved.dtype)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., key heads, q + k + v] -> queries and keys [..., key heads, key_dim], values [..., heads, value_dim]."""
        key_size, value_size = self.sizes.key_dim, self.sizes.value_dim
        query, key, value = mixed.split([key_size, key_size, self.share * value_size], -1)
        return query, key, value.unflatten(-1, (self.share, -1)).flatten(-3, -2)


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm of each head times silu of a gate; all tensor-parallel ranks have one weight."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps, self.sequence_parallel = config.layernorm_epsilon, config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        # A rank's gradient is that of its heads; finalize_model_grads adds up only with sequence parallelism.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Two tensors [..., heads of this rank, size] -> the same."""
        weight = self.weight if self.sequence_parallel else copy_to_tensor_model_parallel_region(self.weight)
        normalized = F.rms_norm(x.float(), (x.size(-1),), weight.float(), self.eps)
        return (normalized * F.silu(gate.float())).to(x.dtype)
