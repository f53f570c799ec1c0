"""Layer modules of the learner's own: RMSNorm, and rotary causal attention over packed sequences.

Machines without Transformer Engine use all of them. Beside it, attention does where Transformer Engine's knows no
shared prefixes, or not this kind of attention in this layout (``Architecture.needs_packed_attention``).

Attention runs on torch's scaled_dot_product_attention.  Packed sequences of similar length become one padded batch
(``Bucket``): a call per sequence would cost more than the arithmetic of short sequences.  Under context
parallelism keys and values are gathered from all ranks, and each rank's zigzag share of the queries sees its past
through a mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_retool.learner.attention_pieces import Bucket, ContextBucket, KeyChoice, SharedPrefixes, hidden_keys
from megatron_retool.learner.sinks import sink_attention
from megatron_retool.learner.tree_attention import tree_attention


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the marks that sequence parallelism needs (Megatron's own wrapper refuses it)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)
        # Each TP rank sees its part of the sequence; finalize_model_grads adds the gradients up.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight; in the shape and dtype of ``x``."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float | None, zero_centered: bool) -> Tensor:
    """x weight / sqrt(mean(x^2) + eps) over the last dimension, or with 1 + weight: in the shape and dtype of ``x``."""
    if zero_centered:
        if x.dtype != torch.float32:  # in which 1 + weight would lose digits
            return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)
        weight = 1.0 + weight
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # On the host torch's own is a dozen passes over memory.
    return _HostRMSNorm.apply(x, weight, eps)


class ParallelLinears(NamedTuple):
    """The classes of a layer's linear layers that tensor parallelism splits."""

    column: type[Any]
    row: type[Any]


LOCAL_LINEARS = ParallelLinears(ColumnParallelLinear, RowParallelLinear)


class SwiGLUMLP(MLP):
    """Megatron's MLP with the gated activation in one autograd node, where no fused kernel exists."""

    output_layer: type[Any] = RowParallelLinear

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=self.output_layer)
        super().__init__(config, layers, tp_group=parallel_state.get_tensor_model_parallel_group())

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        """The MLP's output and bias, for hidden states [t, 1, h]."""
        gate_and_up, _bias = self.linear_fc1(hidden_states)
        if self.config.activation_func is F.silu:
            return self.linear_fc2(_SwiGLU.apply(gate_and_up))
        gate, up = gate_and_up.chunk(2, dim=-1)
        return self.linear_fc2(self.config.activation_func(gate) * up)


class _HostRMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, r = ctx.saved_tensors
        normalized = x * r
        grad_weight = (grad * normalized).flatten(0, -2).sum(0)
        grad = grad * weight
        along = (grad * normalized).sum(-1, keepdim=True).div_(x.size(-1))
        return grad.sub_(normalized.mul_(along)).mul_(r), grad_weight, None


