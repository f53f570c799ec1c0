"""Norms of the layers: where they stand in Megatron's layer spec, and those that it has not."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as extension
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conversion.model.architecture import Architecture
from megatron_retool.errors import InputError
from megatron_retool.learner.attention import RMSNorm, SwiGLUMLP


class FullWidthRMSNorm(torch.nn.Module):
    """RMSNorm over all heads together (OLMo 2, arXiv:2501.00656, section 3.2); a TP rank has its part of them.

    Every rank has the whole weight and uses its heads' part.  The gradients are added up over the ranks by Megatron's
    ``finalize_model_grads``, which does that with parameters of these names (q_layernorm, k_layernorm) whether or not
    there is sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__()
        ranks, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        self.eps = eps
        self.size = heads * hidden_size
        # Fewer heads than ranks: a head is on several of them, which each add its squares.
        self.copies = max(1, ranks // heads)
        width = self.size * self.copies // ranks
        self.own = slice(rank // self.copies * width, (rank // self.copies + 1) * width)
        self.weight = torch.nn.Parameter(torch.ones(self.size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's heads, head_dim] -> the same."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        # All-reduce forward and backward: every rank's output is a function of every rank's squares.
        squares = reduce_from_tensor_model_parallel_region(copy_to_tensor_model_parallel_region(squares))
        scale = (squares / (self.size * self.copies) + self.eps).rsqrt()
        return (wide * scale * self.weight[self.own].float()).to(x.dtype).view(x.shape)


class QueryNorm(FullWidthRMSNorm):
    """Over all query heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps, config.num_attention_heads)


class KeyNorm(FullWidthRMSNorm):
    """Over all key heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        assert config.num_query_groups is not None
        super().__init__(config, hidden_size, eps, config.num_query_groups)


@functools.cache
def with_post_norm(linear: type[Any], norm: type[Any]) -> type[Any]:
    """A row-parallel linear layer and a norm of its output, which is then added to the residual stream."""

    class WithPostNorm(linear):
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            output, bias = super().forward(x, *args, **kwargs)
            assert bias is None, "a bias would have to be added before the norm"
            return self.post_norm(output), None

    return WithPostNorm


class PostNormSwiGLUMLP(SwiGLUMLP):
    """With a norm of its output."""

    output_layer = with_post_norm(RowParallelLinear, RMSNorm)


def place_norms(layer: Any, architecture: Architecture, engine: bool) -> None:
    """Change a layer's submodules, which have a norm before attention and before the MLP, into the architecture's.

    Args:
        layer: TransformerLayerSubmodules.
        engine: of Transformer Engine's spec; False: of the local one.

    Raises:
        ValueError: the part is missing for this layer.
    """
    attention = layer.self_attention.submodules
    if architecture.linear_layers and (architecture.qk_norm_full_width or architecture.post_norm):
        raise InputError("norms over all heads, and norms after attention, are missing beside layers without attention")
    if architecture.qk_norm_full_width:
        if architecture.zero_centered_norm:
            raise InputError("a zero-centered norm over all heads together is missing")
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    if architecture.is_moe and (architecture.post_norm or not architecture.pre_norm):
        raise InputError("norms after a mixture of experts are missing")
    if not architecture.pre_norm:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        if engine:  # whose linear layers have the norm before them inside
            attention.linear_qkv = layer.mlp.keywords["submodules"].linear_fc1 = extension.TEColumnParallelLinear
    if architecture.post_norm:
        if engine:
            row = with_post_norm(extension.TERowParallelLinear, extension.TENorm)
            attention.linear_proj = layer.mlp.keywords["submodules"].linear_fc2 = row
        else:
            attention.linear_proj = PostNormSwiGLUMLP.output_layer
            layer.mlp = PostNormSwiGLUMLP
