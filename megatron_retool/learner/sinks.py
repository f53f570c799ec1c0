"""Attention sinks (Xiao et al., arXiv:2309.17453, section 3; gpt-oss): one more score in each head's softmax.

The sink s is a parameter of a head.  With l the logarithm of the sum of a query's exponentiated scores, softmax over
scores and sink gives exp(l) / (exp(l) + exp(s)) of what softmax over only the scores gives; the rest goes nowhere.  So
any attention that tells l can have sinks.  The gradient of flash attention needs the final output and the final
logarithm alone (arXiv:2205.14135, section 3.1): here those with the sink.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_host_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_host_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# The GPU kernel that takes a mask; it runs on compute capability 5.0 and above.
_gpu_forward = torch.ops.aten._scaled_dot_product_efficient_attention
_gpu_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """[B, L, heads, d] queries, [B, K, groups, d] keys and values, sinks [heads] -> [B, L, heads, d], differentiable.

    Each query has to see a key.

    Args:
        mask: what is added to the scores, of ``attention_pieces.hidden_keys``, [L, K] or [B, 1, L, K]; None: each query
            sees all keys up to itself, and L = K.
    """
    repeated = query.size(2) // key.size(2)
    if repeated > 1:
        key, value = (x.repeat_interleave(repeated, 2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if mask is not None and query.is_cuda:
        mask = mask.expand(*query.shape[:-1], key.size(2))
    out: Tensor = _SinkAttention.apply(query, key, value, sinks, mask, scale)
    return out.transpose(1, 2)


class _SinkAttention(torch.autograd.Function):
    """[B, heads, L, d]; ``mask`` is added to the scores."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        causal = mask is None
        if query.is_cuda:
            # The logarithms' rows are padded, with infinities; a seed and an offset are of the dropout, which is none.
            out, logarithm, *dropped = _gpu_forward(query, key, value, mask, True, 0.0, causal, scale=scale)
        else:
            out, logarithm, *dropped = _host_forward(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        total = torch.logaddexp(logarithm, sinks.to(logarithm.dtype)[:, None])
        share = (logarithm - total)[..., : query.size(2)].exp_()
        out = (out * share.unsqueeze(-1)).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, mask, out, total, *dropped)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, sinks, mask, out, total, *dropped = ctx.saved_tensors
        grad, causal, scale = grad.contiguous(), mask is None, ctx.scale
        of_attention = (grad, query, key, value)
        if query.is_cuda:
            wanted = [True, True, True, False]
            grads = _gpu_backward(*of_attention, mask, out, total, *dropped, 0.0, wanted, causal, scale=scale)[:3]
        else:
            grads = _host_backward(*of_attention, out, total, 0.0, causal, attn_mask=mask, scale=scale)
        total = total[..., : query.size(2)]
        # The sink's own value is zero: what it takes, it takes from the output.
        share = (sinks.to(total.dtype)[:, None] - total).exp_()
        grad_sinks = -(share * (grad * out).sum(-1)).sum((0, 2))
        return *grads, grad_sinks.to(sinks.dtype), None, None
