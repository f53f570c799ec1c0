"""Layers that differ in their rotary positions, and queries that are prepared for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from conversion.model import rotary
from conversion.model.architecture import Architecture
from megatron_retool.errors import InputError


def query_growth(architecture: Architecture, positions: Tensor) -> Tensor | None:
    """float32 [t, 1, 1, 1]: what queries at ``positions`` (int64 [t]) are multiplied by; None: by nothing."""
    if architecture.query_growth is None:
        return None
    return rotary.query_growth(*architecture.query_growth, positions).view(-1, 1, 1, 1)


class PreparedQueries(SelfAttention):
    """With queries and keys that are prepared ahead of the rotation.

    Args:
        rotated: features of each head that positions rotate, the first ones.
        factor: that those of queries are multiplied by.
        pairs: those that are rotated together lie side by side. They are laid out half of them apart, as the rotation
            wants it; queries and keys alike, so that scores stay.

    Queries are multiplied by the micro-batch's ``query_growth`` too, where it has one.
    """

    def __init__(self, *args: Any, rotated: int, factor: float, pairs: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotated, self.factor, self.pairs = rotated, factor, pairs
        self._growth: Tensor | None = None

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """The attention's forward pass, with the growth of queries by position that comes with the packed sequences."""
        self._growth = getattr(packed_seq_params, "query_growth", None)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Queries, keys and values, reordered for rotation in halves and scaled as the family asks."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        if self.pairs:
            query, key = self._in_halves(query), self._in_halves(key)
        if self.factor != 1.0:
            turned, plain = query.split([self.rotated, query.size(-1) - self.rotated], -1)
            query = torch.cat([turned * self.factor, plain], -1)
        if self._growth is not None:
            query = query * self._growth.to(query.dtype)
        return query, key, value

    def _in_halves(self, x: Tensor) -> Tensor:
        turned, plain = x.split([self.rotated, x.size(-1) - self.rotated], -1)
        return torch.cat([turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), plain], -1)


class MixedSelfAttention(SelfAttention):
    """Of a model whose layers with a window have positions of their own.

    ``rotary_pos_emb``, where Transformer Engine rotates, are both kinds of angles [2, positions, 1, 1, head_dim].
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *args: Any,
        local_scale: float,
        **kwargs: Any,
    ) -> None:
        self.is_local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        if self.is_local:
            config = copy.copy(config)
            config.softmax_scale = local_scale
        super().__init__(config, submodules, layer_number, *args, **kwargs)

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        """The attention's forward pass with the rotary angles of its kind, local or global."""
        own = None if rotary_pos_emb is None else rotary_pos_emb[int(self.is_local)]
        return super().forward(*args, rotary_pos_emb=own, **kwargs)


def place_positions(layer: Any, architecture: Architecture) -> None:
    """Give a layer's submodules the attention that tells layers apart, where the model's differ.

    Raises:
        ValueError: the part is missing for this layer.
    """
    factor = rotary.query_factor(architecture)
    prepared = factor != 1.0 or architecture.rotary_pairs or architecture.query_growth is not None
    if architecture.local_rope_theta is not None:
        if prepared or architecture.unrotated_layers:
            raise InputError("positions that differ by layer are missing beside queries that are prepared for them")
        if architecture.linear_layers or architecture.attention_gate:
            raise InputError("positions that differ by layer are missing beside gated attention and layers without any")
        layer.self_attention.module = MixedSelfAttention
        layer.self_attention.params = {
            **layer.self_attention.params,
            "local_scale": rotary.softmax_scale(architecture, local=True),
        }
    elif prepared:
        if architecture.linear_layers or architecture.attention_gate or architecture.latent is not None:
            raise InputError("queries that are prepared for positions are missing beside this kind of attention")
        layer.self_attention.module = PreparedQueries
        layer.self_attention.params = {
            **layer.self_attention.params,
            "rotated": architecture.rotary_dim or architecture.head_dim,
            "factor": factor,
            "pairs": architecture.rotary_pairs,
        }
