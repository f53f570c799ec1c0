"""Sums in one fixed order, compiled by numba: the arithmetic below ``operators.py``, on numpy arrays.

A row's result is the same bits whatever rows stand beside it, because every element is the same sequence of IEEE 754
operations: multiply-adds with one rounding (``fma``), additions, divisions and square roots. No kernel divides its work
by the number of rows, no compiler flag allows reordering, and the exponential is written out, since a vector library
may round the last elements of a loop otherwise than the first.

bfloat16 arrays arrive as uint16, the upper half of a float32. Every kernel computes in float32 and returns it. The
order of the partial sums of a product is that of ``lanes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from megatron_retool.exact.lanes import LANES, add_weighted, bits_as_float, dots, element, fma

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
"""No fastmath; divisions that cannot raise."""


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """``function``, compiled at its first call and kept on disk where there is room for it."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # nowhere to keep what is compiled
        return njit(**_OPTIONS)(function)


_BLOCK_ELEMENTS = 2**15
"""Of ``x`` in ``products``: 128 KB in float32."""


@njit(inline="always", **_OPTIONS)
def _four(start, step):  # type: ignore[no-untyped-def]
    return (start, start + step, start + 2 * step, start + 3 * step)


@_compiled
def products(x, w, out):  # type: ignore[no-untyped-def]
    """out[i, n] = sum over k of x[i, k] w[n, k]. ``x`` [rows, K], ``w`` [N, K], ``out`` float32 [rows, N]."""
    rows, length = x.shape
    columns = w.shape[0]
    whole_columns = columns - columns % 4
    # A block of x stays in the second cache while all of w passes, four columns of w in the first while the block does.
    block = max(4, _BLOCK_ELEMENTS // length // 4 * 4)
    for first in range(0, rows, block):
        end = min(first + block, rows)
        whole_end = end - (end - first) % 4
        for n in range(0, whole_columns, 4):
            four_columns = _four(n * length, length)
            for i in range(first, whole_end, 4):
                result = dots(x, _four(i * length, length), w, four_columns, length)
                for row in range(4):
                    for column in range(4):
                        out[i + row, n + column] = result[row * 4 + column]
            for i in range(whole_end, end):
                result = dots(x, (i * length,), w, four_columns, length)
                for column in range(4):
                    out[i, n + column] = result[column]
        for n in range(whole_columns, columns):
            for i in range(first, whole_end, 4):
                result = dots(x, _four(i * length, length), w, (n * length,), length)
                for row in range(4):
                    out[i + row, n] = result[row]
            for i in range(whole_end, end):
                out[i, n] = dots(x, (i * length,), w, (n * length,), length)[0]


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(-0.693145751953125)
_LN2_LOW = np.float32(-1.4286068203094172e-06)
_TO_INTEGER = np.float32(12582912.0)
"""1.5 * 2^23: a float32 of that size has no digits behind the point."""
_SMALLEST = np.float32(-87.0)
_P0, _P1, _P2, _P3, _P4, _P5 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
"""Cephes' polynomial (expf.c): exp(r) = 1 + r + r^2 P(r) for |r| <= ln 2 / 2, to 1 unit in the last place."""


@njit(inline="always", **_OPTIONS)
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) for x <= 0 in float32; 0 below -87."""
    bounded = max(x, _SMALLEST)
    whole = fma(bounded, _LOG2_E, _TO_INTEGER) - _TO_INTEGER
    r = fma(whole, _LN2_LOW, fma(whole, _LN2_HIGH, bounded))
    p = fma(fma(fma(fma(fma(_P0, r, _P1), r, _P2), r, _P3), r, _P4), r, _P5)
    y = fma(p, r * r, r) + np.float32(1.0)
    scale = bits_as_float(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    return y * scale if x >= _SMALLEST else np.float32(0.0)


@njit(inline="always", **_OPTIONS)
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)), with the exponential of a negative number on both sides of 0."""
    small = exponential(-abs(x))
    return (np.float32(1.0) if x >= np.float32(0.0) else small) / (np.float32(1.0) + small)


@njit(inline="always", **_OPTIONS)
def _sum_of_lanes(lanes):  # type: ignore[no-untyped-def]
    width = LANES
    while width > 1:
        width //= 2
        for lane in range(width):
            lanes[lane] = lanes[lane] + lanes[lane + width]
    return lanes[0]


@_compiled
def normalized(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """RMSNorm of each row: out[i, k] = weight[k] (x[i, k] / sqrt(mean of x[i]^2 + eps))."""
    rows, length = x.shape
    for i in range(rows):
        squares = dots(x, (i * length,), x, (i * length,), length)[0]
        scale = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(length) + eps))
        for k in range(length):
            out[i, k] = (element(x, i * length + k) * scale) * element(weight, k)


