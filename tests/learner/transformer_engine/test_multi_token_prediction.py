"""Layers for multi-token prediction made of Transformer Engine's layers learn what transformers' do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_retool.config import MtpConfig
from megatron_retool.parity.admission.tiny_model import random_batch
from tests.learner import test_multi_token_prediction as local
from tests.learner.transformer_engine.conftest import Run

LAYOUTS = {
    1: ("mimo, one", "glm4_moe, one", "deepseek_v3, one", "qwen3_next, one"),
    2: ("mimo, pipeline", "glm4_moe, experts", "deepseek_v3, sequence", "qwen3_next, context"),
}


def _gradients(world_size: int, directory: Path) -> dict[str, Any]:
    """Metrics and gradients of an update in each layout, by whether the layers observe the policy or move it."""
    found: dict[str, Any] = {}
    for name in LAYOUTS[world_size]:
        settings, hf_dir = local.LAYOUTS[world_size][name], directory / name.partition(",")[0]
        for observes in (True, False):
            learner = local.build(world_size, settings, hf_dir, MtpConfig(True, local.FACTOR, observes))
            update = local.gradients_of(
                learner, lambda learner=learner: learner.sft_update(random_batch(local.LENGTHS))
            )
            found.setdefault(name, {})[observes] = update
    return found


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_are_those_of_transformers(world_size: int, tmp_path: Path, with_transformer_engine: Run) -> None:
    families = {name.partition(",")[0] for name in LAYOUTS[world_size]}
    models = {family: local.make_model(family, tmp_path / family) for family in families}
    found = with_transformer_engine(_gradients, world_size, world_size, tmp_path)
    for name in LAYOUTS[world_size]:
        for observes, (metrics, gradients) in found[name].items():
            model, layers = models[name.partition(",")[0]]
            wanted, loss, _acceptance = local.reference(model, layers, random_batch(local.LENGTHS), observes)
            assert gradients.keys() == wanted.keys()
            off = {key: float((gradients[key] - grad).abs().max() / grad.abs().max()) for key, grad in wanted.items()}
            assert max(off.values()) < 1e-5, (name, observes, max(off, key=lambda key: off[key]))
            assert metrics["learner/mtp_loss"] == pytest.approx(loss, rel=1e-5)
