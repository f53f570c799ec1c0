"""A real engine and the learner compute every token's log-prob to the same bit (learner.match_engine=exact)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conversion.model.architecture import Architecture
from conversion.model.model_operators import OPERATORS
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.config import Config, EngineConfig, LearnerConfig
from megatron_retool.config.rollout import SamplingConfig
from megatron_retool.parity.admission import requests as admission_requests
from megatron_retool.parity.admission.requests import shrunk_config
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.planning.models import MODELS
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.base import EngineStartError, GenerateRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient
from tests.kit.forked_engine import ForkedServer
from tests.kit.tiny_models import hf_model

TEMPERATURE = 0.7
TURNS = ((5, 30), (9, 12), (21, 40), (3, 7), (33, 25), (40, 1), (2, 60), (17, 17))
"""Of each text: tokens of the first prompt, and of each answer."""
NEW_TOKENS = 6
"""That a tool returns between two answers."""


def batch_of(texts: list[tuple[list[int], list[int], list[float]]]) -> TrajectoryBatch:
    """Of (prompt, response, the engine's log-probs of the response, 0 where a tool wrote)."""
    prompts, responses, scores = zip(*texts, strict=True)
    log_probs = np.concatenate([np.array(each, np.float32) for each in scores])
    return TrajectoryBatch(
        prompt_ids=np.concatenate([np.array(ids, np.int32) for ids in prompts]),
        prompt_lengths=np.array([len(ids) for ids in prompts], np.int32),
        response_ids=np.concatenate([np.array(ids, np.int32) for ids in responses]),
        response_lengths=np.array([len(ids) for ids in responses], np.int32),
        loss_mask=log_probs != 0,
        rollout_log_probs=log_probs,
        weight_versions=np.zeros(len(log_probs), np.int32),
        turn_ids=np.zeros(len(log_probs), np.int32),
        group_ids=np.arange(len(texts)),
        indices=np.zeros(len(texts), np.int32),
        rewards=np.zeros(len(texts), np.float32),
    )


SAMPLING = SamplingConfig(temperature=TEMPERATURE)
FILTERED = (
    SAMPLING,
    SamplingConfig(temperature=TEMPERATURE, top_p=0.95),
    SamplingConfig(temperature=TEMPERATURE, top_k=5),
    SamplingConfig(temperature=TEMPERATURE, min_p=0.1),
    SamplingConfig(temperature=TEMPERATURE, top_k=40, top_p=0.7),
)


async def play(
    url: str, vocab_size: int, samplings: tuple[SamplingConfig, ...] = (SAMPLING,)
) -> tuple[list[Any], list[Any]]:
    """Texts of two turns, sampled side by side, and what a prefill says of the same tokens.

    Each text takes its place's of ``samplings``, again and again.
    """
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab_size, 40).tolist()

    async with SGLangClient(url) as client:

        async def text(prompt_length: int, answer: int, seed: int) -> tuple[list[int], list[int], list[float]]:
            sampling, stop = samplings[seed % len(samplings)], StopConditions(end_of_sequence=False)
            prompt = shared[:prompt_length]
            tool = np.random.default_rng(seed).integers(0, vocab_size, NEW_TOKENS).tolist()
            response, scores = [], []
            for turn in range(2):
                if turn:
                    response, scores = response + tool, scores + [0.0] * NEW_TOKENS
                found = await client.generate(
                    GenerateRequest(prompt + response, answer, sampling, stop, filtered_log_probs=True)
                )
                response, scores = response + list(found.output_ids), scores + list(found.log_probs)
            return prompt, response, scores

        texts = await asyncio.gather(*(text(*lengths, seed) for seed, lengths in enumerate(TURNS * 2)))
        prefills = [await client.score(prompt + response) for prompt, response, _ in texts]
    return list(texts), prefills


@dataclasses.dataclass(frozen=True)
class Turn:
    """``told`` tokens of a tool and an answer of ``answer``, aborted after so many seconds and then continued."""

    told: int
    answer: int
    aborted_after: float | None


@dataclasses.dataclass(frozen=True)
class Request:
    """Text that begins with tokens of a ``family`` of texts, some time after the schedule's begin."""

    after: float
    family: int
    prompt: int
    turns: list[Turn]


TURN = st.builds(Turn, st.integers(0, 6), st.integers(1, 20), st.one_of(st.none(), st.floats(0.0, 0.3)))
SCHEDULES = st.lists(
    st.builds(
        Request, st.floats(0.0, 0.5), st.integers(0, 2), st.integers(1, 40), st.lists(TURN, min_size=1, max_size=3)
    ),
    min_size=1,
    max_size=24,
)