@_compiled
def rotated(x, cos, sin, out):  # type: ignore[no-untyped-def]
    """Rotary positions of the first features of each head, in halves: (a, b) -> (a cos - b sin, b cos + a sin).

    ``x`` [rows, heads, d], ``cos`` and ``sin`` float32 [rows, r / 2] for r rotated features; the others pass.
    """
    rows, heads, size = x.shape
    half = cos.shape[1]
    for i in range(rows):
        for head in range(heads):
            start = (i * heads + head) * size
            for k in range(half):
                a, b = element(x, start + k), element(x, start + half + k)
                out[i, head, k] = fma(-b, sin[i, k], a * cos[i, k])
                out[i, head, half + k] = fma(a, sin[i, k], b * cos[i, k])
            for k in range(2 * half, size):
                out[i, head, k] = element(x, start + k)


@njit(**_OPTIONS)
def _attend(query, starts, keys, values, slots, first, counts, row, head, scale, weights, sums, out):  # type: ignore[no-untyped-def]
    """``attended`` for one head of the rows from ``row`` on, whose queries begin at ``starts`` and see ``counts`` keys.

    Both are tuples; the keys of a row begin with those of the row before. ``weights`` float32 [rows, largest count] and
    ``sums`` float32 [rows, LANES] are overwritten.
    """
    heads, size = query.shape[1], query.shape[2]
    groups, stride, width = keys.shape[1], values.shape[2], out.shape[2]
    group = head // (heads // groups)
    common = counts[0] - counts[0] % 4
    for j in range(0, common, 4):
        places = (
            (slots[first + j] * groups + group) * size,
            (slots[first + j + 1] * groups + group) * size,
            (slots[first + j + 2] * groups + group) * size,
            (slots[first + j + 3] * groups + group) * size,
        )
        result = dots(query, starts, keys, places, size)
        for each in range(len(counts)):
            for key in range(4):
                weights[each, j + key] = result[each * 4 + key] * scale
    for each in range(len(counts)):
        count = counts[each]
        for j in range(common, count):
            place = (slots[first + j] * groups + group) * size
            weights[each, j] = dots(query, (starts[each],), keys, (place,), size)[0] * scale
        largest = np.float32(-np.inf)
        for j in range(count):
            largest = max(largest, weights[each, j])
        for j in range(count):
            weights[each, j] = exponential(weights[each, j] - largest)
    for k in range(0, width, LANES):
        add_weighted(weights, values, slots, first, counts, groups * stride, group * stride + k, width - k, sums)
        for each in range(len(counts)):
            for lane in range(min(LANES, width - k)):
                out[row + each, head, k + lane] = sums[each, lane]
    lanes = sums[0]
    for each in range(len(counts)):
        for lane in range(LANES):
            lanes[lane] = np.float32(0.0)
        whole = counts[each] - counts[each] % LANES
        for j in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] = lanes[lane] + weights[each, j + lane]
        for j in range(whole, counts[each]):
            lanes[j - whole] = lanes[j - whole] + weights[each, j]
        total = _sum_of_lanes(lanes)
        for k in range(width):
            out[row + each, head, k] = out[row + each, head, k] / total


@_compiled
def attended(query, keys, values, slots, starts, counts, scale, out):  # type: ignore[no-untyped-def]
    """Softmax attention of each query over its own keys, in their order.

    ``query`` [rows, heads, d]; ``keys`` and ``values`` [places, groups, d]. Row i sees the keys at the places
    slots[starts[i]], ..., slots[starts[i] + counts[i] - 1]. ``out`` float32 [rows, heads, v], of the first v
    features of the values.
    """
    rows, heads, size = query.shape
    longest = counts.max() if rows else 0
    weights, sums = np.empty((4, longest), np.float32), np.empty((4, LANES), np.float32)
    row = 0
    while row < rows:
        first, together = starts[row], row + 3 < rows
        # Four neighbours of a text, each of which sees what the one before it sees, read their keys together.
        for each in range(row + 1, row + 4):
            together = together and starts[each] == first and counts[each] >= counts[each - 1]
        for head in range(heads):
            start = (row * heads + head) * size
            if together:
                four = _four(start, heads * size)
                seen = (counts[row], counts[row + 1], counts[row + 2], counts[row + 3])
                _attend(query, four, keys, values, slots, first, seen, row, head, scale, weights, sums, out)
            else:
                one, by_it = (start,), (counts[row],)
                _attend(query, one, keys, values, slots, first, by_it, row, head, scale, weights, sums, out)
        row += 4 if together else 1


@_compiled
def gated(x, out):  # type: ignore[no-untyped-def]
    """SwiGLU of each row: silu of the first half times the second."""
    rows, length = x.shape
    half = length // 2
    for i in range(rows):
        for k in range(half):
            gate, up = element(x, i * length + k), element(x, i * length + half + k)
            out[i, k] = (gate * _sigmoid(gate)) * up


