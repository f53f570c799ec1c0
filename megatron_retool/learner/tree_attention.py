"""Attention over a stream in which common prefixes stand once (``algorithms/prefix_tree.py``).

In depth-first order what lies below a node follows it without a gap, so the tree's attention is a few dense pieces:
every node with itself, causally, and all that lies below a node with the whole of it.  A query's pieces are put
together by the logarithms of their softmax sums, as flash attention does with blocks of keys (arXiv:2205.14135, section
3.1); the gradient of a piece needs nothing but the final output and the final logarithm.

On a GPU torch's FlexAttention computes the same in one kernel, from a mask by blocks: a query sees the keys before it
whose subtree it lies in.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from megatron_retool.learner.attention_pieces import Bucket, SharedPrefixes

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: SharedPrefixes, scale: float) -> Tensor:
    """[t, heads, d] queries, [t, groups, d] keys and values -> [t, heads, d], differentiable."""
    if query.is_cuda:
        return in_one_kernel(query, key, value, tree, scale)
    return _TreeAttention.apply(query, key, value, tree, scale)


def in_one_kernel(query: Tensor, key: Tensor, value: Tensor, tree: SharedPrefixes, scale: float) -> Tensor:
    """``tree_attention`` by FlexAttention, as on a GPU."""
    whole = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    grouped = query.size(1) != key.size(1)
    out = _compiled()(*whole, block_mask=tree.block_mask, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    # Uncompiled it would hold the scores of all pairs.
    return torch.compile(flex_attention, dynamic=True)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: SharedPrefixes, scale: float) -> Tensor:
        heads = query.size(1)
        # Pieces are added up in more digits than bfloat16 has.
        out = query.new_empty(query.shape, dtype=_sum_dtype(query))
        log_sums = out.new_empty(query.shape[:2])
        start = 0
        for bucket in tree.nodes:
            part = slice(start, start + bucket.tokens)
            q, k, v = (_grid(x, part, bucket, heads) for x in (query, key, value))
            result, sums = _forward(q, k, v, 0.0, True, scale=scale)
            out[part] = _tokens(result, bucket)
            log_sums[part] = _tokens(sums.unsqueeze(-1), bucket).squeeze(-1)
            start = part.stop
        for begin, end, subtree_end in tree.stems:
            below = slice(end, subtree_end)
            q = _fold(query[below], key.size(1))
            result, sums = _forward(q, _whole(key[begin:end]), _whole(value[begin:end]), 0.0, False, scale=scale)
            other, other_sums = _unfold(result, heads), _unfold(sums.unsqueeze(-1), heads).squeeze(-1)
            total = torch.logaddexp(log_sums[below], other_sums)
            out[below] *= (log_sums[below] - total).exp_().unsqueeze(-1)
            out[below] += other * (other_sums - total).exp_().unsqueeze(-1)
            log_sums[below] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, log_sums = ctx.saved_tensors
        tree: SharedPrefixes = ctx.tree
        heads, groups = query.size(1), key.size(1)
        grad = grad.contiguous()
        grads = [torch.empty_like(x) for x in (query, key, value)]
        start = 0
        for bucket in tree.nodes:
            part = slice(start, start + bucket.tokens)
            q, k, v, o = (_grid(x, part, bucket, heads) for x in (query, key, value, out))
            g = _grid(grad, part, bucket, heads)
            sums = _grid(log_sums.unsqueeze(-1), part, bucket, heads).squeeze(-1).contiguous()
            if bucket.cells is not None:
                # A cell of padding holds some token's query, to which this sum does not belong: no probability there.
                padding = torch.ones(bucket.batch * bucket.length, dtype=torch.bool, device=q.device)
                padding[bucket.cells] = False
                sums.masked_fill_(padding.view(bucket.batch, 1, bucket.length), torch.inf)
                g = g.masked_fill(padding.view(bucket.batch, 1, bucket.length, 1), 0.0)
            result = _backward(g, q, k, v, o, sums, 0.0, True, scale=ctx.scale)
            for whole, piece in zip(grads, result, strict=True):
                piece = _tokens(piece, bucket)
                if whole.size(1) != heads:
                    piece = piece.unflatten(1, (groups, -1)).sum(2)
                whole[part] = piece
            start = part.stop
        for begin, end, subtree_end in tree.stems:
            below = slice(end, subtree_end)
            q, o, g = (_fold(x[below], groups) for x in (query, out, grad))
            sums = _fold(log_sums[below].unsqueeze(-1), groups).squeeze(-1).contiguous()
            k, v = _whole(key[begin:end]), _whole(value[begin:end])
            grad_q, grad_k, grad_v = _backward(g, q, k, v, o, sums, 0.0, False, scale=ctx.scale)
            grads[0][below] += _unfold(grad_q, heads)
            grads[1][begin:end] += grad_k.squeeze(0).transpose(0, 1)
            grads[2][begin:end] += grad_v.squeeze(0).transpose(0, 1)
        return *grads, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _grid(x: Tensor, part: slice, bucket: Bucket, heads: int) -> Tensor:
    """A bucket's tokens [t, h, d] as [B, heads, L, d], each group's keys repeated for its heads."""
    x = x[part]
    if bucket.pad is not None:
        x = x.index_select(0, bucket.pad)
    if x.size(1) != heads:
        x = x.repeat_interleave(heads // x.size(1), 1)
    return x.view(bucket.batch, bucket.length, *x.shape[1:]).transpose(1, 2)


def _tokens(x: Tensor, bucket: Bucket) -> Tensor:
    """[B, heads, L, d] -> the bucket's tokens [t, heads, d]."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if bucket.cells is None else x.index_select(0, bucket.cells)


def _fold(x: Tensor, groups: int) -> Tensor:
    """[t, heads, d] -> [1, groups, heads / groups x t, d]: the heads of a group are more queries to the same keys."""
    tokens, heads, size = x.shape
    return x.view(tokens, groups, heads // groups, size).permute(1, 2, 0, 3).reshape(1, groups, -1, size)


def _unfold(x: Tensor, heads: int) -> Tensor:
    """The opposite of ``_fold``."""
    _, groups, rows, size = x.shape
    tokens = rows * groups // heads
    return x.view(groups, heads // groups, tokens, size).permute(2, 0, 1, 3).reshape(tokens, heads, size)


def _whole(x: Tensor) -> Tensor:
    """[t, groups, d] -> [1, groups, t, d]."""
    return x.transpose(0, 1).unsqueeze(0)
