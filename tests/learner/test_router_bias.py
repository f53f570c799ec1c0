"""A router's bias for the choice of experts: float32 wherever it goes, and still unless it is told to move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conversion.hf_to_mcore import convert
from conversion.mcore_to_hf import export
from megatron_retool.config import Config, LearnerConfig, OptimizerConfig
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from tests.kit.tiny_models import hf_model

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(hf_model("glm4_moe", num_hidden_layers=2), tmp_path_factory.mktemp("model"))


def biases(model_dir: Path, steps: int = 1, advantage: float | None = None, **settings: Any) -> list[torch.Tensor]:
    """Before and after each of some updates, as they are sent to engines."""
    from megatron_retool.learner.learner import Learner

    config = Config(learner=LearnerConfig(max_tokens_per_micro_batch=64, **settings))
    learner = Learner(config, optimizer=OptimizerConfig(lr=1e-3), total_optimizer_steps=10, hf_dir=model_dir)
    batch = random_batch([(5, 20), (9, 3), (4, 12)])
    count = batch.num_response_tokens
    batch = batch.with_columns(
        old_log_probs=np.full(count, -4.0),
        advantages=np.random.default_rng(1).normal(size=count) if advantage is None else np.full(count, advantage),
        loss_weights=batch.loss_mask / batch.loss_mask.sum(),
    )
    found = []
    for step in range(steps + 1):
        if step:
            learner.update(batch)
        weights = {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}
        if found:
            assert torch.equal(weights["lm_head.weight"], found[-1][1]) == (advantage is not None)
        found.append((weights[BIAS], weights["lm_head.weight"]))
    return [bias for bias, _ in found]


def test_it_stays_as_it_was_pretrained_in_float32(model_dir: Path) -> None:
    stored = load_file(model_dir / "model.safetensors")[BIAS]
    assert not torch.equal(stored, stored.bfloat16().float())
    for dtype in ("float32", "bfloat16"):
        before, after = biases(model_dir, dtype=dtype)
        assert torch.equal(before, stored) and torch.equal(after, stored), dtype


def test_it_moves_towards_even_load(model_dir: Path) -> None:
    before, *_, after = biases(model_dir, steps=3, dtype="float32", moe_router_bias_update_rate=0.01)
    moved = ((after - before) / 0.01).round()
    assert torch.allclose(after - before, 0.01 * moved, atol=1e-6)
    assert moved.abs().max() in (1, 2, 3) and moved.min() < 0 < moved.max()


def test_it_stays_where_an_update_is_left_out(model_dir: Path) -> None:
    settings = {"dtype": "float32", "moe_router_bias_update_rate": 0.01}
    before, after = biases(model_dir, advantage=float("inf"), **settings)
    assert torch.equal(before, after)


def test_no_cast_of_a_conversion_changes_it(model_dir: Path, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"workers": 1, "require_tokenizer": False}
    convert(model_dir, tmp_path / "mcore", dtype=torch.bfloat16, **kwargs)
    export(tmp_path / "mcore", tmp_path / "hf", dtype=torch.float16, **kwargs)
    there, back = (load_file(place / "model.safetensors") for place in (model_dir, tmp_path / "hf"))
    assert torch.equal(back.pop(BIAS), there[BIAS])
    assert {tensor.dtype for tensor in back.values()} == {torch.float16}