_GELU_SLOPE = np.float32(1.5957691216057308)
_GELU_CUBE = np.float32(0.044715)


@_compiled
def gelu_gated(x, out):  # type: ignore[no-untyped-def]
    """GELU of the first half of each row times the second, GELU by its tanh: (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    rows, length = x.shape
    half = length // 2
    for i in range(rows):
        for k in range(half):
            gate, up = element(x, i * length + k), element(x, i * length + half + k)
            out[i, k] = (gate * _sigmoid(_GELU_SLOPE * (gate + _GELU_CUBE * (gate * gate * gate)))) * up


@_compiled
def gates_of(logits, chosen, over_all, out):  # type: ignore[no-untyped-def]
    """Softmax of a router's logits, float32 [rows, experts], over each row's chosen experts or over all of them.

    ``out`` has it for the chosen ones, and 0 for the others.
    """
    rows, experts = logits.shape
    for i in range(rows):
        largest, total = np.float32(-np.inf), np.float32(0.0)
        for e in range(experts):
            if over_all or chosen[i, e]:
                largest = max(largest, logits[i, e])
        for e in range(experts):
            if over_all or chosen[i, e]:
                total = total + exponential(logits[i, e] - largest)
        for e in range(experts):
            out[i, e] = exponential(logits[i, e] - largest) / total if chosen[i, e] else np.float32(0.0)


@_compiled
def sigmoids(x, out):  # type: ignore[no-untyped-def]
    """Sigmoid of each element of float32 [rows, columns]."""
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[i, k] = _sigmoid(x[i, k])


@_compiled
def exponentials(x, out):  # type: ignore[no-untyped-def]
    """exp of each element of float32 [rows, columns], none of which is above 0."""
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[i, k] = exponential(x[i, k])


@_compiled
def shares_of(scores, chosen, out):  # type: ignore[no-untyped-def]
    """Each row's chosen scores, float32 [rows, experts], divided by their sum in the order of the experts; else 0."""
    rows, experts = scores.shape
    for i in range(rows):
        total = np.float32(0.0)
        for e in range(experts):
            if chosen[i, e]:
                total = total + scores[i, e]
        for e in range(experts):
            out[i, e] = scores[i, e] / (total + np.float32(1e-20)) if chosen[i, e] else np.float32(0.0)


@_compiled
def log_normalizers(logits, out):  # type: ignore[no-untyped-def]
    """Of each row of float32 logits: its largest, and the logarithm of the sum of exp(logit - largest)."""
    rows, length = logits.shape
    exponentials = np.empty(length, np.float32)
    lanes = np.empty(LANES, np.float32)
    for i in range(rows):
        largest = np.float32(-np.inf)
        for k in range(length):
            largest = max(largest, logits[i, k])
        for k in range(length):
            exponentials[k] = exponential(logits[i, k] - largest)
        for lane in range(LANES):
            lanes[lane] = np.float32(0.0)
        whole = length - length % LANES
        for k in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] = lanes[lane] + exponentials[k + lane]
        for k in range(whole, length):
            lanes[k - whole] = lanes[k - whole] + exponentials[k]
        out[i, 0] = largest
        out[i, 1] = np.float32(math.log(np.float64(_sum_of_lanes(lanes))))


