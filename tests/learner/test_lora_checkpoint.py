"""Checkpoints of adapters alone: they go on in any layout, belong to one model, and become a merged model and PEFT's
files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.files.dist_checkpoint import DistCheckpointError
from conversion.files.weights_alone import link_weights
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from megatron_retool.config import Config, LearnerConfig, LoraConfig, ModelConfig, OptimizerConfig
from megatron_retool.parity.admission.layouts import EP, ETP, PP, SP, TP
from megatron_retool.parity.admission.tiny_model import hf_log_probs, random_batch, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.planning.memory import checkpoint_bytes
from tests.kit.adapter_reference import gather_factors, small_model

LENGTHS = [(3, 9), (5, 4), (2, 12), (4, 6)]
SAVED_BY: dict[str, dict[str, Any]] = {
    "qwen3": {TP: 2, SP: True},
    "qwen3_moe": {EP: 2},
    "deepseek_v3": {TP: 2, SP: True, ETP: 1},
    "qwen3_next": {TP: 2, SP: True, ETP: 1},
}
LOADED_BY: dict[str, list[dict[str, Any]]] = {
    "qwen3": [{TP: 2, SP: True}, {PP: 2}],
    "qwen3_moe": [{EP: 2}, {TP: 2, SP: True, ETP: 1}],
    "deepseek_v3": [{TP: 2, SP: True, ETP: 1}, {PP: 2}],
    "qwen3_next": [{TP: 2, SP: True, ETP: 1}, {EP: 2}],
}
LORA = {"rank": 4, "alpha": 8.0}


def _learner(world: int, layout: dict[str, Any], hf_dir: Path, lora: dict[str, Any] = LORA, **options: Any) -> Any:
    from megatron_retool.learner.learner import Learner

    settings = {"dtype": "float32", **layout}
    config = Config(
        model=ModelConfig(path=str(hf_dir)),
        learner=LearnerConfig(world_size=world, max_tokens_per_micro_batch=32, lora=LoraConfig(**lora), **settings),
    )
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-4)
    return Learner(config, optimizer=optimizer, total_optimizer_steps=20, hf_dir=hf_dir, **options)


def _steps(learner: Any, *numbers: int) -> dict[str, Any]:
    history = [learner.sft_update(random_batch(LENGTHS, seed=number)) for number in numbers]
    return {"history": history, "factors": gather_factors(learner.model_chunks)}


def _exported(learner: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}


def _save(directory: Path) -> dict[str, Any]:
    found = {}
    for family, layout in SAVED_BY.items():
        learner = _learner(2, layout, directory / family)
        saved = _steps(learner, 1, 2)
        learner.save(directory / f"{family}-checkpoint")
        learner.save(directory / f"{family}-weights", weights_only=True)
        log_probs = learner.log_probs(random_batch(LENGTHS))["log_probs"]
        found[family] = {"saved": saved, "weights": _exported(learner), "log_probs": log_probs}
        found[family]["next"] = _steps(learner, 3, 4)
    return found


def _load(directory: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for family, layouts in LOADED_BY.items():
        for layout in layouts:
            learner = _learner(2, layout, directory / family)
            _steps(learner, 7)  # a learner that has moved elsewhere forgets it
            learner.load(directory / f"{family}-checkpoint")
            again = {"saved": gather_factors(learner.model_chunks), "next": _steps(learner, 3, 4)}
            found.setdefault(family, []).append(again)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for family in SAVED_BY:
        save_model(small_model(family), directory / family)
    return directory


@pytest.fixture(scope="module")
def saved(models: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(_save, 2, models / "save", models)
    return found


@pytest.mark.slow
def test_adapters_go_on_in_the_same_layout_and_in_others(saved: dict[str, Any], models: Path) -> None:
    for family, found in run_ranks(_load, 2, models / "load", models).items():
        expected = saved[family]
        for number, again in enumerate(found):
            assert again["saved"].keys() == expected["saved"]["factors"].keys()
            for name, factor in expected["saved"]["factors"].items():
                assert torch.equal(again["saved"][name], factor), name
            for name, factor in expected["next"]["factors"].items():
                if number == 0:
                    assert torch.equal(again["next"]["factors"][name], factor), name
                assert torch.allclose(again["next"]["factors"][name], factor, rtol=0, atol=1e-5), name
            for mine, theirs in zip(again["next"]["history"], expected["next"]["history"], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_checkpoint_holds_adapters_alone(saved: dict[str, Any], models: Path) -> None:
    from conversion.files.dist_checkpoint import DistCheckpoint

    for family, found in saved.items():
        count = sum(factor.numel() for factor in found["saved"]["factors"].values())
        tensors = DistCheckpoint(models / f"{family}-weights").tensors
        assert all(".lora." in key for key in tensors)
        assert sum(entry.size.numel() for entry in tensors.values()) == count
        architecture = Architecture.from_pretrained(models / family)
        adapters = (4, ("attention", "mlp", "experts"))
        assert checkpoint_bytes(architecture, "float32", with_optimizer=False, adapters=adapters) == 4 * count
        record = json.loads((models / f"{family}-checkpoint" / "hf" / "adapters.json").read_text())
        assert record["rank"] == 4 and record["alpha"] == 8.0 and record["base"] == str(models / family)


@pytest.mark.parametrize("family", SAVED_BY)
def test_an_export_is_the_merged_model(saved: dict[str, Any], models: Path, family: str) -> None:
    link_weights(models / f"{family}-checkpoint", models / f"{family}-linked")
    for kind in ("checkpoint", "weights", "linked"):
        target = models / f"{family}-{kind}-export"
        export(models / f"{family}-{kind}", target, workers=1, require_tokenizer=False)
        merged = load_file(next(target.glob("model*.safetensors")))
        assert merged.keys() == saved[family]["weights"].keys()
        for name, weight in saved[family]["weights"].items():
            assert torch.allclose(merged[name], weight, rtol=0, atol=1e-6), name
        assert not (target / "adapters.json").exists()
    factors = load_file(target / "adapter" / "adapter_model.safetensors")
    expected = saved[family]["saved"]["factors"]
    assert factors.keys() == {f"base_model.model.{name}" for name in expected}
    assert all(torch.equal(factors[f"base_model.model.{name}"], factor) for name, factor in expected.items())


def test_peft_loads_the_files(saved: dict[str, Any], models: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    export(models / "qwen3-checkpoint", models / "for-peft", workers=1, require_tokenizer=False)
    base = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, models / "for-peft" / "adapter").eval()
    batch = random_batch(LENGTHS)
    with torch.no_grad():
        log_probs = np.where(batch.loss_mask, hf_log_probs(adapted, batch)[0].numpy(), 0)
    assert np.abs(log_probs - saved["qwen3"]["log_probs"]).max() < 1e-5


def test_adapters_of_another_model_are_not_exported(saved: dict[str, Any], models: Path) -> None:
    source, target = models / "qwen3-checkpoint", models / "refused"
    with pytest.raises(DistCheckpointError, match="elsewhere has no weights: pass --base-dir"):
        export(source, target, base_dir=models / "elsewhere", require_tokenizer=False)
    other = models / "other"
    shutil.copytree(models / "qwen3", other, dirs_exist_ok=True)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors")
    with pytest.raises(DistCheckpointError, match="other are others: pass --base-dir"):
        export(source, target, base_dir=other, require_tokenizer=False)
    with pytest.raises(ValueError, match="--verify does not know adapters"):
        export(source, target, verify=True, require_tokenizer=False)
    assert not target.exists()
    moved = models / "moved"
    shutil.copytree(models / "qwen3", moved)
    export(source, target, base_dir=moved, workers=1, require_tokenizer=False)
    with pytest.raises(ValueError, match="holds a whole model: leave it out"):
        export(_whole(models), models / "whole-export", base_dir=moved, require_tokenizer=False)


def _whole(models: Path) -> Path:
    from conversion.hf_to_mcore import convert

    convert(models / "qwen3", models / "whole", require_tokenizer=False, workers=1)
    return models / "whole"


def _refusals(directory: Path) -> dict[str, str]:
    from megatron_retool.learner.checkpoint.load import CheckpointError

    said = {}
    checkpoint = directory / "qwen3-checkpoint"
    other = directory / "another"
    shutil.copytree(directory / "qwen3", other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors")
    plain = _learner(1, {}, directory / "qwen3", {"rank": 0})
    plain.save(directory / "plain")
    cases: dict[str, Any] = {
        "rank": lambda: _learner(1, {}, directory / "qwen3", {**LORA, "rank": 8}).load(checkpoint),
        "alpha": lambda: _learner(1, {}, directory / "qwen3", {**LORA, "alpha": 4.0}).load(checkpoint),
        "targets": lambda: _learner(1, {}, directory / "qwen3", {**LORA, "targets": ["mlp"]}).load(checkpoint),
        "base": lambda: _learner(1, {}, other).load(checkpoint),
        "none": lambda: plain.load(checkpoint),
        "whole": lambda: _learner(1, {}, directory / "qwen3").load(directory / "plain"),
        "weights": lambda: _learner(1, {}, directory / "qwen3", mcore_dir=directory / "qwen3-weights"),
    }
    for case, call in cases.items():
        try:
            call()
        except CheckpointError as error:
            said[case] = str(error)
    return said


def test_a_checkpoint_that_does_not_belong_is_named(saved: dict[str, Any], models: Path) -> None:
    said = run_ranks(_refusals, 1, models / "refusals", models)
    assert "was saved with learner.lora.rank=4, and this run has 8: load it with the same" in said["rank"]
    assert "learner.lora.alpha=8.0, and this run has 4.0" in said["alpha"]
    assert "learner.lora.targets=[attention, mlp, experts], and this run has [mlp]" in said["targets"]
    both = f"{models / 'qwen3'}, and the weights in {models / 'another'} are others"
    assert f"adapters of the model in {both}" in said["base"]
    assert "holds adapters of rank 4, and learner.lora.rank=0: load it with learner.lora.rank=4" in said["none"]
    assert "holds all weights, and learner.lora.rank=4: load it with learner.lora.rank=0" in said["whole"]
    assert "holds adapters without their model: export both" in said["weights"]


def _critic(directory: Path) -> dict[str, Any]:
    learner = _learner(2, {}, directory / "qwen3", role="critic")
    batch = random_batch(LENGTHS)
    weights = batch.loss_mask / batch.loss_mask.sum()
    returns = np.random.default_rng(0).normal(0, 1, batch.num_response_tokens)

    def update() -> float:
        columns = {"values": learner.values(batch), "returns": returns, "loss_weights": weights}
        return float(learner.update_critic(batch.with_columns(**columns))["critic/vf_loss"])

    losses = [update() for _ in range(6)]
    learner.save(directory / "critic")
    values = learner.values(batch)
    other = _learner(2, {}, directory / "qwen3", role="critic")
    other.load(directory / "critic")
    return {"losses": losses, "values": values, "loaded": other.values(batch)}


def test_a_critic_learns_with_adapters_and_its_value_head_is_kept(models: Path) -> None:
    found = run_ranks(_critic, 2, models / "critics", models)
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert np.abs(found["values"]).max() > 1e-2
    np.testing.assert_array_equal(found["loaded"], found["values"])
