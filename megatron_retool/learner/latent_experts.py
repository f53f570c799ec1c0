"""Experts that work on a latent vector (LatentMoE, arXiv:2512.20848): Nemotron 3 Super and Ultra.

A projection of the hidden state is what experts get, and a projection of their sum is what they add. Router and shared
expert see the hidden state itself. Megatron-Core's own projections are Transformer Engine's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_retool.learner.latent_attention import ReplicatedLinear


class LatentMoELayer(MoELayer):
    """A mixture of experts between two projections, which every tensor-parallel rank has whole.

    Args:
        latent_size: features that an expert reads and adds.
    """

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules, *args: Any, latent_size: int, **kwargs: Any
    ) -> None:
        experts = functools.partial(_on_latents, submodules.experts, latent_size)
        super().__init__(config, replace(submodules, experts=experts), *args, **kwargs)
        self.fc1_latent_proj = ReplicatedLinear(config, config.hidden_size, latent_size)
        self.fc2_latent_proj = ReplicatedLinear(config, latent_size, config.hidden_size)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Latents of the tokens, and the probabilities of their experts, as they are dispatched."""
        result: tuple[Tensor, Tensor] = super().preprocess(self.fc1_latent_proj(hidden_states), probs, routing_map)
        return result

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """What the layer adds to the residual stream, [t, 1, h]."""
        added: Tensor = self.fc2_latent_proj(self.token_dispatcher.combine_postprocess(output))
        return added if shared_expert_output is None else added + shared_expert_output


def _on_latents(build: Callable[..., Any], latent_size: int, count: int, config: Any, **kwargs: Any) -> Any:
    own = copy.copy(config)
    own.moe_latent_size = latent_size
    return build(count, own, **kwargs)


def place_latent_experts(layer: Any, latent_size: int) -> None:
    """Give a layer ``LatentMoELayer``.

    Args:
        layer: TransformerLayerSubmodules of the local spec, of a mixture of experts.
    """
    layer.mlp = functools.partial(LatentMoELayer, latent_size=latent_size, **layer.mlp.keywords)
