"""Direct preference optimization on the real learner: gradients against transformers, a run that learns and resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megatron_retool.config import (
    Config,
    ConfigError,
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    SFTStage,
    load_config,
)
from megatron_retool.data.chat_template import TokenizedConversation
from megatron_retool.data.sft_dataset import as_trajectory_batch
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.sft.launch import fine_tune
from megatron_retool.trajectory import TrajectoryBatch
from tests.kit.tiny_models import hf_model
from tests.learner.step_gradients import gradients_at_next_step
from tests.sft.conftest import QUIET, losses, metrics, with_name, with_sft

PAIRS = [(5, 20), (5, 3), (4, 12), (4, 31)]
STAGE = SFTStage(loss="dpo", beta=0.7, label_smoothing=0.1)
LAYOUTS = {
    "one process": LearnerConfig(),
    "lora": LearnerConfig(lora=LoraConfig(rank=2)),
    "tp2": LearnerConfig(world_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": LearnerConfig(world_size=2, pipeline_model_parallel_size=2),
    "dp2": LearnerConfig(world_size=2),
}


def second_update(hf_dir: Path, name: str, batch: TrajectoryBatch, stage: SFTStage = STAGE) -> dict[str, Any]:
    """Loss, gradients and the weights before them, of the update after one that moved the policy off its reference."""
    from megatron_retool.learner.learner import Learner
    from megatron_retool.sft.preferences import preference_update

    settings = dataclasses.replace(
        LAYOUTS[name], dtype="float32", max_tokens_per_micro_batch=64, use_distributed_optimizer=False
    )
    learner = Learner(
        Config(learner=settings),
        optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0),
        total_optimizer_steps=9,
        hf_dir=hf_dir,
        with_reference=True,
    )
    preference_update(learner, batch, stage)
    weights = {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}
    gradients = gradients_at_next_step(learner)
    found = preference_update(learner, batch, stage)
    learner.close()
    return {"metrics": found, "gradients": gradients, "weights": weights}


def expected(hf_dir: Path, weights: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by the formula, in float64, on transformers' models."""
    from transformers import AutoModelForCausalLM

    batch = random_batch(PAIRS, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64).eval()
    policy = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64).eval()
    policy.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)

    def sums(model: Any) -> torch.Tensor:
        found, prompt, response = [], 0, 0
        for row in range(len(batch)):
            p, r = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
            ids = np.concatenate([batch.prompt_ids[prompt : prompt + p], batch.response_ids[response : response + r]])
            mask = torch.from_numpy(batch.loss_mask[response : response + r])
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, p - 1 : -1]
            taken = logits.log_softmax(-1).gather(-1, torch.from_numpy(ids[p:].astype(np.int64))[:, None])[:, 0]
            found.append((taken * mask).sum())
            prompt, response = prompt + p, response + r
        return torch.stack(found).view(-1, 2)

    with torch.no_grad():
        own = sums(reference)
    ratios = sums(policy) - own
    margin = STAGE.beta * (ratios[:, 0] - ratios[:, 1])
    log_sigmoid, smoothing = torch.nn.functional.logsigmoid, STAGE.label_smoothing
    loss = (-(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)).mean()
    loss.backward()
    return loss.item(), {name: tensor.grad for name, tensor in policy.named_parameters()}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf_model("qwen2", num_hidden_layers=2, tie_word_embeddings=False)
    return save_model(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_in_every_layout(name: str, model_dir: Path, tmp_path: Path) -> None:
    found = run_ranks(second_update, LAYOUTS[name].world_size, tmp_path, model_dir, name, random_batch(PAIRS, seed=3))
    loss, gradients = expected(model_dir, found["weights"])
    assert found["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
    assert abs(found["metrics"]["dpo_margin"]) > 1e-3, "the policy has moved off its reference"
    if name == "lora":
        return
    assert set(found["gradients"]) <= set(gradients)
    for key, gradient in found["gradients"].items():
        difference = (gradient.double() - gradients[key]).norm() / gradients[key].norm()
        assert difference < 1e-5, key


def preferring(config: Config, directory: Path) -> Config:
    """A run that learns to answer in capitals."""
    rows = [{"prompt": f"say {n}", "chosen": f"YES {n}", "rejected": f"no {n}"} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), directory / "pairs.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:8]), directory / "held_out.parquet")
    stage = SFTStage(
        name="preferences",
        loss="dpo",
        train_files=[str(directory / "pairs.parquet")],
        val_files=[str(directory / "held_out.parquet")],
        batch_size=8,
        steps=10,
        max_length=256,
        optimizer=OptimizerConfig(lr=2e-3),
    )
    return with_sft(config, stages=[stage], save_freq=6)


def test_a_run_learns_and_goes_on_from_a_checkpoint(config: Config, tmp_path: Path) -> None:
    config = preferring(config, tmp_path)
    fine_tune(config, QUIET)
    rows = metrics(config)
    assert losses(config)[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses(config)[-1] < 0.3
    assert rows[-1]["sft/dpo_accuracy"] == rows[-1]["sft/val_dpo_accuracy"] == 1.0
    assert rows[-1]["sft/val_loss"] < 0.3
    assert rows[-1]["sft/dpo_margin"] == pytest.approx(
        rows[-1]["sft/dpo_chosen_reward"] - rows[-1]["sft/dpo_rejected_reward"], abs=1e-5
    )
    again = with_name(
        config, config.trainer.experiment_name, resume_mode="resume_path",
        resume_from_path=str(config.trainer.run_dir / "checkpoints" / "global_step_6"),
    )  # fmt: skip
    fine_tune(again, QUIET)
    assert losses(again) == pytest.approx([row["sft/loss"] for row in rows], abs=1e-6)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("[{loss: cross_entropy}, {loss: dpo}]", "sft.stages[1].loss=dpo follows a stage that imitates"),
        ("[{beta: 0.5}]", "sft.stages[0].beta is read with loss=dpo only"),
        ("[{loss: dpo, label_smoothing: 0.5}]", "label_smoothing"),
        ("[{loss: ipo}]", "cross_entropy"),
    ],
)
def test_settings_that_contradict_each_other(stages: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"sft.stages={stages}"])
    assert words in str(error.value)


