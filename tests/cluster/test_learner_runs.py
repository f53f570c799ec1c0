"""Runs of a caller that trains by itself, on real ranks: two of them take turns, wrong requests are answers, and the
ranks go on after each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_retool.cluster.learner_failures import LearnerDied
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.cluster.learner_worker import LearnerWorker
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.cluster.runtime import ray_runtime
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.parity.admission.tiny_model import save_model
from megatron_retool.runs.checkpoints import SaveError
from megatron_retool.target_sequences import OptimizerStep, RequestRefused, TokenLoss
from tests.kit.adapter_reference import small_model
from tests.kit.target_reference import CROSS_ENTROPY, PAIRS, random_sequences
from tests.loop.test_learner_recovery import answer, group_of, raised_in_actor

SEQUENCES = random_sequences(PAIRS, 1)
STEP = OptimizerStep(1e-2)


def config_of(directory: Path, *overrides: str) -> Config:
    return load_config(
        None,
        [
            f"model.path={directory / 'model'}",
            f"trainer.runs_dir={directory / 'runs'}",
            "trainer.experiment_name=e",
            "learner.world_size=2",
            "learner.tensor_model_parallel_size=2",
            "learner.sequence_parallel=true",
            "learner.dtype=float32",
            "learner.device=cpu",
            "learner.lora.rank=4",
            "learner.max_tokens_per_micro_batch=112",
            *overrides,
        ],
    )


async def _refused(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as refused:
        await call
    return str(refused.value)


async def _train(group: LearnerGroup, directory: Path) -> dict[str, Any]:
    await group.setup(1)
    for name, alpha in (("one", 8.0), ("two", 32.0)):
        await group.create_run(name, rank=4, alpha=alpha, seed=0)
    losses: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(3):
        for name, found in losses.items():
            outputs = await group.accumulate(name, SEQUENCES, CROSS_ENTROPY)
            found.append(outputs.metrics["loss"])
            metrics = await group.apply(name, STEP)
            assert metrics["lr"] == 1e-2 and metrics["grad_norm"] > 0
    read = await group.accumulate("one", SEQUENCES, CROSS_ENTROPY, forward_only=True)
    assert [found.shape for found in read.log_probs] == [sequence.targets.shape for sequence in SEQUENCES]
    said = {
        "run": await _refused(RequestRefused, group.accumulate("three", SEQUENCES, CROSS_ENTROPY)),
        "loss": await _refused(RequestRefused, group.accumulate("one", SEQUENCES, TokenLoss("stable_reinforce"))),
        "nothing": await _refused(RequestRefused, group.apply("one", STEP)),
        "rank": await _refused(RequestRefused, group.create_run("large", rank=8, alpha=1.0, seed=0)),
        "files": await _refused(RequestRefused, group.load_run("one", directory / "nowhere", with_optimizer=True)),
    }
    (directory / "file").write_text("")
    said["disk"] = await _refused(SaveError, group.save_run("one", directory / "file" / "run", with_optimizer=True))
    await group.save_run("one", directory / "saved", with_optimizer=True)
    await group.write_adapter("two", directory / "adapter")
    await group.accumulate("one", SEQUENCES, CROSS_ENTROPY)
    await group.apply("one", STEP)
    await group.load_run("one", directory / "saved", with_optimizer=True)
    again = await group.accumulate("one", SEQUENCES, CROSS_ENTROPY, forward_only=True)
    await group.delete_run("two")
    said["deleted"] = await _refused(RequestRefused, group.apply("two", STEP))
    return {"losses": losses, "read": read, "again": again, "said": said}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("group")
    save_model(small_model("qwen3"), directory / "model")
    return directory


@pytest.mark.slow
def test_runs_on_real_ranks_and_wrong_requests_between_them(directory: Path) -> None:
    config = config_of(directory)
    with ray_runtime(config.cluster):
        group = LearnerGroup(config, plan_placement(config))
        try:
            found = asyncio.run(asyncio.wait_for(_train(group, directory), 240))
        finally:
            group.kill()
    for losses in found["losses"].values():
        assert losses[2] < losses[1] < losses[0]
    assert found["losses"]["one"][1:] != found["losses"]["two"][1:], "alpha is a run's own"
    for first, second in zip(found["read"].log_probs, found["again"].log_probs, strict=True):
        np.testing.assert_array_equal(first, second)
    said = found["said"]
    assert "run 'three': there is no such run" in said["run"]
    assert "loss='stable_reinforce' is not one of cross_entropy" in said["loss"]
    assert "nothing was accumulated" in said["nothing"]
    assert "rank=8: this learner has ranks of 1 to learner.lora.rank=4" in said["rank"]
    assert "nowhere has no adapter_config.json" in said["files"]
    assert "was not written" in said["disk"]
    assert "run 'two': there is no such run" in said["deleted"]
    assert {path.name for path in (directory / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


async def _given(value: Any) -> Any:
    return value


def _group_that_answers(*answers: Any) -> Any:
    group = group_of(*((0.0, None) for _ in answers))
    group.workers = [
        SimpleNamespace(of_runs=SimpleNamespace(remote=lambda *_, given=given, **__: _given(given)))
        for given in answers
    ]
    return group


def test_ranks_that_disagree_about_a_refusal_are_out_of_step() -> None:
    group = _group_that_answers(RequestRefused("no"), None)
    with pytest.raises(LearnerDied, match="only some ranks refused apply, and are out of step: no"):
        asyncio.run(group.apply("one", STEP))
    assert group.killed
    with pytest.raises(RequestRefused, match="no"):
        asyncio.run(_group_that_answers(RequestRefused("no"), RequestRefused("no")).apply("one", STEP))


def test_an_error_within_a_pass_leaves_no_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = LearnerWorker.__new__(LearnerWorker)
    worker.rank, worker.runs = 0, SimpleNamespace(apply=lambda *_: 1 / 0)
    with pytest.raises(Exception, match="apply failed: ZeroDivisionError") as raised:
        worker.of_runs("apply", "one", STEP)
    group = group_of((0.0, None), (60.0, None))
    failing = raised_in_actor(raised.value)
    group.workers[0] = SimpleNamespace(of_runs=SimpleNamespace(remote=lambda *_, **__: answer(0.0, failing)))
    group.workers[1] = SimpleNamespace(of_runs=SimpleNamespace(remote=lambda *_, **__: answer(60.0, None)))
    monkeypatch.setattr("megatron_retool.cluster.learner_group.DEATH_NOTICE_SECONDS", 0.1)
    with pytest.raises(LearnerDied, match="rank 0 on node0 left the others waiting"):
        asyncio.run(asyncio.wait_for(group.apply("one", STEP), 5))


def test_a_learner_without_adapters_has_no_runs() -> None:
    worker: Any = LearnerWorker.__new__(LearnerWorker)
    worker.learner = SimpleNamespace(config=Config(), architecture=SimpleNamespace(predictors=0), role="actor")
    refusal = worker.of_runs("create_run", "one", rank=1, alpha=1.0, seed=0)
    assert isinstance(refusal, ConfigError) and "learner.lora.rank=0" in str(refusal)
