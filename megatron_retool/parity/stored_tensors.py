"""Tensors of a transformers model under the names that its checkpoint has on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def stored(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` (or gradients) by the model's names -> by those of its checkpoint: transformers keeps experts fused
    and renames what its models share."""
    from transformers.core_model_loading import revert_weight_conversion

    result: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return {name: tensor.clone() for name, tensor in result.items()}


def stored_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients under the names that a checkpoint on disk has; a parameter without one has zeros."""
    return stored(model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})


def stored_weights(model: Any) -> dict[str, Tensor]:
    """Weights under the names that a checkpoint on disk has."""
    kept = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return stored(model, {name: tensor.detach() for name, tensor in (*model.named_parameters(), *kept.items())})