@_compiled
def convolved(x, weight, bias, out):  # type: ignore[no-untyped-def]
    """silu of each feature's bias and weighted sum over its last tokens; the last weight is the present token's.

    ``x`` [batch, features, width - 1 + tokens], ``weight`` [features, width], ``bias`` [features], ``out`` [batch,
    features, tokens].
    """
    batch, features, tokens = out.shape
    width = weight.shape[1]
    for line in range(batch * features):
        first, factors = line * (tokens + width - 1), line % features * width
        for token in range(tokens):
            total = element(bias, line % features)
            for place in range(width):
                total = fma(element(weight, factors + place), element(x, first + token + place), total)
            out[line // features, line % features, token] = total * _sigmoid(total)


@njit(inline="always", **_OPTIONS)
def _softplus(x):  # type: ignore[no-untyped-def]
    wide = np.float64(x)
    return np.float32(max(wide, 0.0) + math.log1p(math.exp(-abs(wide))))


@_compiled
def rates(steps, logits, log_factors, bias, log_decays, betas):  # type: ignore[no-untyped-def]
    """A delta net's log_decays = -exp(log_factors) softplus(steps + bias) and betas = sigmoid(logits), by head.

    ``log_factors`` and ``bias`` [heads], all others [tokens, heads]; the last two are filled.
    """
    heads = len(log_factors)
    for i in range(log_decays.shape[0]):
        for head in range(heads):
            step = _softplus(element(steps, i * heads + head) + element(bias, head))
            log_decays[i, head] = -(np.float32(math.exp(np.float64(element(log_factors, head)))) * step)
            betas[i, head] = _sigmoid(element(logits, i * heads + head))


@njit(inline="always", **_OPTIONS)
def _unit(x, eps, factor, out):  # type: ignore[no-untyped-def]
    """out[i, h] = factor x[i, h] / sqrt(its squares' sum + eps)."""
    rows, heads, length = out.shape
    for i in range(rows):
        for head in range(heads):
            start = (i * heads + head) * length
            squares = dots(x, (start,), x, (start,), length)[0]
            scale = factor / np.float32(math.sqrt(squares + eps))
            for k in range(length):
                out[i, head, k] = element(x, start + k) * scale


@njit(inline="always", **_OPTIONS)
def _change(states, row, kept, change, key):  # type: ignore[no-untyped-def]
    for k in range(len(key)):
        states[row, k] = fma(change, key[k], kept * states[row, k])


@_compiled
def delta_rule(query, key, value, log_decays, betas, eps, states, slots, starts, out):  # type: ignore[no-untyped-def]
    """A gated delta net's memory S of each head, token by token; queries and keys are made to unit length first.

    S = d S + b (v - d S k) k^T with d = exp(log_decay), then out = S q / sqrt(K).

    ``query`` and ``key`` [tokens, key heads, K]; ``value`` and ``out`` [tokens, heads, V]; ``log_decays`` and ``betas``
    float32 [tokens, heads]. Text i has the tokens from starts[i] to starts[i + 1] and the states of slot slots[i] in
    ``states`` float32 [slots x heads x V, K], which become those behind its tokens.
    """
    tokens, key_heads, length = key.shape
    heads, size = out.shape[1], out.shape[2]
    queries, keys = np.empty((tokens, key_heads, length), np.float32), np.empty((tokens, key_heads, length), np.float32)
    one = np.float32(1.0)
    _unit(query, eps, one / np.float32(math.sqrt(np.float32(length))), queries)
    _unit(key, eps, one, keys)
    whole = size - size % 4
    for text in range(len(slots)):
        for head in range(heads):
            key_head, first = head // (heads // key_heads), (slots[text] * heads + head) * size
            for token in range(starts[text], starts[text + 1]):
                kept, beta = exponential(log_decays[token, head]), betas[token, head]
                place, own = (token * key_heads + key_head) * length, keys[token, key_head]
                wanted = (token * heads + head) * size
                for row in range(0, whole, 4):
                    four = _four((first + row) * length, length)
                    answers = dots(states, four, keys, (place,), length)
                    for each in range(4):
                        change = beta * (element(value, wanted + row + each) - kept * answers[each])
                        _change(states, first + row + each, kept, change, own)
                    reads = dots(states, four, queries, (place,), length)
                    for each in range(4):
                        out[token, head, row + each] = reads[each]
                for row in range(whole, size):
                    start = ((first + row) * length,)
                    answer = dots(states, start, keys, (place,), length)[0]
                    _change(states, first + row, kept, beta * (element(value, wanted + row) - kept * answer), own)
                    out[token, head, row] = dots(states, start, queries, (place,), length)[0]


@_compiled
def state_space(value, steps, rates, skip, bias, write, read, states, slots, starts, out):  # type: ignore[no-untyped-def]
    """Mamba-2's memory S of each head, token by token: S = exp(s a) S + s v w^T, then out = S r + d v.

    s is softplus(steps + bias), a is ``rates``, d is ``skip``: float32 [tokens, heads], and [heads] each. ``value`` and
    ``out`` [tokens, heads, V]; ``write`` and ``read``, float32 [tokens, groups, N], are those of each group of heads.
    Texts and ``states``, float32 [slots x heads x V, N], as in ``delta_rule``.
    """
    heads, size = out.shape[1], out.shape[2]
    groups, length = read.shape[1], read.shape[2]
    whole = size - size % 4
    for text in range(len(slots)):
        for head in range(heads):
            group, first = head // (heads // groups), (slots[text] * heads + head) * size
            for token in range(starts[text], starts[text + 1]):
                step = _softplus(element(steps, token * heads + head) + element(bias, head))
                kept, own = exponential(step * rates[head]), write[token, group]
                place, wanted = (token * groups + group) * length, (token * heads + head) * size
                for row in range(size):
                    _change(states, first + row, kept, step * element(value, wanted + row), own)
                for row in range(0, whole, 4):
                    answers = dots(states, _four((first + row) * length, length), read, (place,), length)
                    for each in range(4):
                        seen = element(value, wanted + row + each)
                        out[token, head, row + each] = fma(element(skip, head), seen, answers[each])
                for row in range(whole, size):
                    answer = dots(states, ((first + row) * length,), read, (place,), length)[0]
                    out[token, head, row] = fma(element(skip, head), element(value, wanted + row), answer)
