"""The kernels of ``kernels.py`` for a GPU, in Triton: same names, same arguments, tensors in the place of arrays.

A row's result is the same bits whatever rows stand beside it, on one kind of GPU: no kernel divides a row's sum by the
number of rows, sizes of blocks are constants or follow from a row's own sizes, and a matrix unit's row depends on no
other row. They are other bits than those of a CPU: sums have another order.

Triton lays a row out over threads by what it knows of pointers and sizes, and a layout is an order of sums: tensors
begin at multiples of 16 bytes (``operators._compute`` sees to it), and no code is made for a number of rows.
"""

# Kernels have no annotations, and their constants are in capitals.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PRODUCT_BLOCKS = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32}
_LINE = 1024
"""Numbers of a row at a time."""
_KEYS = 32
"""Keys at a time in attention."""
_SCORES = 64
"""Features at a time in an attention's scores."""
_TOKENS = 128
"""Tokens at a time in a convolution."""
_MEMORY_ROWS = 32
"""Rows of a head's memory in one program."""
_LEAST = 16
"""Rows and columns that a matrix unit takes at least."""
_HEADS = 16
"""Heads of a group at most in one program: latent attention has one group for all of them, and wide values."""


@triton.jit(do_not_specialize=["rows"])
def _products(x, w, out, rows, columns, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, length, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = tl.load(x + i[:, None] * length + k[None, :], (i[:, None] < rows) & (k[None, :] < length), 0.0)
        right = tl.load(w + n[None, :] * length + k[:, None], (n[None, :] < columns) & (k[:, None] < length), 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + i[:, None] * columns + n[None, :], total, (i[:, None] < rows) & (n[None, :] < columns))


def products(x: Tensor, w: Tensor, out: Tensor) -> None:
    """As ``kernels.products``; ``x`` and ``w`` have one dtype."""
    (rows, length), columns = x.shape, w.size(0)
    grid = (triton.cdiv(rows, _PRODUCT_BLOCKS["ROWS"]), triton.cdiv(columns, _PRODUCT_BLOCKS["COLUMNS"]))
    _products[grid](x, w, out, rows, columns, length, **_PRODUCT_BLOCKS)


@triton.jit
def _normalized(x, weight, eps, out, length, LINE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * length
    squares = tl.zeros((LINE,), tl.float32)
    for start in range(0, length, LINE):
        k = start + tl.arange(0, LINE)
        value = tl.load(x + row + k, k < length, 0.0).to(tl.float32)
        squares += value * value
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares) / length + eps)
    for start in range(0, length, LINE):
        k = start + tl.arange(0, LINE)
        value = tl.load(x + row + k, k < length, 0.0).to(tl.float32)
        tl.store(out + row + k, (value * scale) * tl.load(weight + k, k < length, 0.0).to(tl.float32), k < length)


