"""Norms, rotary embedding, activation and sampling of a small batch, each in one pass over its rows.

As chains of torch's operators these are, beside products and attention, most of a small model's forward pass: each
operator takes some microseconds, whatever it works on. A row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import carray

from sglang_cpu_engine import compiled
from sglang_cpu_engine.compiled import OPTIONS, Compiled


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, the only one of ``weight``. All float32."""
    x, normed = x.contiguous(), torch.empty(x.shape)
    _RMS_NORM(x, weight, normed, x.numel() // len(weight), len(weight), epsilon)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` of x + residual, and that sum. ``residual`` has the shape of ``x``."""
    x, residual, normed, total = x.contiguous(), residual.contiguous(), torch.empty(x.shape), torch.empty(x.shape)
    _ADD_RMS_NORM(x, residual, weight, normed, total, x.numel() // len(weight), len(weight), epsilon)
    return normed, total


def rotate(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, head_size: int, interleaved: bool
) -> torch.Tensor:
    """Rotary embedding of ``x``; float32, of its shape.

    Args:
        x: float32 [tokens, heads * head size], whose rows may lie apart.
        cos_sin: float32 [positions, rotated features]: of each pair the cosine, in the first half, and the sine. A
            head's features beyond those stay as they are.
        positions: int64 [tokens].
        interleaved: a pair are neighbours (GPT-J); False: it is of the first and the second half (NeoX).
    """
    rotated = torch.empty(x.shape)
    shape = (*x.shape, head_size, cos_sin.shape[1] // 2)
    _ROTATE(x, cos_sin, positions, rotated, x.stride(0), *shape, interleaved)
    return rotated


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; float32 [..., features].

    Args:
        x: float32 [..., 2 * features], gate and up side by side.
    """
    x, features = x.contiguous(), x.shape[-1] // 2
    product = torch.empty(*x.shape[:-1], features)
    _SILU_AND_MUL(x, product, product.numel() // features, features)
    return product


def sample(probabilities: torch.Tensor) -> torch.Tensor:
    """A token of each row, by its probabilities; int32 [rows].

    It is the first one with which their sum exceeds a uniform share of the row's: one random number for a row, where
    torch.multinomial draws one for each token.

    Args:
        probabilities: float32 [rows, vocabulary], 0 or more, and one of each row above 0.
    """
    rows, vocabulary = probabilities.shape
    shares, tokens = torch.randint(2**53, (rows,)), torch.empty(rows, dtype=torch.int32)
    _SAMPLE(probabilities.contiguous(), shares, tokens, rows, vocabulary)
    return tokens


@numba.njit(**OPTIONS)
def _add_row(x, residual, total):  # type: ignore[no-untyped-def]
    for feature in range(len(total)):
        total[feature] = x[feature] + residual[feature]


@numba.njit(**OPTIONS)
def _norm_row(x, weight, normed, epsilon):  # type: ignore[no-untyped-def]
    squares = np.float32(0)
    for feature in range(len(x)):
        squares += x[feature] * x[feature]
    scale = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + epsilon)
    for feature in range(len(x)):
        normed[feature] = x[feature] * scale * weight[feature]


@numba.njit(**OPTIONS)
def _rotate_halves(before, after, cos, sin):  # type: ignore[no-untyped-def]
    half = len(cos)
    first, second, one, other = before[:half], before[half : 2 * half], after[:half], after[half : 2 * half]
    for pair in range(half):
        one[pair] = first[pair] * cos[pair] - second[pair] * sin[pair]
        other[pair] = second[pair] * cos[pair] + first[pair] * sin[pair]


@numba.njit(**OPTIONS)
def _rotate_neighbours(before, after, cos, sin):  # type: ignore[no-untyped-def]
    for pair in range(len(cos)):
        first, second = before[2 * pair], before[2 * pair + 1]
        after[2 * pair] = first * cos[pair] - second * sin[pair]
        after[2 * pair + 1] = second * cos[pair] + first * sin[pair]


@numba.njit(**OPTIONS)
def _activate_row(gate, up, product):  # type: ignore[no-untyped-def]
    for feature in range(len(product)):
        product[feature] = gate[feature] / (np.float32(1) + compiled.exp(-gate[feature])) * up[feature]


@numba.njit(**OPTIONS)
def _sample_row(probabilities, share):  # type: ignore[no-untyped-def]
    total = np.float64(0)
    for token in range(len(probabilities)):
        total += probabilities[token]
    missing, chosen = share * total, 0
    for token in range(len(probabilities)):
        if probabilities[token] > 0:
            # The last one that can be, where the two sums differ by a rounding.
            chosen = token
            missing -= probabilities[token]
            if missing < 0:
                break
    return chosen


def _rms_norm(x_, weight_, normed_, rows, features, epsilon):  # type: ignore[no-untyped-def]
    x, weight, normed = carray(x_, (rows, features)), carray(weight_, (features,)), carray(normed_, (rows, features))
    for row in range(rows):
        _norm_row(x[row], weight, normed[row], epsilon)


def _add_rms_norm(x_, residual_, weight_, normed_, total_, rows, features, epsilon):  # type: ignore[no-untyped-def]
    shape = (rows, features)
    x, residual, weight = carray(x_, shape), carray(residual_, shape), carray(weight_, (features,))
    normed, total = carray(normed_, shape), carray(total_, shape)
    for row in range(rows):
        _add_row(x[row], residual[row], total[row])
        _norm_row(total[row], weight, normed[row], epsilon)


def _rotate(  # type: ignore[no-untyped-def]
    x_, cos_sin_, positions_, rotated_, stride, tokens, width, size, half, interleaved
):
    positions, rotated = carray(positions_, (tokens,)), carray(rotated_, (tokens, width))
    x = carray(x_, ((tokens - 1) * stride + width,))
    for token in range(tokens):
        place = positions[token] * 2 * half
        factors = carray(cos_sin_, (place + 2 * half,))[place:]
        for head in range(0, width, size):
            before, after = x[token * stride + head :][:size], rotated[token, head : head + size]
            if interleaved:
                _rotate_neighbours(before, after, factors[:half], factors[half:])
            else:
                _rotate_halves(before, after, factors[:half], factors[half:])
            after[2 * half :] = before[2 * half :]


def _silu_and_mul(x_, product_, rows, features):  # type: ignore[no-untyped-def]
    x, product = carray(x_, (rows, 2, features)), carray(product_, (rows, features))
    for row in range(rows):
        _activate_row(x[row, 0], x[row, 1], product[row])


def _sample(probabilities_, shares_, tokens_, rows, vocabulary):  # type: ignore[no-untyped-def]
    probabilities, shares = carray(probabilities_, (rows, vocabulary)), carray(shares_, (rows,))
    tokens = carray(tokens_, (rows,))
    for row in range(rows):
        tokens[row] = _sample_row(probabilities[row], shares[row] / 2.0**53)


_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64
_RMS_NORM = Compiled(_rms_norm, _F32, _F32, _F32, int, int, float)
_ADD_RMS_NORM = Compiled(_add_rms_norm, _F32, _F32, _F32, _F32, _F32, int, int, float)
_ROTATE = Compiled(_rotate, _F32, _F32, _I64, _F32, int, int, int, int, int, int)
_SILU_AND_MUL = Compiled(_silu_and_mul, _F32, _F32, int, int)
_SAMPLE = Compiled(_sample, _F32, _I64, _I32, int, int)
