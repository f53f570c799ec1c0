"""Rotary positions: their frequencies, and layers that differ in them."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from conversion.model.architecture import Architecture
from conversion.model.position_config import RopeScaling
from megatron_retool.errors import InputError


def inverse_frequencies(architecture: Architecture, local: bool = False) -> Tensor:
    """float32 [d / 2]: theta^(-2i/d) for the d features of a head that positions rotate, stretched as the model's rope
    scaling says.

    llama3 keeps wavelengths below original / high_freq_factor, divides the frequency of those above
    original / low_freq_factor by ``factor``, and interpolates between.  longrope divides each by a number of its own,
    here that of texts of up to ``Architecture.longest_text`` tokens.

    Args:
        local: of the layers with a window, by ``local_rope_theta``.
    """
    theta, scaling = architecture.rope_theta, architecture.rope_scaling
    if local:
        assert architecture.local_rope_theta is not None
        theta, scaling = architecture.local_rope_theta, None
    size = architecture.rotary_dim or architecture.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(frequencies, theta, scaling)
    if scaling.kind == "longrope":
        return 1.0 / (torch.tensor(scaling.short_factors) * theta**exponents)
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    smooth = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """What rotates often over the original positions stays, what rotates seldom is divided by ``factor``, between them
    a ramp over the dimensions (YaRN, arXiv:2309.00071, section 3.2)."""
    dimension = 2 * frequencies.numel()

    def where(rotations: float) -> float:
        wavelength = scaling.original_max_position_embeddings / rotations
        return dimension * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = where(scaling.beta_fast), where(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimension - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(frequencies.numel()) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def softmax_scale(architecture: Architecture, local: bool = False) -> float:
    """What attention scores are multiplied by; ``local``: in the layers with a window, by ``local_rope_theta``.

    The factor of YaRN and LongRoPE on rotated queries and on keys is its square on scores, unless a part of each head
    is not rotated: then it is ``query_factor``.
    """
    stretched = 1.0 if local or architecture.rotary_dim is not None else _squared_factor(architecture)
    return stretched * (architecture.softmax_scale or 1.0 / math.sqrt(architecture.head_dim))


def query_factor(architecture: Architecture) -> float:
    """What rotated features of queries are multiplied by, where a part of each head is not rotated: the square of the
    factor that queries and keys have."""
    return 1.0 if architecture.rotary_dim is None else _squared_factor(architecture)


def _squared_factor(architecture: Architecture) -> float:
    return 1.0 if architecture.rope_scaling is None else architecture.rope_scaling.attention_factor**2


def query_growth(architecture: Architecture, positions: Tensor) -> Tensor | None:
    """float32 [t, 1, 1, 1]: what queries at ``positions`` (int64 [t]) are multiplied by; None: by nothing."""
    if architecture.query_growth is None:
        return None
    share, period = architecture.query_growth
    return (1 + share * torch.log1p(torch.floor(positions / period))).float().view(-1, 1, 1, 1)


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
    factor = query_factor(architecture)
    prepared = factor != 1.0 or architecture.rotary_pairs or architecture.query_growth is not None
    if architecture.local_rope_theta is not None:
        if prepared or architecture.unrotated_layers:
            raise InputError("positions that differ by layer are missing beside queries that are prepared for them")
        if architecture.linear_layers or architecture.attention_gate:
            raise InputError("positions that differ by layer are missing beside gated delta nets and gated attention")
        layer.self_attention.module = MixedSelfAttention
        layer.self_attention.params = {
            **layer.self_attention.params,
            "local_scale": softmax_scale(architecture, local=True),
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