def test_loss_and_gradients_are_those_of_trl(model_dir: Path, tmp_path: Path) -> None:
    """TRL's DPOTrainer on one batch. It needs the packages of requirements/trl.txt beside this project's."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install trl (requirements/trl.txt)")
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generator = np.random.default_rng(0)
    examples = [
        {f"{part}_ids": generator.integers(5, 60, length).tolist() for part, length in lengths.items()}
        for lengths in ({"prompt": 5, "chosen": 20, "rejected": 3}, {"prompt": 9, "chosen": 4, "rejected": 17})
    ]
    rows = []
    for each in examples:
        for side in ("chosen_ids", "rejected_ids"):
            ids = np.array([*each["prompt_ids"], *each[side]], np.int32)
            mask = np.arange(len(ids)) >= len(each["prompt_ids"])
            rows.append(TokenizedConversation(ids, mask, np.where(mask, 0, -1).astype(np.int16)))
    batch = as_trajectory_batch(rows)
    stage = SFTStage(loss="dpo", beta=0.7)
    found = run_ranks(second_update, 1, tmp_path, model_dir, "one process", batch, stage)

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    policy = model()
    policy.load_state_dict(found["weights"], strict=False)
    settings = trl.DPOConfig(
        str(tmp_path / "trl"), beta=0.7, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False
    )
    trainer = trl.DPOTrainer(
        policy,
        model(),
        settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    loss.backward()
    assert found["metrics"]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    for key, gradient in found["gradients"].items():
        assert (gradient - gradients[key]).norm() / gradients[key].norm() < 1e-5, key