class _SwiGLU(torch.autograd.Function):
    """(gate, up) -> silu(gate) up."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_and_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_and_up, activated = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_and_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


@dataclass
class LocalPackedSequences(PackedSeqParams):
    """What this module's attention needs to know of a packed micro-batch.

    ``qkv_format`` stays unset: Megatron then hands over [t, 1, heads, head_dim] and leaves the sequences to us.
    ``cp_group`` is of the ranks that share the micro-batch; None: it is this rank's own.

    Attributes:
        buckets: see ``micro_batch.MicroBatch``.
        tree: see ``micro_batch.MicroBatch``; instead of buckets.
        cos, sin: [t, 1, r] at each token's position, r <= head_dim; see ``RotaryTable``.
        local_cos, local_sin: the same for layers with a window; None: as in the others.
        query_growth: see ``positions.query_growth``.
        masks: number of a bucket and window of a layer -> what all layers with this window add to the bucket's scores
            (``hidden_keys``); the first of them makes it.
        key_choices: number of a layer, counted from 1 -> the keys that it has chosen, for the layer behind it
            (``sparse_attention.py``).
    """

    buckets: tuple[Bucket, ...] | tuple[ContextBucket, ...] = ()
    tree: SharedPrefixes | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    local_cos: Tensor | None = None
    local_sin: Tensor | None = None
    query_growth: Tensor | None = None
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    key_choices: dict[int, tuple[KeyChoice, ...]] = field(default_factory=dict)


class RotaryTable:
    """(cos, cos) and (-sin, sin) of every position, grown on demand and kept."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        self.inverse_frequencies = inverse_frequencies.float()
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def at(self, positions: Tensor, max_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors [t, 1, r] for r / 2 frequencies at ``positions`` (int64 [t], below ``max_length``)."""
        tables = self._tables.get(dtype)
        if tables is None or tables[0].size(0) < max_length:
            length = max(max_length, 2 * tables[0].size(0) if tables else 256)
            device = positions.device
            angles = torch.outer(torch.arange(length, device=device).float(), self.inverse_frequencies.to(device))
            cos, sin = angles.cos(), angles.sin()
            tables = (torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype))
            self._tables[dtype] = tables
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in tables)
        return cos, sin


class PackedAttention(MegatronModule):
    """Core attention of the local layer spec: rotary embedding, causality, sequence boundaries, sliding window.

    Replaces Megatron's DotProductAttention.  The rotary embedding is applied here, from a table made once per
    micro-batch, because Megatron's own path for packed sequences loops over them in every layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed and config.window_size else None
        unrotated = getattr(config, "no_rope_freq", None)
        self.rotates = not (unrotated and unrotated[layer_number - 1])
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            # Of this rank's heads.
            heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            torch.nn.init.normal_(self.softmax_offset, std=config.init_method_std)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The sinks, where there are some, split by heads."""
        own = self.state_dict(prefix="", keep_vars=True)
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: LocalPackedSequences | None = None,
        chosen: tuple[KeyChoice, ...] | None = None,
    ) -> Tensor:
        """[t, 1, heads, head_dim] queries, [t, 1, groups, head_dim] keys and values -> [t, 1, heads x head_dim].

        ``chosen``, where it is given, has the keys that queries of each bucket see; there is no window then.
        """
        packed = packed_seq_params
        assert isinstance(packed, LocalPackedSequences), "micro-batches are always packed"
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.rotates:
            query, key = self._rotated(query, packed), self._rotated(key, packed)
        out = self._attended(query, key, value, packed, chosen)
        return out.reshape(out.size(0), 1, -1)

    def _rotated(self, x: Tensor, packed: LocalPackedSequences) -> Tensor:
        return _Rotary.apply(x, *self._angles(packed))

    def _angles(self, packed: LocalPackedSequences) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines of this layer."""
        if self.window is not None and packed.local_cos is not None:
            return packed.local_cos, packed.local_sin
        return packed.cos, packed.sin

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: LocalPackedSequences,
        chosen: tuple[KeyChoice, ...] | None,
    ) -> Tensor:
        """[t, heads, d] queries, [t, groups, d] keys and values -> [t, heads, d]."""
        if packed.tree is not None:
            return tree_attention(query, key, value, packed.tree, self.scale)
        if packed.cp_group is None:
            return self._within_rank(query, key, value, packed, chosen)
        return self._across_ranks(query, key, value, packed, chosen)

    def _within_rank(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: LocalPackedSequences,
        chosen: tuple[KeyChoice, ...] | None,
    ) -> Tensor:
        buckets: tuple[Any, ...] = packed.buckets
        sizes = [bucket.tokens for bucket in buckets]
        # split, not slices: the gradients of a split are one concatenation.
        parts = zip(*(x.split(sizes) for x in (query, key, value)), buckets, strict=True)
        outputs = []
        for number, (q, k, v, bucket) in enumerate(parts):
            q, k, v = (to_grid(x, bucket) for x in (q, k, v))
            mask = None
            if chosen is not None and (own := chosen[number]) is not None:
                mask = hidden_keys(own.unsqueeze(1), q)
            elif self.window is not None and bucket.length > self.window:
                mask = self._mask(packed, number, torch.arange(bucket.length, device=q.device), bucket.length, q)
            outputs.append(from_grid(self._attend(q, k, v, mask), bucket))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _across_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: LocalPackedSequences,
        chosen: tuple[KeyChoice, ...] | None,
    ) -> Tensor:
        buckets: tuple[Any, ...] = packed.buckets
        # Forward all-gather, backward reduce-scatter, along the tokens.
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=packed.cp_group)
        outputs = []
        queries = query.split([bucket.queries.tokens for bucket in buckets])
        for number, (q, bucket) in enumerate(zip(queries, buckets, strict=True)):
            shape = (bucket.queries.batch, bucket.key_length, key.size(1), 2 * key.size(2))
            k, v = both.index_select(0, bucket.key_pad).view(shape).chunk(2, dim=-1)
            if chosen is not None and (own := chosen[number]) is not None:
                mask = hidden_keys(own.unsqueeze(1), q)
            else:
                mask = self._mask(packed, number, bucket.query_positions.unsqueeze(1), bucket.key_length, q)
            outputs.append(from_grid(self._attend(to_grid(q, bucket.queries), k, v, mask), bucket.queries))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mask(self, packed: LocalPackedSequences, number: int, places: Tensor, keys: int, like: Tensor) -> Tensor:
        """What is added to a bucket's scores, [..., queries, keys], for queries at ``places`` [..., queries]."""
        mask = packed.masks.get((number, self.window))
        if mask is None:
            distance = places.unsqueeze(-1) - torch.arange(keys, device=places.device)
            visible = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
            mask = packed.masks[number, self.window] = hidden_keys(visible, like)
        return mask

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, L, heads, d] -> [B, L, heads, d]."""
        if self.softmax_offset is not None:
            return sink_attention(query, key, value, self.softmax_offset, mask, self.scale)
        repeated = query.size(2) // key.size(2)
        if mask is not None and query.is_cuda and repeated > 1:
            # torch's one kernel that takes a mask there knows no groups; without it scores would be kept.
            key, value = (x.repeat_interleave(repeated, 2) for x in (key, value))
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.transpose(1, 2)


def to_grid(x: Tensor, bucket: Bucket) -> Tensor:
    """[tokens, ...] -> [B, L, ...]."""
    if bucket.pad is not None:
        x = _Pad.apply(x, bucket.pad, bucket.cells)
    return x.reshape(bucket.batch, bucket.length, *x.shape[1:])


def from_grid(x: Tensor, bucket: Bucket) -> Tensor:
    """[B, L, ...] -> [tokens, ...]."""
    x = x.reshape(bucket.batch * bucket.length, *x.shape[2:])
    return x if bucket.cells is None else _Unpad.apply(x, bucket.cells)


class _Pad(torch.autograd.Function):
    """Gather whose backward is a gather too: a padding cell's gradient is zero, every token has one cell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        return x.index_select(0, pad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (cells,) = ctx.saved_tensors
        return grad.index_select(0, cells), None, None


class _Unpad(torch.autograd.Function):
    """Gather without repetition, so that the backward pass is a copy and not a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        ctx.rows = x.size(0)
        return x.index_select(0, cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (cells,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, cells, grad), None


class _Rotary(torch.autograd.Function):
    """Rotary position embedding, halves convention: (a, b) -> (a cos - b sin, b cos + a sin).

    With s = (-sin, sin) that is x cos + swap(x) s, and its transpose is g cos - swap(g) s. Of each head the first
    features are rotated, as many as cos and sin have; the others pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, sin, -1.0), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float = 1.0) -> Tensor:
    """``x`` [t, heads, d] with its first features rotated, as many as ``cos`` and ``sin`` [t, 1, r] have; see
    ``RotaryTable``. With a ``direction`` of -1 back again."""
    if cos.size(-1) < x.size(-1):
        first, rest = x.split([cos.size(-1), x.size(-1) - cos.size(-1)], -1)
        return torch.cat([rotate(first, cos, sin, direction), rest], -1)
    swapped = x.roll(x.size(-1) // 2, -1).mul_(sin)
    if direction < 0:
        swapped.neg_()
    return swapped.addcmul_(x, cos)
