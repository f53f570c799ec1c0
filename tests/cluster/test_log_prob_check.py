"""When engines are compared with the learner, with what text, and what a run is told."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from megatron_retool.cluster.engine_weights import EngineWeights
from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.cluster.log_prob_check import (
    LogProbCheck,
    LogProbMismatch,
    as_batch,
    default_bound,
    fixed_text,
)
from megatron_retool.config import load_config
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.base import EngineUnavailable
from tests.cluster.test_engine_weights import FakeEngines, FakeLearner


class Bytes:
    """A tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())

    def __len__(self) -> int:
        return 300


def log_probs_of(ids: list[int]) -> np.ndarray:
    return -np.array([1 + (a * 31 + b * 17) % 7 for a, b in zip(ids, ids[1:], strict=False)], np.float32)


class ScoringLearner(FakeLearner):
    calls = 0

    async def log_probs(self, batch: TrajectoryBatch, *, sampling: Any) -> dict[str, Any]:
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)
        assert batch.prompt_lengths.tolist() == [1] and batch.loss_mask.all()
        self.calls += 1
        return {"log_probs": log_probs_of([*batch.prompt_ids.tolist(), *batch.response_ids.tolist()])}


class ScoringEngines:
    """Clients of engines at any URL. ``wrong`` engines answer with other log-probs, ``silent`` ones not at all."""

    def __init__(self, wrong: tuple[str, ...] = (), silent: tuple[str, ...] = (), scores: bool = True) -> None:
        self.wrong, self.silent, self.scores = wrong, silent, scores
        self.asked: list[str] = []

    def client(self, url: str) -> Any:
        engines = self

        class Client:
            async def __aenter__(self) -> Client:
                return self

            async def __aexit__(self, *_: object) -> None: ...

        class Scoring(Client):
            async def score(self, input_ids: list[int]) -> list[float]:
                engines.asked.append(url)
                if url in engines.silent:
                    raise EngineUnavailable(url, "gone")
                found = log_probs_of(input_ids)
                return (found[::-1] if url in engines.wrong else found).tolist()

        return Scoring() if self.scores else Client()


def weights_of(engines: ScoringEngines, *overrides: str) -> tuple[EngineWeights, ScoringLearner, Console]:
    console, learner = Console(record=True, width=2000), ScoringLearner()
    fakes: Any = FakeEngines()
    check = LogProbCheck(load_config(None, list(overrides)), Bytes(), engines.client, console)

    async def replaced(url: str, new_url: str) -> None: ...

    phases = GpuPhases(False, list, list)
    weights = EngineWeights(fakes, "model", lambda: learner, phases, replaced, StepTimer(), console, check)
    return weights, learner, console


def test_an_adapter_is_compared_again_when_it_may_add_something() -> None:
    """The first one adds nothing: an engine that leaves it out agrees."""
    engines = ScoringEngines()
    weights, learner, _ = weights_of(engines, "learner.lora.rank=4", "learner.lora.sync=adapter")
    for version in range(4):
        asyncio.run(weights.sync(version))
    assert engines.asked == ["http://e0", "http://e1"] * 2 and learner.calls == 2
    asyncio.run(weights.restart("http://e1"))
    for version in range(4, 8):
        asyncio.run(weights.sync(version))
    assert engines.asked[4:] == ["http://e1-again"] * 2
    weights, _, _ = weights_of(engines, "learner.lora.rank=4", "learner.lora.sync=adapter")
    asyncio.run(weights.sync(0))
    engines.wrong = ("http://e0",)
    with pytest.raises(LogProbMismatch, match="http://e0"):
        asyncio.run(weights.sync(1))


