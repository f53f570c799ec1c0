"""Norms that Megatron's layers have not, each by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conversion.model.architecture import Architecture
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.planning.models import MODELS

HEAD_DIM, EPS = 8, 1e-5
SETTINGS = {"params_dtype": torch.float32, "num_attention_heads": 4, "num_query_groups": 1}


def _inputs(heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shape = (6, 1, heads, HEAD_DIM)
    x, upstream = (torch.randn(shape, generator=generator) for _ in range(2))
    return x, upstream, torch.rand(heads * HEAD_DIM, generator=generator) + 0.5


def _full_width(heads: int) -> dict[str, float]:
    """Largest distances of this rank's part from torch's norm of the whole; the weight's gradients are added up."""
    from megatron.core import parallel_state

    from megatron_retool.learner.norms import KeyNorm, QueryNorm

    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    copies = max(1, ranks // heads)
    per_rank = max(1, heads // ranks)
    own = slice(rank // copies * per_rank, rank // copies * per_rank + per_rank)
    whole, upstream, weight = _inputs(heads)
    norm = (QueryNorm if heads > 1 else KeyNorm)(SimpleNamespace(**SETTINGS), HEAD_DIM, EPS)
    norm.weight.data.copy_(weight)
    x = whole[..., own, :].clone().requires_grad_()
    found = norm(x)
    # Each copy of a head has a part of the gradient.
    (found * upstream[..., own, :]).sum().div(copies).backward()
    gradient = norm.weight.grad
    torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    x_gradient = x.grad * copies

    whole.requires_grad_()
    weight.requires_grad_()
    expected = torch.nn.functional.rms_norm(whole.flatten(-2), (heads * HEAD_DIM,), weight, EPS).view_as(whole)
    (expected * upstream).sum().backward()
    return {
        "output": float((found - expected[..., own, :]).abs().max()),
        "input's gradient": float((x_gradient - whole.grad[..., own, :]).abs().max()),
        "weight's gradient": float((gradient - weight.grad).abs().max()),
    }


def _in_rank() -> list[dict[str, float]]:
    from megatron_retool.config import LearnerConfig
    from megatron_retool.learner import parallel

    learner = LearnerConfig(world_size=2, tensor_model_parallel_size=2)
    parallel.initialize(learner.layout(Architecture.from_hf_config(MODELS["olmo-2-7b"])), torch.device("cpu"), seed=1)
    return [_full_width(heads) for heads in (4, 1)]


def test_a_norm_over_all_heads_is_the_same_however_they_are_split(tmp_path: Path) -> None:
    """Four heads on two ranks, and one head that both have."""
    for found in run_ranks(_in_rank, 2, tmp_path):
        assert max(found.values()) < 1e-6, found


def test_a_norm_after_experts_is_refused_by_name() -> None:
    from megatron_retool.learner.norms import place_norms

    layer: Any = SimpleNamespace(self_attention=SimpleNamespace(submodules=SimpleNamespace()))
    architecture = replace(Architecture.from_hf_config(MODELS["qwen3-30b-a3b"]), post_norm=True)
    with pytest.raises(ValueError, match="norms after a mixture of experts are missing"):
        place_norms(layer, architecture, engine=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_a_zero_centered_norm_multiplies_by_one_more_than_its_weight(dtype: torch.dtype, tolerance: float) -> None:
    from megatron_retool.learner.attention import RMSNorm

    settings: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=True)
    norm, generator = RMSNorm(settings, 32, EPS), torch.Generator().manual_seed(0)
    assert not norm.weight.any()
    with torch.no_grad():
        # Digits that 1 + weight has not in bfloat16.
        norm.weight.uniform_(-0.003, 0.003, generator=generator)
    x, upstream = (torch.randn(5, 32, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    norm(x).backward(upstream)
    exact, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(exact, (32,), 1.0 + weight, EPS)
    expected.backward(upstream.double())
    for found, right in ((norm(x), expected), (x.grad, exact.grad), (norm.weight.grad, weight.grad)):
        torch.testing.assert_close(found, right.to(dtype), rtol=tolerance, atol=tolerance)
    if dtype == torch.bfloat16:
        assert torch.equal(norm(x), expected.to(dtype))