async def play_schedule(url: str, vocab_size: int, schedule: list[Request]) -> list[Any]:
    stop = StopConditions(end_of_sequence=False)

    async with SGLangClient(url) as client:

        async def answer(ids: list[int], length: int, aborted_after: float | None) -> tuple[list[int], list[float]]:
            begun: list[str] = []
            request = GenerateRequest(ids, length, SAMPLING, stop)
            task = asyncio.ensure_future(client.generate(request, on_start=begun.append))
            if aborted_after is not None:
                await asyncio.wait({task}, timeout=aborted_after)
                await client.abort(begun[-1])
            found = await task
            sampled, scores = list(found.output_ids), list(found.log_probs)
            if len(sampled) < length:
                more, their_scores = await answer(ids + sampled, length - len(sampled), None)
                sampled, scores = sampled + more, scores + their_scores
            return sampled, scores

        async def text(number: int, asked: Request) -> tuple[list[int], list[int], list[float]]:
            await asyncio.sleep(asked.after)
            prompt = np.random.default_rng(asked.family).integers(0, vocab_size, 40)[: asked.prompt].tolist()
            tool = np.random.default_rng(1000 + number)
            response, scores = [], []
            for place, turn in enumerate(asked.turns):
                told = tool.integers(0, vocab_size, turn.told).tolist() if place else []
                response, scores = response + told, scores + [0.0] * len(told)
                sampled, their_scores = await answer(prompt + response, turn.answer, turn.aborted_after)
                response, scores = response + sampled, scores + their_scores
            return prompt, response, scores

        return list(await asyncio.gather(*(text(number, asked) for number, asked in enumerate(schedule))))


def exact_server(config: EngineConfig, directory: Path) -> ForkedServer:
    return ForkedServer(
        config, model_path=directory / "model", log_file=directory / "engine.log", exact_operators=OPERATORS
    )


def learn(directory: Path, dtype: str, texts: list[Any]) -> list[dict[str, Any]]:
    # Windows and layers with a state do not go together with shared prefixes, exact or not.
    architecture = Architecture.from_pretrained(directory)
    forms = (False,) if architecture.sliding_window or architecture.linear_layers else (False, True)
    return [log_probs(directory, dtype, texts, share_prefixes=share) for share in forms]


def log_probs(
    directory: Path, dtype: str, texts: list[Any], samplings: tuple[SamplingSettings, ...] = (SAMPLING,), **options: Any
) -> dict[str, Any]:
    from megatron_retool.learner.learner import Learner

    learner = LearnerConfig(**{"dtype": dtype, "match_engine": "exact", "max_tokens_per_micro_batch": 128, **options})
    actor = Learner(
        Config(learner=learner), optimizer=Config().learner.optimizer, total_optimizer_steps=1, hf_dir=directory
    )
    batch = batch_of(texts)
    every_token = dataclasses.replace(batch, loss_mask=np.ones_like(batch.loss_mask))
    sampled = [actor.log_probs(batch, sampling=each)["log_probs"] for each in samplings]
    return {
        "sampled": sampled[0] if len(sampled) == 1 else sampled,
        "prefilled": actor.log_probs(every_token)["log_probs"],
    }


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def save_tiny_model(family: str, changes: dict[str, Any], dtype: str, directory: Path) -> int:
    """A model of the family with three small layers, or a shrunk published one; its vocabulary's size."""
    if family in MODELS:
        config = shrunk_config(admission_requests.Request(family, MODELS[family], layers=3))
        config |= {"max_position_embeddings": 512, "dtype": dtype, **changes}
        save_model(random_model(config).to(getattr(torch, dtype)), directory, config)
        if "architectures" in changes:  # SGLang's own class has another name than transformers'
            (directory / "config.json").write_text(json.dumps(config))
        return int(config["vocab_size"])
    model = hf_model(family, num_hidden_layers=3, max_position_embeddings=512, **changes)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return int(model.config.vocab_size)


slow, rare = (functools.partial(pytest.param, marks=mark) for mark in (pytest.mark.slow, pytest.mark.rare))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
"""Sizes that SGLang's runner on a CPU takes."""
HYBRID = {**SIZES, "shared_intermediate_size": 128, "mamba_d_head": 16, "layer_types": ["mamba", "attention", "mamba"]}


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("qwen2", "bfloat16", {}),
        rare("deepseek-v2-lite", "bfloat16", SIZES),
        rare("deepseek-v2", "float32", SIZES),
        slow("deepseek-v3", "bfloat16", SIZES),
        rare("glm-4.5", "bfloat16", SIZES),
        rare("qwen1.5-moe-a2.7b", "bfloat16", {**SIZES, "shared_expert_intermediate_size": 64}),
        slow("olmo-3-7b", "bfloat16", {**SIZES, "sliding_window": 20}),
        slow("gemma-3-1b", "bfloat16", {**SIZES, "sliding_window": 20, "sliding_window_pattern": 2}),
        rare("ministral-3-8b", "bfloat16", SIZES),
        rare("granite-3.2-2b", "bfloat16", {**SIZES, "embedding_multiplier": 12.7, "logits_scaling": 6.1}),
        rare("granite-3.1-1b-a400m", "bfloat16", SIZES),
        rare("granite-4.0-h-micro", "bfloat16", HYBRID),
        slow("granite-4.0-h-tiny", "bfloat16", HYBRID),
        slow("ernie-4.5-0.3b", "float32", {**SIZES, "architectures": ["Ernie4_5_ForCausalLM"]}),
        slow("qwen3.5-9b", "float32", {**SIZES, "num_hidden_layers": 4}),
        slow(
            "qwen3-next-80b-a3b",
            "bfloat16",
            {**SIZES, "num_hidden_layers": 4, "shared_expert_intermediate_size": 64},
        ),
        ("qwen3", "float32", {"rope_parameters": YARN}),
        ("qwen3_moe", "bfloat16", {}),
    ],
)
def test_every_log_prob_is_the_same(family: str, dtype: str, changes: dict[str, Any], tmp_path: Path) -> None:
    vocab_size = save_tiny_model(family, changes, dtype, tmp_path / "model")
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        max_total_tokens=8192,
        max_running_requests=6,
        extra_args=["--chunked-prefill-size", "16"],
    )
    with exact_server(config, tmp_path) as server:
        texts, prefills = asyncio.run(play(server.base_url, vocab_size))
    found = run_ranks(learn, 1, tmp_path / "ranks", tmp_path / "model", dtype, texts)
    batch = batch_of(texts)
    sampled = batch.loss_mask
    assert sampled.sum() > 700
    rows = [scores[len(prompt) - 1 :] for (prompt, *_), scores in zip(texts, prefills, strict=True)]
    for each in found:
        np.testing.assert_array_equal(each["sampled"][sampled], batch.rollout_log_probs[sampled])
        np.testing.assert_array_equal(each["prefilled"], np.concatenate(rows).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "bfloat16"), ("qwen3_moe", "float32")])