def test_every_engine_is_compared_once_and_a_new_one_at_its_first_sync() -> None:
    engines = ScoringEngines()
    weights, learner, console = weights_of(engines)
    assert asyncio.run(weights.sync(0)) == {"weight_sync/seconds": 1.0}
    assert engines.asked == ["http://e0", "http://e1"] and learner.calls == 1
    assert "2 engines agree with the learner on a text of 512 tokens" in console.export_text()
    metrics = asyncio.run(weights.sync(1))
    assert metrics["weight_sync/log_prob_difference_mean"] == metrics["weight_sync/log_prob_difference_max"] == 0.0
    assert asyncio.run(weights.sync(1)) == {"weight_sync/seconds": 1.0}
    assert asyncio.run(weights.restart("http://e1")) == "http://e1-again"
    # The learner may be in the middle of an update, or share the GPUs with engines that generate.
    assert len(engines.asked) == 2 and learner.calls == 1
    asyncio.run(weights.sync(2))
    assert engines.asked[2:] == ["http://e1-again"] and learner.calls == 2
    assert "weight_sync/log_prob_difference_mean" in asyncio.run(weights.sync(3))


def test_all_engines_are_compared_again_every_few_syncs() -> None:
    async def scenario(*overrides: str) -> list[int]:
        engines = ScoringEngines()
        weights, _, _ = weights_of(engines, *overrides)
        asked = []
        for version in range(6):
            await weights.sync(version)
            asked.append(len(engines.asked))
        return asked

    once = asyncio.run(scenario())
    assert len(set(once)) == 1
    number = once[0]
    found = asyncio.run(scenario("weight_sync.check_every=2"))
    assert found == [number, number, 2 * number, 2 * number, 3 * number, 3 * number]


def test_a_learner_that_was_built_anew_is_compared_again() -> None:
    engines = ScoringEngines()
    weights, learner, _ = weights_of(engines)
    asyncio.run(weights.sync(0))
    again = ScoringLearner()
    weights._source = lambda: again
    asyncio.run(weights.sync(0))
    assert len(engines.asked) == 4 and again.calls == 1


def test_one_engine_that_computes_another_model_stops_the_run() -> None:
    weights, _, _ = weights_of(ScoringEngines(wrong=("http://e1",)))
    with pytest.raises(LogProbMismatch) as error:
        asyncio.run(weights.sync(0))
    for words in (
        "engine http://e1 and the learner", "1 of 2 engines differ: only these", "of 512 tokens", "position",
        "0.15 now", "weight_sync.max_log_prob_difference", "weight_sync.check_log_probs=false", "docs/mismatch.md",
    ):  # fmt: skip
        assert words in str(error.value)
    weights, _, _ = weights_of(ScoringEngines(wrong=("http://e1",)), "weight_sync.max_log_prob_difference=2")
    asyncio.run(weights.sync(0))
    assert asyncio.run(weights.sync(1))["weight_sync/log_prob_difference_max"] > 1


def test_a_new_engine_that_computes_another_model_stops_the_run() -> None:
    weights, _, _ = weights_of(ScoringEngines(wrong=("http://e1-again",)))
    asyncio.run(weights.sync(0))
    asyncio.run(weights.restart("http://e1"))
    with pytest.raises(LogProbMismatch, match="http://e1-again"):
        asyncio.run(weights.sync(1))


def test_engines_that_cannot_be_asked_are_named_and_left_alone() -> None:
    weights, _, console = weights_of(ScoringEngines(scores=False))
    assert asyncio.run(weights.sync(0)) == {"weight_sync/seconds": 1.0}
    assert "http://e0 cannot score a text" in console.export_text()
    engines = ScoringEngines(silent=("http://e0",))
    weights, _, console = weights_of(engines)
    asyncio.run(weights.sync(0))
    assert "not compared with the learner's: engine http://e0: gone" in console.export_text()
    engines.silent = ()
    assert "weight_sync/log_prob_difference_mean" in asyncio.run(weights.sync(1))
    assert engines.asked == ["http://e0", "http://e1", "http://e0"]


