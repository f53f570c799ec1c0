"""Muon, critics and teachers on Transformer Engine's layers, held to what holds for them on Megatron-Core's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_retool.parity.admission.tiny_model import save_model
from tests.kit.adapter_reference import small_model
from tests.kit.tiny_models import hf_model
from tests.learner import test_critic, test_divergence, test_muon
from tests.learner.test_muon import models as muon_models  # noqa: F401  a fixture
from tests.learner.transformer_engine.conftest import Run


@pytest.mark.slow
def test_muons_step_is_that_of_the_formula(muon_models: dict[str, Path], with_transformer_engine: Run) -> None:  # noqa: F811
    found = with_transformer_engine(test_muon.learn, 1, muon_models, 1)
    for family in test_muon.LAYOUTS:
        test_muon.test_a_step_is_that_of_the_formula_on_whole_matrices(found, family, "one process")


def test_a_critic_learns(tmp_path: Path, with_transformer_engine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: Any, world_size: int, _directory: Path, *args: Any) -> Any:
        return with_transformer_engine(function, world_size, *args)

    monkeypatch.setattr(test_critic, "run_ranks", run)
    test_critic.test_critic_learns_and_its_checkpoint_continues(tmp_path)


@pytest.mark.parametrize(("policy", "teacher"), [("qwen2", "granitemoehybrid"), ("granitemoehybrid", "qwen2")])
def test_a_teacher_may_differ_in_whose_attention_it_has(
    policy: str, teacher: str, tmp_path: Path, with_transformer_engine: Run
) -> None:
    """One of them reads a micro-batch's sequences as Transformer Engine does, the other its buckets."""
    models = {"qwen2": hf_model("qwen2", num_hidden_layers=2, tie_word_embeddings=False)}
    models["granitemoehybrid"] = small_model("granitemoehybrid", tie_word_embeddings=False)
    places = {family: save_model(models[family], tmp_path / family) for family in (policy, teacher)}
    sides = places[policy], [places[teacher]], "one process"
    found = with_transformer_engine(test_divergence.one_update, 1, *sides)
    divergence, gradients, _reference = test_divergence.expected(*sides)
    assert found["metrics"]["distillation/divergence"] == pytest.approx(divergence, rel=1e-5)
    off = {key: float((found["gradients"][key] - grad).norm() / grad.norm()) for key, grad in gradients.items()}
    assert max(off.values()) < 1e-5, max(off, key=lambda key: off[key])
