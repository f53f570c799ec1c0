"""The divergence from a teacher: closed forms, gradients, and the whole update in every layout against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_retool.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DistillationConfig,
    DynamicSamplingConfig,
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    RecomputeConfig,
    RolloutCorrectionConfig,
    TeacherConfig,
    load_config,
)
from megatron_retool.learner.divergence import Divergence, TeacherHead
from megatron_retool.learner.log_probs import token_scores
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.trajectory import TrajectoryBatch
from tests.kit.tiny_models import hf_model
from tests.learner.step_gradients import gradients_at_next_step

KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")
BETA = 0.3


def plain(log_p: Tensor, log_q: Tensor, kind: str, top_k: int, beta: float = BETA) -> Tensor:
    """[n], by the definition, of log-probs [n, V]; autograd differentiates it."""
    if top_k:
        chosen = log_q.topk(top_k, -1).indices
        others = torch.ones_like(log_q, dtype=torch.bool).scatter_(-1, chosen, False)

        def events(log_probs: Tensor) -> Tensor:
            rest = log_probs.masked_fill(~others, float("-inf")).logsumexp(-1, keepdim=True)
            return torch.cat([log_probs.gather(-1, chosen), rest], -1)

        log_p, log_q = events(log_p), events(log_q)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    log_m = (beta * q + (1 - beta) * p).log()
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 20),
    vocabulary=st.integers(6, 40),
    padding=st.integers(0, 5),
    chunk=st.integers(1, 9),
    top_k=st.sampled_from([0, 1, 4]),
)
def test_values_and_gradients_equal_the_definition(
    kind: str, tokens: int, vocabulary: int, padding: int, chunk: int, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight, own, head = (
        torch.randn(rows, size, generator=generator)
        for rows, size in ((tokens, 12), (vocabulary + padding, 12), (tokens, 7), (vocabulary + padding, 7))
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()
    teacher = TeacherHead(own, head, Divergence(kind, BETA, top_k))
    log_probs, _, _, divergence = token_scores(
        hidden, weight, targets, vocab_size=vocabulary, chunk_tokens=chunk, teacher=teacher
    )
    log_p = F.log_softmax(hidden @ weight[:vocabulary].T, -1)
    log_q = F.log_softmax(own @ head[:vocabulary].T, -1)
    expected = plain(log_p, log_q, kind, top_k)
    torch.testing.assert_close(divergence, expected, rtol=1e-5, atol=2e-5)
    found = torch.autograd.grad((divergence * upstream[0] + log_probs * upstream[1]).sum(), (hidden, weight))
    sampled = log_p.gather(-1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((expected * upstream[0] + sampled * upstream[1]).sum(), (hidden, weight))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_policy_that_is_its_teacher_has_no_divergence() -> None:
    hidden, weight = torch.randn(9, 12), torch.randn(30, 12)
    for kind in KINDS:
        for top_k in (0, 3):
            teacher = TeacherHead(hidden, weight, Divergence(kind, BETA, top_k))
            found = token_scores(hidden, weight, torch.zeros(9, dtype=torch.int64), vocab_size=30, teacher=teacher)[3]
            assert found.abs().max() < 1e-5


PAIRS = [(5, 20), (5, 3), (4, 12), (4, 31)]
LAYOUTS = {
    "one process": LearnerConfig(),
    "recompute, prefixes": LearnerConfig(recompute=RecomputeConfig(granularity="full"), share_prefixes=True),
    "lora": LearnerConfig(lora=LoraConfig(rank=2)),
    "tp2": LearnerConfig(world_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": LearnerConfig(world_size=2, pipeline_model_parallel_size=2),
    "cp2": LearnerConfig(world_size=2, context_parallel_size=2),
    "dp2, overlap": LearnerConfig(world_size=2, overlap_grad_reduce=True),
}
OF_LAYOUT = {"tp2": ("jensen_shannon", 5), "cp2": ("reverse_kl", 0), "pp2": ("forward_kl", 4)}


def configured(name: str, *teachers: Path) -> Config:
    """Only the divergence teaches."""
    kind, top_k = OF_LAYOUT.get(name, ("forward_kl", 0))
    sources = [["math"], []] if len(teachers) > 1 else [[]]
    distillation = DistillationConfig(
        teachers=[TeacherConfig(path=str(path), data_sources=of) for path, of in zip(teachers, sources, strict=True)],
        divergence=kind,
        beta=BETA,
        top_k=top_k,
        divergence_weight=0.7,
    )
    learner = dataclasses.replace(
        LAYOUTS[name], dtype="float32", max_tokens_per_micro_batch=64, use_distributed_optimizer=False
    )
    return Config(learner=learner, algorithm=AlgorithmConfig(advantage="zero", distillation=distillation))


def mini_batch() -> TrajectoryBatch:
    batch = random_batch(PAIRS, seed=3)
    zeros = np.zeros(batch.num_response_tokens, np.float32)
    weights = (batch.loss_mask * np.linspace(0.1, 1, len(zeros))).astype(np.float32)
    return batch.with_columns(old_log_probs=zeros, advantages=zeros, loss_weights=weights)


OF_ROWS = (1, 0, 1, 0)
"""Where there are two, the teacher of each row."""


def with_teachers(batch: TrajectoryBatch, count: int) -> TrajectoryBatch:
    if count == 1:
        return batch
    return batch.with_columns(teacher=np.repeat(OF_ROWS, batch.response_lengths))


def one_update(hf_dir: Path, teachers: list[Path], name: str) -> dict[str, Any]:
    from megatron_retool.learner.learner import Learner

    config = configured(name, *teachers)
    learner = Learner(
        config,
        optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0),
        total_optimizer_steps=9,
        hf_dir=hf_dir,
        with_reference=True,
        with_teacher=True,
    )
    batch = with_teachers(mini_batch(), len(teachers))
    reference = learner.log_probs(batch, reference=True)["log_probs"]
    gradients = gradients_at_next_step(learner)
    metrics = learner.update(batch)
    learner.close()
    return {"metrics": metrics, "gradients": gradients, "reference": reference}


def expected(hf_dir: Path, teacher_dirs: list[Path], name: str) -> tuple[float, dict[str, Tensor], np.ndarray]:
    """Mean divergence, gradients, and the teacher's log-probs, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    batch, (kind, top_k) = mini_batch(), OF_LAYOUT.get(name, ("forward_kl", 0))
    policy, *teachers = (
        AutoModelForCausalLM.from_pretrained(d, dtype=torch.float64).eval() for d in (hf_dir, *teacher_dirs)
    )
    loss, measured, taken = torch.zeros((), dtype=torch.float64), [], []
    prompt = response = 0
    for row, (p, r) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
        teacher = teachers[OF_ROWS[row] if len(teachers) > 1 else 0]
        part = slice(response, response + int(r))
        ids = torch.from_numpy(
            np.concatenate([batch.prompt_ids[prompt : prompt + int(p)], batch.response_ids[part]]).astype(np.int64)
        )
        log_p = policy(ids[None]).logits[0, int(p) - 1 : -1].log_softmax(-1)
        with torch.no_grad():
            log_q = teacher(ids[None]).logits[0, int(p) - 1 : -1].log_softmax(-1)
        each = plain(log_p, log_q, kind, top_k)
        loss = loss + 0.7 * (each * torch.from_numpy(batch.columns["loss_weights"][part]).double()).sum()
        mask = torch.from_numpy(batch.loss_mask[part])
        measured.append(each.detach()[mask])
        taken.append(torch.where(mask, log_q.gather(-1, ids[int(p) :, None])[:, 0], 0.0))
        prompt, response = prompt + int(p), response + int(r)
    loss.backward()
    gradients = {key: tensor.grad for key, tensor in policy.named_parameters()}
    return float(torch.cat(measured).mean()), gradients, torch.cat(taken).numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The policy, and two teachers of other families and widths."""
    directory = tmp_path_factory.mktemp("models")
    policy = hf_model("qwen2", num_hidden_layers=2, tie_word_embeddings=False)
    torch.manual_seed(5)
    teacher = hf_model("qwen3", num_hidden_layers=4, hidden_size=48)
    second = hf_model("llama", num_hidden_layers=2)
    places = [save_model(teacher, directory / "teacher"), save_model(second, directory / "second")]
    return save_model(policy, directory / "policy"), places


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 1) for name in LAYOUTS), *((name, 2) for name in LAYOUTS if name not in ("recompute, prefixes", "lora"))],
)
def test_an_update_is_transformers_in_every_layout(
    name: str, count: int, models: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    policy, teachers = models[0], models[1][:count]
    found = run_ranks(one_update, LAYOUTS[name].world_size, tmp_path, policy, teachers, name)
    divergence, gradients, reference = expected(policy, teachers, name)
    assert found["metrics"]["distillation/divergence"] == pytest.approx(divergence, rel=1e-5)
    np.testing.assert_allclose(found["reference"], reference, atol=1e-4)
    for key, gradient in found["gradients"].items():
        assert (gradient.double() - gradients[key]).norm() < 1e-5 * gradients[key].norm(), key
    assert found["gradients"] or name == "lora"


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from conversion.model.architecture import Architecture

    policy = save_model(hf_model("qwen2"), tmp_path / "policy")
    teacher = save_model(hf_model("qwen2", vocab_size=300), tmp_path / "teacher")
    config = configured("one process", teacher)
    with pytest.raises(ConfigError, match="300 rows"):
        config.algorithm.distillation.teacher_architectures(Architecture.from_pretrained(policy), config.learner)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"divergence": "forward_kl", "teachers": [TeacherConfig(url="http://t")]}, "teachers[0].path"),
        ({"teachers": [TeacherConfig(path="a"), TeacherConfig(url="http://t")]}, "some have a path"),
        ({"teachers": [TeacherConfig(path="a", api_key="k")]}, "leave out its url and api_key"),
        ({"teachers": [TeacherConfig(path="a"), TeacherConfig(path="b")]}, "the rows that no other teacher names"),
        ({"divergence": "jensen_shannon", "beta": 1.0, "teachers": [TeacherConfig(path="a")]}, "beta=1.0"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        DistillationConfig(**changes).check()
    assert words in str(error.value)


def test_a_rejection_within_the_update_is_refused() -> None:
    distillation = DistillationConfig(teachers=[TeacherConfig(path="a")], divergence="forward_kl")
    correction = RolloutCorrectionConfig(bypass_old_log_probs=True, mode="none", denominator="pre")
    settings = {"advantage": "zero", "dynamic_sampling": DynamicSamplingConfig(enable=False)}
    AlgorithmConfig(
        **settings,
        distillation=distillation,
        rollout_correction=dataclasses.replace(correction, rejection=[], veto_threshold=None),
    ).check()
    with pytest.raises(ConfigError, match="where a token is rejected"):
        AlgorithmConfig(
            **settings,
            distillation=distillation,
            rollout_correction=dataclasses.replace(correction, veto_threshold=1e-4),
        ).check()


def test_a_row_has_the_teacher_of_its_data_source() -> None:
    teachers = [TeacherConfig(path="a", data_sources=["math", "code"]), TeacherConfig(path="b")]
    distillation = DistillationConfig(teachers=teachers)
    distillation.check()
    assert [distillation.teacher_of(source) for source in ("code", "other", "math")] == [0, 1, 0]
    with pytest.raises(ConfigError, match="no teacher names the data source 'other'"):
        DistillationConfig(teachers=teachers[:1]).teacher_of("other")


def test_prefixes_are_not_shared_by_rows_of_several_teachers() -> None:
    teachers = "algorithm.distillation.teachers=[{path: a, data_sources: [math]}, {path: b}]"
    with pytest.raises(ConfigError, match="learner.share_prefixes=true does not go with several teachers"):
        load_config(None, [teachers, "algorithm.distillation.divergence=forward_kl", "learner.share_prefixes=true"])
