"""On-policy distillation on the real stack: a teacher's engine scores what the policy's engine samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_retool.config import load_config
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from run_files.steps import step_path
from sglang_rollout.engine.key import engine_key
from sglang_rollout.engine.process import SGLangServer
from tests.campaign.demo import write_config
from tests.end_to_end.conftest import CommandLine

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.rare
def test_the_policy_comes_closer_to_its_teacher(tmp_path):
    """Both from random weights; no response is right, and the reward does not count."""
    config = write_config(tmp_path, "student", 6, val_before_train=False, test_freq=0, save_freq=0)
    command_line = CommandLine(config)
    small = ("demo.pretrain_rows=1", "demo.sft_rows=1", "demo.sft_val_rows=1", "data.max_val_samples=2")
    code, output = command_line.run("make-demo", *small)
    assert code == 0, output
    student, teacher = tmp_path / "student" / "data" / "model", tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(teacher)
    AutoTokenizer.from_pretrained(student).save_pretrained(teacher)
    engine = load_config(config).rollout.engine
    server = SGLangServer(engine, model_path=teacher, log_file=tmp_path / "teacher.log", tokenizer=True)
    server.start()
    try:
        teachers = f"[{{url: '{server.base_url}', api_key: {engine_key()}}}]"
        code, output = command_line.run(
            "train",
            *small,
            "algorithm.advantage=reverse_kl",
            "algorithm.dynamic_sampling.enable=false",
            "algorithm.policy_loss=policy_gradient",
            f"algorithm.distillation.teachers={teachers}",
            "learner.optimizer.lr=1e-3",
            "learner.optimizer.warmup_steps=0",
        )
    finally:
        server.stop()
    assert code == 0, output
    rows = read_metrics(tmp_path / "student" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    divergence = [row["distillation/reverse_kl"] for row in rows]
    assert divergence[0] > 0.05
    assert divergence[-1] < 0.8 * divergence[0]

    differences = []
    for trajectory in read_trajectories(step_path(tmp_path / "student" / "rollouts", 1)):
        ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64))
        with torch.no_grad():
            scores = model(ids[None]).logits[0, len(trajectory.prompt_ids) - 1 : -1].log_softmax(-1)
        own = scores.gather(-1, ids[len(trajectory.prompt_ids) :, None])[:, 0].numpy()
        differences += list((trajectory.rollout_log_probs - own)[trajectory.loss_mask])
    assert divergence[0] == pytest.approx(float(np.mean(differences)), abs=1e-4)
    assert engine_key() not in (tmp_path / "student" / "config.yaml").read_text()

    code, output = command_line.run(
        "train",
        *small,
        "trainer.total_steps=8",
        "algorithm.advantage=zero",
        "algorithm.dynamic_sampling.enable=false",
        f"algorithm.distillation.teachers=[{{path: {teacher}}}]",
        "algorithm.distillation.divergence=forward_kl",
        "learner.optimizer.lr=1e-3",
        "learner.optimizer.warmup_steps=0",
    )
    assert code == 0, output
    rows = read_metrics(tmp_path / "student" / "metrics.jsonl")[-2:]
    assert [row["step"] for row in rows] == [7, 8]
    assert 0 < rows[1]["distillation/divergence"] < divergence[0], (
        "the teacher in the learner is the one that was served"
    )
