"""Fine-tuning on a teacher's most probable tokens: the loss by its definition, and updates in every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_retool.algorithms.top_tokens import top_tokens_divergence
from megatron_retool.config import Config, ModelConfig, OptimizerConfig
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.target_sequences import TopTokens
from megatron_retool.trajectory import TrajectoryBatch
from tests.kit.tiny_models import VOCAB_SIZE, hf_model
from tests.learner.step_gradients import gradients_at_next_step
from tests.learner.test_divergence import LAYOUTS, PAIRS, plain

MOST = 5
RUN = {name: layout for name, layout in LAYOUTS.items() if name != "recompute, prefixes"}
"""Fine-tuning shares no prefixes."""


@settings(deadline=None, max_examples=60)
@given(vocabulary=st.integers(4, 30), top_k=st.integers(1, 6), seed=st.integers(0, 99))
def test_the_divergence_is_that_of_k_tokens_and_all_others(vocabulary: int, top_k: int, seed: int) -> None:
    top_k = min(top_k, vocabulary - 1)
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = (torch.randn(7, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
    best = log_q.topk(top_k, -1)
    known = torch.cat([best.values, torch.full((7, 2), -torch.inf, dtype=torch.float64)], -1)
    scored = torch.cat([log_p.gather(-1, best.indices), log_p[:, :2]], -1)  # what is not counted may be anything
    found, expected = top_tokens_divergence(scored, known), plain(log_p, log_q, "forward_kl", top_k)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (mine,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


def test_a_teacher_whose_tokens_are_all_there_is_leaves_nothing_for_others() -> None:
    log_probs = torch.tensor([[0.7, 0.3]]).log().requires_grad_()
    found = top_tokens_divergence(log_probs, torch.tensor([[0.7, 0.3]]).log())
    assert abs(float(found.detach())) < 1e-6
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    assert torch.isfinite(gradient).all()


def scored() -> tuple[TrajectoryBatch, TopTokens]:
    """Two to five tokens of the teacher in the place of each response token."""
    batch = random_batch(PAIRS, seed=3)
    count, random = batch.num_response_tokens, np.random.default_rng(4)
    ids = np.stack([random.permutation(VOCAB_SIZE)[:MOST] for _ in range(count)]).astype(np.int32)
    log_probs = np.log(random.dirichlet(np.ones(MOST + 1), count)[:, :MOST]).astype(np.float32)
    absent = np.arange(MOST) >= random.integers(2, MOST + 1, count)[:, None]
    weights = (batch.loss_mask * np.linspace(0.1, 1, count)).astype(np.float32)
    top = TopTokens(np.where(absent, 0, ids), np.where(absent, np.float32(-np.inf), log_probs))
    return batch.with_columns(loss_weights=weights), top


def one_update(hf_dir: Path, name: str) -> dict[str, Any]:
    from megatron_retool.learner.learner import Learner

    settings = dataclasses.replace(
        RUN[name], dtype="float32", max_tokens_per_micro_batch=64, use_distributed_optimizer=False
    )
    learner = Learner(
        Config(model=ModelConfig(path=str(hf_dir)), learner=settings),
        optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0),
        total_optimizer_steps=9,
        hf_dir=hf_dir,
    )
    gradients = gradients_at_next_step(learner)
    before = learner.top_tokens_loss(*scored())
    metrics = learner.top_tokens_update(*scored())
    after = learner.top_tokens_loss(*scored())
    learner.close()
    return {"metrics": metrics, "gradients": gradients, "before": before, "after": after}


def expected(hf_dir: Path) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    batch, top = scored()
    policy = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64).eval()
    loss = torch.zeros((), dtype=torch.float64)
    prompt = response = 0
    for p, r in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        part = slice(response, response + int(r))
        ids = np.concatenate([batch.prompt_ids[prompt : prompt + int(p)], batch.response_ids[part]]).astype(np.int64)
        log_p = policy(torch.from_numpy(ids)[None]).logits[0, int(p) - 1 : -1].log_softmax(-1)
        known = torch.from_numpy(top.log_probs[part]).double()
        each = top_tokens_divergence(log_p.gather(-1, torch.from_numpy(top.ids[part]).long()), known)
        loss = loss + (each * torch.from_numpy(batch.columns["loss_weights"][part]).double()).sum()
        prompt, response = prompt + int(p), response + int(r)
    loss.backward()
    return float(loss.detach()), {key: tensor.grad for key, tensor in policy.named_parameters()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf_model("qwen2", num_hidden_layers=2, tie_word_embeddings=False)
    return save_model(model, tmp_path_factory.mktemp("models") / "policy")


@pytest.mark.parametrize("name", RUN)
def test_an_update_is_transformers_in_every_layout(name: str, model: Path, tmp_path: Path) -> None:
    found = run_ranks(one_update, RUN[name].world_size, tmp_path, model, name)
    loss, gradients = expected(model)
    assert found["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["before"] == pytest.approx(loss, rel=1e-5)
    assert found["after"] < found["before"]
    for key, gradient in found["gradients"].items():
        assert (gradient.double() - gradients[key]).norm() < 1e-5 * gradients[key].norm(), key
    assert found["gradients"] or name == "lora"
