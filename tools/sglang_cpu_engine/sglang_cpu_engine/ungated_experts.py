"""Experts without a gate, which square their ReLU, and the product of such a router: what Nemotron 3 has.

SGLang's experts on a CPU are gated, and torch's product of bfloat16 matrices in float32 is only for GPUs. A row's bits
do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_library: torch.library.Library | None = None


def register_product() -> None:
    """Give torch.mm(…, out_dtype=…) a function for CPUs, once in a process."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("aten::mm.dtype", lambda left, right, dtype: torch.mm(left.to(dtype), right.to(dtype)), "CPU")


def experts(original: Callable[..., Tensor], layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    """Around SGLang's experts on a CPU: the sum of each token's chosen experts by their weights, [tokens, hidden size].

    Args:
        layer: with w13_weight [experts, features, hidden size] and w2_weight [experts, hidden size, features].
        x: [tokens, hidden size].
        topk_output: weights and numbers of the chosen experts, [tokens, k] each; numbers below 0 are of filling rows.
        config: SGLang's MoeRunnerConfig.
    """
    if config.activation != "relu2":
        return original(layer, x, topk_output, config)
    weights, chosen, _ = topk_output
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        if expert >= 0:
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            product = linear(x[tokens], layer.w13_weight[expert]).relu().square()
            own = linear(product, layer.w2_weight[expert]).float() * weights[tokens, places].float().unsqueeze(-1)
            total.index_add_(0, tokens, own)
    if not layer.should_fuse_routed_scaling_factor_in_topk:  # else the weights have it already
        total *= config.routed_scaling_factor or 1.0
    return total.to(x.dtype)
