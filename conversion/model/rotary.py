"""The frequencies of rotary positions and what belongs to them, as a model's architecture says.

Imports torch only where frequencies are computed: checks of a configuration read the factors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from conversion.model.architecture import Architecture
from conversion.model.position_config import RopeScaling

if TYPE_CHECKING:
    from torch import Tensor


def inverse_frequencies(architecture: Architecture, local: bool = False) -> Tensor:
    """float32 [d / 2]: theta^(-2i/d) for the d features of a head that positions rotate, stretched as the model's rope
    scaling says.

    llama3 keeps wavelengths below original / high_freq_factor, divides the frequency of those above
    original / low_freq_factor by ``factor``, and interpolates between.  longrope divides each by a number of its own,
    here that of texts of up to ``Architecture.longest_text`` tokens.

    Args:
        local: of the layers with a window, by ``local_rope_theta``.
    """
    import torch

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
    import torch

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


def query_growth(share: float, period: int, positions: Tensor) -> Tensor:
    """float32 as ``positions`` (int64): 1 + share log(1 + floor(position / period)), rounded once from float64."""
    import torch

    return (1 + share * torch.log1p((positions // period).double())).float()
