"""Exact operators with the gradients of the ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_retool.exact import operators


class _WithGradientOf(torch.autograd.Function):
    """The first tensor's numbers with the second's gradient."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, ordinary: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def with_gradient_of(exact: Tensor, ordinary: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``exact``, which ``ordinary(*inputs)`` would be but for its rounding, with the latter's gradient."""
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in inputs):
        return exact
    return _WithGradientOf.apply(exact, ordinary(*inputs))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return operators.linear(x, weight, bias, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.size(-1)).to(x.dtype)
        grad_x = torch.mm(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = torch.mm(rows.t(), x.reshape(-1, x.size(-1))) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.has_bias else None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return operators.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normed = wide * inverse
        of_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_normed = grad * weight.float()
        of_normed -= normed * (of_normed * normed).mean(-1, keepdim=True)
        return of_normed.mul_(inverse).to(x.dtype), of_weight, None


class _SiluAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return operators.silu_and_multiply(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return operators.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return operators.rotate(grad, cos, -sin), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``operators.linear``."""
    return _Linear.apply(x, weight, bias, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``operators.rms_norm``."""
    return _RMSNorm.apply(x, weight, eps)


def silu_and_multiply(x: Tensor) -> Tensor:
    """``operators.silu_and_multiply``."""
    return _SiluAndMultiply.apply(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``operators.rotate``."""
    return _Rotate.apply(x, cos, sin)
