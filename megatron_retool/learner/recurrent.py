"""What layers with a state in attention's place have in common: gated delta nets and Mamba-2.

Packed sequences become the padded batches of ``PackedAttention``, so that convolution and state start afresh in each
sequence; both are causal, so that the padding behind a sequence changes nothing.

Heads lie in groups that share what their states are read by.  Rows of the input projection and of the convolution are
interleaved by group: a tensor-parallel rank has whole groups with their heads, one run of rows of every parameter.  A
state goes from each token of a sequence to the next, so context parallelism exchanges (arXiv:2309.14509, figure 2):
from its tokens and all heads of the tensor-parallel rank, each rank comes to all tokens and its share of these heads,
and back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import set_save_original_input
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from conversion.model.attention_config import DeltaNetSizes, MambaSizes
from megatron_retool.learner.attention import LocalPackedSequences, ParallelLinears, from_grid, to_grid


class RecurrentLayer(MegatronModule):
    """Projections around a convolution and a state: [t, 1, h] -> [t, 1, h], of t / TP tokens with sequence parallelism.

    Parameters have Megatron-Core's names.  What changes states is computed in float32.

    Args:
        sizes: of all ranks together.
        groups: of heads, of all ranks together.
        heads: with a state of their own, of all ranks together.
        linears: of the two projections.
        bias: the convolution has one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        sizes: DeltaNetSizes | MambaSizes,
        groups: int,
        heads: int,
        linears: ParallelLinears,
        *,
        bias: bool,
    ) -> None:
        super().__init__(config=config)
        group = parallel_state.get_tensor_model_parallel_group()
        self.groups = groups // group.size()
        options: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": group}
        self.in_proj = linears.column(
            config.hidden_size,
            sizes.convolved_size + sizes.value_size + sizes.rates,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **options,
        )
        self.conv1d = CausalConvolution(config, sizes.convolved_size, sizes.kernel, bias=bias)
        self.dt_bias = split_by_heads(torch.ones(heads), config)
        self.A_log = split_by_heads(torch.empty(heads).uniform_(1.0, 16.0).log(), config)
        self.out_proj = linears.row(
            sizes.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )

    def set_for_recompute_input_layernorm(self) -> None:
        """Keep the norm's output for the backward pass, which computes it again, and not what FP8 makes of it."""
        set_save_original_input(self.in_proj)

    def _mixed(self, convolved: Tensor, rates: Tensor, packed: Any) -> Tensor:
        """[t, groups, features] and [t, groups, rates] of this rank -> [t, heads, value features]."""
        assert isinstance(packed, LocalPackedSequences) and packed.tree is None, "shared prefixes are refused before"
        if packed.cp_group is None:
            return self._within_rank(convolved, rates, packed)
        return self._across_ranks(convolved, rates, packed.buckets, packed.cp_group)

    def _within_rank(self, convolved: Tensor, rates: Tensor, packed: LocalPackedSequences) -> Tensor:
        """``_mixed`` of sequences that this rank has whole."""
        buckets: tuple[Any, ...] = packed.buckets
        runs = [bucket.tokens for bucket in buckets]
        outputs = []
        for features, rate, bucket in zip(convolved.split(runs), rates.split(runs), buckets, strict=True):
            out = self._grid(to_grid(features, bucket), to_grid(rate, bucket))
            outputs.append(from_grid(out, bucket))
        return torch.cat(outputs)

    def _across_ranks(self, convolved: Tensor, rates: Tensor, buckets: tuple[Any, ...], group: Any) -> Tensor:
        """``_mixed`` of this context-parallel rank's tokens and of all its tensor-parallel rank's heads."""
        ranks = group.size()
        convolved = self._shared_out(convolved, ranks)
        rates = rates.reshape(rates.size(0), convolved.size(1), -1)
        mine = torch.cat([convolved, rates], -1).unflatten(1, (ranks, -1)).transpose(0, 1)  # [CP, t, groups / CP, …]
        whole = all_to_all(group, mine.flatten(0, 1).contiguous())
        outputs = []
        for bucket in buckets:
            grid = whole.index_select(0, bucket.key_pad).unflatten(0, (-1, bucket.key_length))
            features, rate = grid.split([convolved.size(-1), rates.size(-1)], -1)
            out = self._grid(features, rate, group).flatten(0, 1)
            outputs.append(out.index_select(0, bucket.key_cells.flatten()).unflatten(0, (ranks, -1)))
        # [CP, t, heads / CP, features], ranks being those that have the tokens; then those that had the heads.
        back = all_to_all(group, torch.cat(outputs, 1).flatten(0, 1).contiguous())
        return back.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

    def _shared_out(self, convolved: Tensor, ranks: int) -> Tensor:
        """[..., groups, features] -> the same with as many groups as ``ranks`` share out."""
        return convolved

    def _own(self, parameter: Tensor, group: Any) -> Tensor:
        """The rows of a parameter that this rank's share of the heads has; ``group`` shares them, None: all."""
        return parameter if group is None else parameter.chunk(group.size())[group.rank()]

    def _convolved(self, features: Tensor, group: Any) -> Tensor:
        """[B, L, groups, features] -> the same behind the convolution."""
        weight: Tensor = self.conv1d.weight
        bias: Tensor | None = self.conv1d.bias
        if group is not None:

            def own(parameter: Tensor) -> Tensor:
                rows = parameter.unflatten(0, (self.groups, -1)).movedim((0, 1), (-2, -1))
                return self._own(self._shared_out(rows, group.size()).movedim((-2, -1), (0, 1)).flatten(0, 1), group)

            weight, bias = own(weight), None if bias is None else own(bias)
        return F.silu(self.conv1d(features.flatten(2), weight, bias)).view(features.shape)

    def _grid(self, convolved: Tensor, rates: Tensor, group: Any = None) -> Tensor:
        """[B, L, groups, features] and [B, L, groups, rates], of this rank's share of the groups where ``group`` shares
        the sequences, to [B, L, heads, value features]."""
        raise NotImplementedError

    def _split_parameters(self) -> dict[str, Tensor]:
        """Those that tensor-parallel ranks share out, beside those of the projections."""
        split: dict[str, Tensor] = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        return split if self.conv1d.bias is None else split | {"conv1d.bias": self.conv1d.bias}

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The layer's tensors for a distributed checkpoint."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        result = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        split = self._split_parameters()
        return result | make_sharded_tensors_for_checkpoint(
            split,
            prefix,
            dict.fromkeys(split, 0),
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class CausalConvolution(torch.nn.Module):
    """Each feature's weighted sum over the last tokens of its sequence; the last weight is the present token's.

    Args:
        features: of all ranks together.
        kernel: tokens that are summed.
    """

    def __init__(self, config: TransformerConfig, features: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        bound = kernel**-0.5
        self.weight = split_by_heads(torch.empty(features, 1, kernel).uniform_(-bound, bound), config)
        self.bias = split_by_heads(torch.empty(features).uniform_(-bound, bound), config) if bias else None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, L, features] -> the same, by these features' rows of weight and bias."""
        padded = F.pad(x.transpose(1, 2), (weight.size(-1) - 1, 0))
        return F.conv1d(padded, weight, bias, groups=weight.size(0)).transpose(1, 2)


def split_by_heads(whole: Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    """This tensor-parallel rank's rows of a parameter."""
    group = parallel_state.get_tensor_model_parallel_group()
    parameter = torch.nn.Parameter(whole.chunk(group.size())[group.rank()].to(config.params_dtype, copy=True))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
