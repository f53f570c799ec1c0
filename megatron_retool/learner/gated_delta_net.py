"""Gated delta net (arXiv:2412.06464, section 3.3): what stands in attention's place in most layers of Qwen3-Next.

Megatron-Core's own module needs kernels of another package. Here packed sequences become the padded batches of
``PackedAttention``, so that convolution and state start afresh in each sequence; both are causal, so that the padding
behind a sequence changes nothing.

Rows of the input projection and of the convolution are interleaved by key head: a tensor-parallel rank has whole key
heads with their value heads, one run of rows of every parameter. A state goes from each token of a sequence to the
next, so context parallelism exchanges (arXiv:2309.14509, figure 2): from its tokens and all key heads of the
tensor-parallel rank, each rank comes to all tokens and its share of these heads, and back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from conversion.model.attention_config import DeltaNetSizes
from megatron_retool.learner.attention import LocalPackedSequences, from_grid, to_grid
from megatron_retool.learner.delta_rule import gated_delta_rule


class GatedDeltaNet(MegatronModule):
    """Linear attention over packed sequences: [t, 1, h] -> [t, 1, h], of t / TP tokens with sequence parallelism.

    Parameters have Megatron-Core's names.  Decays, the delta rule and the norm are computed in float32.

    Args:
        sizes: of all ranks together.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, sizes: DeltaNetSizes, **_: Any) -> None:
        super().__init__(config=config)
        group = parallel_state.get_tensor_model_parallel_group()
        self.sizes, self.key_heads = sizes, sizes.key_heads // group.size()
        self.share = sizes.value_heads // sizes.key_heads
        options: dict[str, Any] = {"config": config, "bias": False, "tp_group": group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sizes.convolved_size + sizes.value_size + 2 * sizes.value_heads,
            init_method=config.init_method,
            gather_output=False,
            **options,
        )
        self.conv1d = CausalConvolution(config, sizes.convolved_size, sizes.kernel)
        self.dt_bias = _split_by_heads(torch.ones(sizes.value_heads), config)
        self.A_log = _split_by_heads(torch.empty(sizes.value_heads).uniform_(1.0, 16.0).log(), config)
        self.out_norm = GatedRMSNorm(config, sizes.value_dim)
        self.out_proj = RowParallelLinear(
            sizes.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: LocalPackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [t, 1, h] and bias, for the packed hidden states [t, 1, h]."""
        packed = packed_seq_params
        assert isinstance(packed, LocalPackedSequences) and packed.tree is None, "shared prefixes are refused before"
        sizes, values = self.sizes, self.share * self.sizes.value_dim
        projected, _bias = self.in_proj(hidden_states)
        features = sizes.key_dim * 2 + values
        convolved, gate, rates = (
            projected.squeeze(1).unflatten(-1, (self.key_heads, -1)).split([features, values, 2 * self.share], -1)
        )
        if packed.cp_group is None:
            out = self._within_rank(convolved, rates, packed)
        else:
            out = self._across_ranks(convolved, rates, packed.buckets, packed.cp_group)
        out = self.out_norm(out, gate.unflatten(-1, (self.share, -1)).flatten(1, 2))
        result: tuple[Tensor, Tensor | None] = self.out_proj(out.flatten(1).unsqueeze(1))
        return result

    def _within_rank(self, convolved: Tensor, rates: Tensor, packed: LocalPackedSequences) -> Tensor:
        """[t, key heads, q + k + v] and [t, key heads, 2 x share] -> [t, value heads, value_dim]."""
        buckets: tuple[Any, ...] = packed.buckets
        runs = [bucket.tokens for bucket in buckets]
        outputs = []
        for features, rate, bucket in zip(convolved.split(runs), rates.split(runs), buckets, strict=True):
            out = self._grid(to_grid(features, bucket), to_grid(rate, bucket))
            outputs.append(from_grid(out, bucket))
        return torch.cat(outputs)

    def _across_ranks(self, convolved: Tensor, rates: Tensor, buckets: tuple[Any, ...], group: Any) -> Tensor:
        """The same, of this context-parallel rank's tokens and of all its tensor-parallel rank's heads."""
        ranks = group.size()
        mine = torch.cat([convolved, rates], -1).unflatten(1, (ranks, -1)).transpose(0, 1)  # [CP, t, heads / CP, …]
        whole = all_to_all(group, mine.flatten(0, 1).contiguous())
        outputs = []
        for bucket in buckets:
            grid = whole.index_select(0, bucket.key_pad).unflatten(0, (-1, bucket.key_length))
            features, rate = grid.split([convolved.size(-1), rates.size(-1)], -1)
            out = self._grid(features, rate, group).flatten(0, 1)
            outputs.append(out.index_select(0, bucket.key_cells.flatten()).unflatten(0, (ranks, -1)))
        # [CP, t, value heads / CP, value_dim], ranks being those that have the tokens; then those that had the heads.
        back = all_to_all(group, torch.cat(outputs, 1).flatten(0, 1).contiguous())
        return back.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

    def _grid(self, convolved: Tensor, rates: Tensor, group: Any = None) -> Tensor:
        """[B, L, heads, q + k + v] and [B, L, heads, 2 x share], of this rank's share of the key heads where ``group``
        shares the sequences, to [B, L, value heads, value_dim]."""
        weight, decay, bias = (
            parameter if group is None else parameter.chunk(group.size())[group.rank()]
            for parameter in (self.conv1d.weight, self.A_log, self.dt_bias)
        )
        mixed = self.conv1d(convolved.flatten(2), weight)
        query, key, value = self._heads(F.silu(mixed).view(convolved.shape))
        beta, step = (x.flatten(2).float() for x in rates.chunk(2, -1))
        log_decay = -decay.float().exp() * F.softplus(step + bias.float())
        return gated_delta_rule(query, key, value, log_decay, beta.sigmoid()).to(convolved.dtype)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., key heads, q + k + v] -> queries and keys [..., key heads, key_dim], values [..., heads, value_dim]."""
        key_size, value_size = self.sizes.key_dim, self.sizes.value_dim
        query, key, value = mixed.split([key_size, key_size, self.share * value_size], -1)
        return query, key, value.unflatten(-1, (self.share, -1)).flatten(-3, -2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The layer's tensors for a distributed checkpoint; decay, step and convolution are split over TP ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        result = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        split = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        return result | make_sharded_tensors_for_checkpoint(
            split,
            prefix,
            dict.fromkeys(split, 0),
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


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


class CausalConvolution(torch.nn.Module):
    """Each feature's weighted sum over the last tokens of its sequence; the last weight is the present token's.

    Args:
        features: of all ranks together.
        kernel: tokens that are summed.
    """

    def __init__(self, config: TransformerConfig, features: int, kernel: int) -> None:
        super().__init__()
        bound = kernel**-0.5
        self.weight = _split_by_heads(torch.empty(features, 1, kernel).uniform_(-bound, bound), config)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[B, L, features] -> the same, by the whole weight or by the features' rows of it."""
        weight = self.weight if weight is None else weight
        padded = F.pad(x.transpose(1, 2), (weight.size(-1) - 1, 0))
        return F.conv1d(padded, weight, groups=weight.size(0)).transpose(1, 2)


def _split_by_heads(whole: Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    """This tensor-parallel rank's rows of a parameter."""
    group = parallel_state.get_tensor_model_parallel_group()
    parameter = torch.nn.Parameter(whole.chunk(group.size())[group.rank()].to(config.params_dtype, copy=True))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