def test_on_shared_gpus_the_learner_scores_before_it_leaves_and_the_engines_when_they_are_awake() -> None:
    engines = ScoringEngines()
    weights, learner, _ = weights_of(engines)
    events: list[str] = []

    class Model:
        async def offload(self, *parts: str) -> None:
            events.append(f"offload {' '.join(parts)}")

        async def reload(self, *parts: str) -> None:
            events.append(f"reload {' '.join(parts)}")

    class Client:
        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def sleep(self, memory: Any) -> None:
            events.append(f"sleep {' '.join(memory)}")

        async def wake(self, memory: Any) -> None:
            events.append(f"wake {' '.join(memory)}")

    async def log_probs(batch: TrajectoryBatch, **options: Any) -> dict[str, Any]:
        events.append("learner scores")
        return await ScoringLearner.log_probs(learner, batch, **options)

    learner.log_probs = log_probs
    score = engines.client

    def client(url: str) -> Any:
        events.append("engine scores")
        return score(url)

    assert weights._check is not None
    weights._check._client = client
    weights._gpu_phases = GpuPhases(True, lambda: [Model()], lambda: ["http://e0"], lambda url: cast(Any, Client()))
    asyncio.run(weights.sync(0))
    told = [event for event in events if "scores" in event or event in ("reload weights", "wake kv_cache")]
    assert told == ["reload weights", "learner scores", "wake kv_cache", "engine scores", "engine scores"]
    assert events.index("offload weights optimizer gradients") < events.index("wake kv_cache")


def test_the_text_is_the_same_in_every_run_and_reaches_the_whole_vocabulary() -> None:
    ids = fixed_text(Bytes(), 151_936, 512)
    assert ids == fixed_text(Bytes(), 151_936, 512) and len(ids) == 512
    assert ids[:32] == list(b"The river rises in the hills, ru")
    spread = [token for block in range(8) for token in ids[64 * block + 32 : 64 * block + 64]]
    assert len(set(spread)) == 256 and min(spread) == 0 and max(spread) == 151_934
    # In no order, and at every place of the text.
    assert np.abs(np.corrcoef(spread, np.arange(256))[0, 1]) < 0.2
    assert fixed_text(Bytes(), 16, 9) == list(b"The rive") + [ids[8]] and len(fixed_text(Bytes(), 300, 4096)) == 4096
    assert as_batch(ids).total_lengths.tolist() == [512]


@pytest.mark.parametrize(
    ("overrides", "keys", "bound"),
    [
        ("learner.dtype=float32 rollout.engine.dtype=float32", "", 0.005),
        ("learner.dtype=float32 rollout.engine.dtype=float32 weight_sync.round_to=int8", "", 0.15),
        ("learner.dtype=float32", '"dtype": "float32"', 0.005),
        ("learner.dtype=float32", '"torch_dtype": "bfloat16"', 0.15),
        ("rollout.engine.dtype=float32", "", 0.15),
        ("rollout.engine.quantization=fp8", "", 0.4),
        ("weight_sync.round_to=fp8", "", 0.4),
        ("learner.fp8.recipe=blockwise", "", 0.4),
        ("learner.fp8.recipe=nvfp4", "", 1.0),
        ("weight_sync.round_to=int4", "", math.inf),
    ],
)
def test_the_bound_is_what_the_precision_explains(overrides: str, keys: str, bound: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f"{{{keys}}}")
    assert default_bound(load_config(None, [f"model.path={tmp_path}", *overrides.split()])) == bound


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ("cluster.gpus_per_node=8", 4096),
        ("rollout.engine.context_length=300", 299),
        ("rollout.engine.max_total_tokens=400", 200),
        ("learner.max_tokens_per_micro_batch=256", 256),
        ("data.max_prompt_length=20 data.max_response_length=30", 50),
    ],
)
def test_the_text_is_no_longer_than_engine_and_learner_take(overrides: str, length: int) -> None:
    check = LogProbCheck(load_config(None, overrides.split()), Bytes(), ScoringEngines().client, Console())
    assert check._length() == length