def normalized(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """As ``kernels.normalized``."""
    _normalized[(x.size(0),)](x, weight, eps, out, x.size(1), LINE=_LINE)


@triton.jit
def _rotated(x, cos, sin, out, heads, size, half, HALF: tl.constexpr, REST: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    start, angle, k = line * size, line // heads * half, tl.arange(0, HALF)
    first = tl.load(x + start + k, k < half, 0.0).to(tl.float32)
    second = tl.load(x + start + half + k, k < half, 0.0).to(tl.float32)
    c, s = tl.load(cos + angle + k, k < half, 0.0), tl.load(sin + angle + k, k < half, 0.0)
    tl.store(out + start + k, tl.fma(-second, s, first * c), k < half)
    tl.store(out + start + half + k, tl.fma(first, s, second * c), k < half)
    rest = 2 * half + tl.arange(0, REST)
    tl.store(out + start + rest, tl.load(x + start + rest, rest < size, 0.0).to(tl.float32), rest < size)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """As ``kernels.rotated``."""
    (rows, heads, size), half = x.shape, cos.size(1)
    blocks = {"HALF": triton.next_power_of_2(half), "REST": triton.next_power_of_2(max(1, size - 2 * half))}
    _rotated[(rows * heads,)](x, cos, sin, out, heads, size, half, **blocks)


@triton.jit
def _attended(
    query, keys, values, slots, firsts, numbers, starts, counts, scale, out, heads, groups, share, size, stride, width,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCORES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some neighbouring rows of a text, with HEADS heads of a group: row r of the tile is of query r // HEADS."""
    tile, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, number = tl.load(firsts + tile), tl.load(numbers + tile)
    own, head = tl.arange(0, ROWS) // HEADS, tl.program_id(2) * HEADS + tl.arange(0, ROWS) % HEADS
    there = (own < number) & (head < share)
    row = first + own
    line = (row * heads + group * share + head)[:, None]
    seen = tl.load(counts + row, there, 0)
    begin, longest = tl.load(starts + first), tl.load(counts + first + number - 1)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, WIDTH), tl.float32)
    v = tl.arange(0, WIDTH)
    for key in range(0, longest, KEYS):
        j = key + tl.arange(0, KEYS)
        place = tl.load(slots + begin + j, j < longest, 0).to(tl.int64) * groups + group
        scores = tl.zeros((ROWS, KEYS), tl.float32)
        for feature in range(0, size, SCORES):
            k = feature + tl.arange(0, SCORES)
            left = tl.load(query + line * size + k[None, :], there[:, None] & (k[None, :] < size), 0.0)
            mask = (j[None, :] < longest) & (k[:, None] < size)
            right = tl.load(keys + place[None, :] * size + k[:, None], mask, 0.0)
            scores = tl.dot(left, right, scores, input_precision="ieee")
        visible = j[None, :] < seen[:, None]
        scores = tl.where(visible, scores * scale, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        # A row that sees none of these keys keeps its numbers: its factor is 1, and its weights are 0.
        kept = tl.where(highest == largest, 1.0, tl.exp(largest - highest))
        weights = tl.where(visible, tl.exp(scores - highest[:, None]), 0.0)
        total = total * kept + tl.sum(weights, 1)
        mask = (j[:, None] < longest) & (v[None, :] < width)
        value = tl.load(values + place[:, None] * stride + v[None, :], mask, 0.0)
        summed = tl.dot(weights.to(value.dtype), value, summed * kept[:, None], input_precision="ieee")
        largest = highest
    mask = there[:, None] & (v[None, :] < width)
    tl.store(out + line * width + v[None, :], summed / total[:, None], mask)


def attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """As ``kernels.attended``. Weights are rounded to the values' dtype, as matrix units take them."""
    (_, heads, size), groups, width = query.shape, keys.size(1), out.size(2)
    share = heads // groups
    together = min(share, _HEADS)
    rows = max(_LEAST, triton.next_power_of_2(together))
    firsts, numbers = _tiles(starts, counts, rows // together)
    blocks = {"KEYS": _KEYS, "SCORES": _SCORES, "WIDTH": max(_LEAST, triton.next_power_of_2(width))}
    _attended[(firsts.numel(), groups, triton.cdiv(share, together))](
        query, keys, values, slots, firsts, numbers, starts, counts, scale, out,
        heads, groups, share, size, values.size(2), width, HEADS=together, ROWS=rows, **blocks,
    )  # fmt: skip


def _tiles(starts: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """First row and number of rows, int64, of runs of at most ``most`` neighbours of a text whose counts ascend."""
    rows = torch.arange(starts.numel(), device=starts.device)
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[1:] = (starts[1:] != starts[:-1]) | (counts[1:] < counts[:-1])
    run_start = torch.where(begins, rows, 0).cummax(0).values
    (firsts,) = ((rows - run_start) % most == 0).nonzero(as_tuple=True)
    ends = torch.cat([firsts[1:], rows.new_tensor([rows.numel()])])
    return firsts, ends - firsts


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def _gated(x, out, half, LINE: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    gate = tl.load(x + row * 2 * half + k, k < half, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * half + half + k, k < half, 0.0).to(tl.float32)
    tl.store(out + row * half + k, (gate * _sigmoid(gate)) * up, k < half)


def gated(x: Tensor, out: Tensor) -> None:
    """As ``kernels.gated``."""
    _gated[(x.size(0), triton.cdiv(out.size(1), _LINE))](x, out, out.size(1), LINE=_LINE)


@triton.jit
def _gelu_gated(x, out, half, LINE: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    gate = tl.load(x + row * 2 * half + k, k < half, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * half + half + k, k < half, 0.0).to(tl.float32)
    z = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    tl.store(out + row * half + k, (gate * _sigmoid(z)) * up, k < half)


def gelu_gated(x: Tensor, out: Tensor) -> None:
    """As ``kernels.gelu_gated``."""
    _gelu_gated[(x.size(0), triton.cdiv(out.size(1), _LINE))](x, out, out.size(1), LINE=_LINE)


@triton.jit
def _sigmoids(x, out, count, LINE: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * LINE + tl.arange(0, LINE)
    tl.store(out + k, _sigmoid(tl.load(x + k, k < count, 0.0)), k < count)


def sigmoids(x: Tensor, out: Tensor) -> None:
    """As ``kernels.sigmoids``."""
    _sigmoids[(triton.cdiv(x.numel(), _LINE),)](x, out, x.numel(), LINE=_LINE)


@triton.jit
def _exponentials(x, out, count, LINE: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * LINE + tl.arange(0, LINE)
    tl.store(out + k, tl.exp(tl.load(x + k, k < count, 0.0)), k < count)


def exponentials(x: Tensor, out: Tensor) -> None:
    """As ``kernels.exponentials``."""
    _exponentials[(triton.cdiv(x.numel(), _LINE),)](x, out, x.numel(), LINE=_LINE)


@triton.jit
def _gates_of(logits, chosen, out, experts, OVER_ALL: tl.constexpr, EXPERTS: tl.constexpr):
    row, e = tl.program_id(0).to(tl.int64) * experts, tl.arange(0, EXPERTS)
    taken = tl.load(chosen + row + e, e < experts, 0) != 0
    among = (e < experts) if OVER_ALL else taken
    x = tl.where(among, tl.load(logits + row + e, e < experts, 0.0), float("-inf"))
    shares = tl.where(among, tl.exp(x - tl.max(x, 0)), 0.0)
    tl.store(out + row + e, tl.where(taken, shares / tl.sum(shares), 0.0), e < experts)


def gates_of(logits: Tensor, chosen: Tensor, over_all: bool, out: Tensor) -> None:
    """As ``kernels.gates_of``."""
    rows, experts = logits.shape
    block = triton.next_power_of_2(experts)
    _gates_of[(rows,)](logits, chosen, out, experts, OVER_ALL=over_all, EXPERTS=block)


@triton.jit
def _shares_of(scores, chosen, out, experts, EXPERTS: tl.constexpr):
    row, e = tl.program_id(0).to(tl.int64) * experts, tl.arange(0, EXPERTS)
    taken = tl.load(chosen + row + e, e < experts, 0) != 0
    x = tl.where(taken, tl.load(scores + row + e, e < experts, 0.0), 0.0)
    tl.store(out + row + e, x / (tl.sum(x) + 1e-20), e < experts)


def shares_of(scores: Tensor, chosen: Tensor, out: Tensor) -> None:
    """As ``kernels.shares_of``."""
    rows, experts = scores.shape
    _shares_of[(rows,)](scores, chosen, out, experts, EXPERTS=triton.next_power_of_2(experts))


@triton.jit
def _log_normalizers(logits, out, length, LINE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((LINE,), float("-inf"), tl.float32)
    for start in range(0, length, LINE):
        k = start + tl.arange(0, LINE)
        highest = tl.maximum(highest, tl.load(logits + row * length + k, k < length, float("-inf")))
    largest = tl.max(highest, 0)
    total = tl.zeros((LINE,), tl.float32)
    for start in range(0, length, LINE):
        k = start + tl.arange(0, LINE)
        total += tl.exp(tl.load(logits + row * length + k, k < length, float("-inf")) - largest)
    tl.store(out + row * 2, largest)
    tl.store(out + row * 2 + 1, tl.log(tl.sum(total)))


def log_normalizers(logits: Tensor, out: Tensor) -> None:
    """As ``kernels.log_normalizers``; the logarithm is taken in float32."""
    _log_normalizers[(logits.size(0),)](logits, out, logits.size(1), LINE=_LINE)


@triton.jit(do_not_specialize=["tokens"])
def _convolved(x, weight, bias, out, features, tokens, WIDTH: tl.constexpr, LINE: tl.constexpr):
    line, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    feature, there = line % features, token < tokens
    total = tl.zeros((LINE,), tl.float32) + tl.load(bias + feature).to(tl.float32)
    for place in tl.static_range(WIDTH):
        factor = tl.load(weight + feature * WIDTH + place).to(tl.float32)
        seen = tl.load(x + line * (tokens + WIDTH - 1) + token + place, there, 0.0).to(tl.float32)
        total = tl.fma(seen, factor, total)
    tl.store(out + line * tokens + token, total * _sigmoid(total), there)


def convolved(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """As ``kernels.convolved``."""
    batch, features, tokens = out.shape
    grid = batch * features, triton.cdiv(tokens, _TOKENS)
    _convolved[grid](x, weight, bias, out, features, tokens, WIDTH=weight.size(1), LINE=_TOKENS)


@triton.jit
def _softplus(x):
    """By way of float64, where log(1 + e) = e log(u) / (u - 1) with u = 1 + e as it is rounded."""
    wide = x.to(tl.float64)
    small = tl.exp(-tl.abs(wide))
    rounded = 1.0 + small
    rest = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    rising = tl.where(rounded == 1.0, small, small * (tl.log(rounded) / rest))
    return (tl.where(wide > 0.0, wide, 0.0) + rising).to(tl.float32)


@triton.jit
def _rates(steps, logits, log_factors, bias, log_decays, betas, heads, HEADS: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64) * heads, tl.arange(0, HEADS)
    there = head < heads
    moved = tl.load(steps + row + head, there, 0.0).to(tl.float32) + tl.load(bias + head, there, 0.0).to(tl.float32)
    factor = tl.exp(tl.load(log_factors + head, there, 0.0).to(tl.float64)).to(tl.float32)
    tl.store(log_decays + row + head, -(factor * _softplus(moved)), there)
    tl.store(betas + row + head, _sigmoid(tl.load(logits + row + head, there, 0.0).to(tl.float32)), there)


def rates(steps: Tensor, logits: Tensor, log_factors: Tensor, bias: Tensor, log_decays: Tensor, betas: Tensor) -> None:
    """As ``kernels.rates``."""
    rows, heads = log_decays.shape
    block = triton.next_power_of_2(heads)
    _rates[(rows,)](steps, logits, log_factors, bias, log_decays, betas, heads, HEADS=block)


@triton.jit
def _delta_rule(
    query, key, value, log_decays, betas, eps, factor, states, slots, starts, out, key_heads, heads, size, length,
    ROWS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Some rows of a head's memory through the tokens of a text."""
    text, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, k = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    there = (row < size)[:, None] & (k < length)[None, :]
    place = states + (tl.load(slots + text) * heads + head) * size * length + row[:, None] * length + k[None, :]
    memory = tl.load(place, there, 0.0)
    for token in range(tl.load(starts + text), tl.load(starts + text + 1)):
        line, vector = token * heads + head, (token * key_heads + head // (heads // key_heads)) * length + k
        own = tl.load(key + vector, k < length, 0.0).to(tl.float32)
        asked = tl.load(query + vector, k < length, 0.0).to(tl.float32)
        own = (own * (1.0 / tl.sqrt_rn(tl.sum(own * own) + eps)))[None, :]
        asked = (asked * (factor / tl.sqrt_rn(tl.sum(asked * asked) + eps)))[None, :]
        kept, beta = tl.exp(tl.load(log_decays + line)), tl.load(betas + line)
        wanted = tl.load(value + line * size + row, row < size, 0.0).to(tl.float32)
        change = beta * (wanted - kept * tl.sum(memory * own, 1))
        memory = tl.fma(tl.broadcast_to(change[:, None], memory.shape), own, kept * memory)
        tl.store(out + line * size + row, tl.sum(memory * asked, 1), row < size)
    tl.store(place, memory, there)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decays: Tensor,
    betas: Tensor,
    eps: float,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    out: Tensor,
) -> None:
    """As ``kernels.delta_rule``."""
    (_, key_heads, length), (_, heads, size) = key.shape, out.shape
    _delta_rule[(slots.numel(), heads, triton.cdiv(size, _MEMORY_ROWS))](
        query, key, value, log_decays, betas, eps, length**-0.5, states, slots, starts, out,
        key_heads, heads, size, length, ROWS=_MEMORY_ROWS, LENGTH=triton.next_power_of_2(length),
    )  # fmt: skip


@triton.jit
def _state_space(
    value, steps, rates, skip, bias, write, read, states, slots, starts, out, groups, heads, size, length,
    ROWS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Some rows of a head's memory through the tokens of a text."""
    text, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, k = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    there = (row < size)[:, None] & (k < length)[None, :]
    place = states + (tl.load(slots + text) * heads + head) * size * length + row[:, None] * length + k[None, :]
    memory = tl.load(place, there, 0.0)
    rate, shift = tl.load(rates + head).to(tl.float32), tl.load(bias + head).to(tl.float32)
    passed = tl.load(skip + head).to(tl.float32)
    for token in range(tl.load(starts + text), tl.load(starts + text + 1)):
        line, vector = token * heads + head, (token * groups + head // (heads // groups)) * length + k
        step = _softplus(tl.load(steps + line).to(tl.float32) + shift)
        seen = tl.load(value + line * size + row, row < size, 0.0).to(tl.float32)
        own = tl.load(write + vector, k < length, 0.0)[None, :]
        added = tl.broadcast_to((step * seen)[:, None], memory.shape)
        memory = tl.fma(added, own, tl.exp(step * rate) * memory)
        answer = tl.sum(memory * tl.load(read + vector, k < length, 0.0)[None, :], 1)
        tl.store(out + line * size + row, tl.fma(seen, passed, answer), row < size)
    tl.store(place, memory, there)


def state_space(
    value: Tensor,
    steps: Tensor,
    rates: Tensor,
    skip: Tensor,
    bias: Tensor,
    write: Tensor,
    read: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    out: Tensor,
) -> None:
    """As ``kernels.state_space``."""
    (_, groups, length), (_, heads, size) = read.shape, out.shape
    _state_space[(slots.numel(), heads, triton.cdiv(size, _MEMORY_ROWS))](
        value, steps, rates, skip, bias, write, read, states, slots, starts, out,
        groups, heads, size, length, ROWS=_MEMORY_ROWS, LENGTH=triton.next_power_of_2(length),
    )  # fmt: skip