def test_every_log_prob_of_what_filters_leave_is_the_same(family: str, dtype: str, tmp_path: Path) -> None:
    """With more tokens than filters ever leave, and requests with other filters beside one another."""
    vocab_size = save_tiny_model(family, {"vocab_size": 5000}, dtype, tmp_path / "model")
    config = EngineConfig(device="cpu", dtype=dtype, max_total_tokens=8192, max_running_requests=6)
    with exact_server(config, tmp_path) as server:
        texts, _ = asyncio.run(play(server.base_url, vocab_size, FILTERED))
    found = run_ranks(log_probs, 1, tmp_path / "ranks", tmp_path / "model", dtype, texts, FILTERED)["sampled"]
    batch = batch_of(texts)
    kinds = np.repeat(np.arange(len(texts)) % len(FILTERED), batch.response_lengths)
    for kind, theirs in enumerate(found):
        chosen = batch.loss_mask & (kinds == kind)
        assert chosen.sum() > 50
        np.testing.assert_array_equal(theirs[chosen], batch.rollout_log_probs[chosen])
        assert kind == 0 or not np.array_equal(theirs[chosen], found[0][chosen])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), [("qwen3_moe", {}), ("qwen3.5-9b", {**SIZES, "num_hidden_layers": 4})])
def test_every_log_prob_is_the_same_in_any_schedule(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    vocab_size = save_tiny_model(family, changes, "bfloat16", tmp_path / "model")
    config = EngineConfig(
        device="cpu",
        dtype="bfloat16",
        max_total_tokens=1024,  # of which requests are driven out, and computed again
        max_running_requests=16,
        extra_args=["--chunked-prefill-size", "16"],
    )
    numbers = itertools.count()
    with exact_server(config, tmp_path) as server:

        @settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
        @given(SCHEDULES)
        def check(schedule: list[Request]) -> None:
            texts = asyncio.run(play_schedule(server.base_url, vocab_size, schedule))
            ranks = tmp_path / f"ranks_{next(numbers)}"
            found = run_ranks(log_probs, 1, ranks, tmp_path / "model", "bfloat16", texts)["sampled"]
            batch = batch_of(texts)
            sampled = batch.loss_mask
            np.testing.assert_array_equal(found[sampled], batch.rollout_log_probs[sampled])

        check()


def test_a_model_that_sglang_computes_with_transformers_is_refused(tmp_path: Path) -> None:
    hf_model("seed_oss", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    config = EngineConfig(device="cpu", dtype="float32", max_total_tokens=1024)
    server = exact_server(config, tmp_path)
    with pytest.raises(EngineStartError):
        server.start()
    assert "SGLang computes this model with transformers'" in (tmp_path / "engine.log").read_text()


async def seeded(url: str) -> list[tuple[list[int], list[float]]]:
    sampling, stop = SamplingConfig(), StopConditions(end_of_sequence=False)
    async with SGLangClient(url) as client:
        requests = [GenerateRequest(list(range(3, 4 + n)), 5 + 3 * n, sampling, stop, seed=n) for n in range(12)]
        found = await asyncio.gather(*(client.generate(request) for request in requests))
    return [(list(each.output_ids), list(each.log_probs)) for each in found]


@pytest.mark.slow
def test_the_same_seeds_give_the_same_answers_in_any_batch(tmp_path: Path) -> None:
    hf_model("qwen3", num_hidden_layers=2).bfloat16().save_pretrained(tmp_path / "model")
    found = []
    for requests in (1, 12):
        config = EngineConfig(
            device="cpu", dtype="bfloat16", max_total_tokens=2048, max_running_requests=requests, random_seed=3
        )
        with exact_server(config, tmp_path) as server:
            found.append(asyncio.run(seeded(server.base_url)))
    assert found[0] == found[1]
