"""The experts that transformers' mixture of experts chooses, read from its routers as they run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from conversion.model.architecture import Architecture
from megatron_retool.errors import InputError
from megatron_retool.routed_experts import ExpertArray, expert_dtype


def routers(model: Any) -> list[Any]:
    """The modules of a transformers model that choose experts, in the order of layers; none where it names none."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", recorded)
    return [module for module in model.modules() if isinstance(kind, type) and isinstance(module, kind)]


def forced_gates(architecture: Architecture, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The gates [t, k] of ``experts`` [t, k] that a router was made to take, from its logits [t, E]; at least float32.
    Its bias for the choice has no part in them."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(dtype).sigmoid() if architecture.router_scores == "sigmoid" else logits.softmax(-1, dtype=dtype)
    gates = scores.gather(-1, experts)
    if architecture.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates * architecture.routed_scaling_factor


class RoutingRecorder:
    """Listens to every router of a model.

    Args:
        model: of transformers.
        experts: how many each layer has.

    Raises:
        ValueError: transformers names no router in this model.
    """

    def __init__(self, model: Any, experts: int) -> None:
        result = routers(model)
        if not result:
            raise InputError(f"transformers' {type(model).__name__} has no router whose experts could be recorded")
        self._dtype = expert_dtype(experts)
        self._chosen: list[torch.Tensor] = []
        for router in result:
            router.register_forward_hook(self._listen)

    def forget(self) -> None:
        """A forward pass begins."""
        self._chosen = []

    def rows(self, sequences: int) -> ExpertArray:
        """[sequences, tokens, layers, k] of the last forward pass, padding included."""
        chosen = torch.stack(self._chosen, dim=1)
        result: Any = chosen.reshape(sequences, -1, *chosen.shape[1:]).cpu().numpy()
        rows: ExpertArray = result.astype(self._dtype)
        return rows

    def _listen(self, router: Any, inputs: Any, outputs: Any) -> None:
        # A router returns logits, gates and the experts' numbers, in this order or another.
        self._chosen.append(next(each for each in outputs if not each.is_floating_point()))


def extended(known: ExpertArray | None, found: ExpertArray, first: int) -> ExpertArray:
    """``known`` rows of a sequence's first tokens, and behind them those of ``found``, which begin at ``first``."""
    if known is None:
        return found
    return np.concatenate([known, found[len(known) - first :]])
