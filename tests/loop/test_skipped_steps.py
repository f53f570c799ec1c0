"""Steps that change no weight: recognised, counted, and the end of a run that has nothing but them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.config import load_config
from megatron_retool.loop.experience import collect_groups
from megatron_retool.loop.faults import (
    NoSignal,
    RewardFailures,
    SkippedSteps,
    SkipReason,
    no_signal_cause,
    skipped_updates,
)
from megatron_retool.loop.metrics import batch_metrics
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.train import learn
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import FinishReason, Trajectory
from run_files.steps import read_estimates
from sglang_rollout.engine.rollout_statistics import RolloutStatistics


def test_the_run_ends_after_so_many_in_a_row_and_names_the_reasons() -> None:
    skipped = SkippedSteps(3)
    reasons = [SkipReason.NO_SIGNAL, SkipReason.NO_SIGNAL, None, SkipReason.NONFINITE, SkipReason.NO_SIGNAL]
    for step, (reason, in_a_row) in enumerate(zip(reasons, (1, 2, 0, 1, 2), strict=True), start=1):
        metrics = skipped.record(step, reason)
        assert metrics == {"actor/skipped_updates": float(reason is not None), "actor/skipped_in_a_row": in_a_row}
        skipped.check(step)
    skipped.record(6, SkipReason.NONFINITE)
    with pytest.raises(RuntimeError, match=r"steps 4 to 6 changed no weight") as caught:
        skipped.check(6)
    for words in ("In 2 of them every gradient is NaN", "actor/grad_norm", "In 1 of them no group has different"):
        assert words in str(caught.value)


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
FAILED = {"failure": "exception", "failure_message": "KeyError"}
READ, UNREAD = {"pred": "7"}, {"pred": None}


@pytest.mark.parametrize(
    ("responses", "cause"),
    [
        ([(0, 1.0, STOP, 1, READ), (0, -1.0, STOP, 2, READ), (1, -1.0, STOP, 1, READ), (1, -1.0, STOP, 2, READ)], None),
        ([(0, -1.0, STOP, 1, READ), (1, 1.0, STOP, 2, READ)], None),
        ([], None),
        ([(0, -1.0, LENGTH, 1, FAILED), (0, -1.0, STOP, 2, FAILED)], "failures"),
        ([(0, -1.0, LENGTH, 1, UNREAD), (0, -1.0, LENGTH, 2, UNREAD)], "length"),
        ([(0, 1.0, STOP, 1, READ), (0, 1.0, STOP, 1, READ), (1, -1.0, STOP, 2, READ), (1, -1.0, STOP, 2, READ)],
         "identical"),
        ([(0, -1.0, STOP, 1, UNREAD), (0, -1.0, LENGTH, 2, UNREAD)], "no answer"),
        ([(0, -1.0, STOP, 1, READ), (0, -1.0, STOP, 2, UNREAD)], "one reward"),
        ([(0, 0.0, STOP, 1, {}), (0, 0.0, STOP, 2, {})], "one reward"),
        ([(0, 1.0, STOP, 1, READ), (0, 1.0, STOP, 2, READ), (1, -1.0, STOP, 1, READ), (1, -1.0, STOP, 2, READ)],
         "groups"),
    ],
)  # fmt: skip
def test_why_no_group_teaches(responses: list[tuple[int, float, FinishReason, int, dict]], cause: str | None) -> None:
    ids, nothing = np.array([1]), np.zeros(1)
    rows = [
        Trajectory(
            ids, np.array([token]), nothing == 0, nothing, nothing, nothing, group, index, finish_reason,
            reward=reward, reward_info=info,
        )
        for index, (group, reward, finish_reason, token, info) in enumerate(responses)
    ]  # fmt: skip
    found = no_signal_cause(rows)
    assert (None if found is None else found[0]) == cause
    console = Console(record=True, width=300)
    said = NoSignal(console)
    for step in (1, 2):
        said.record(step, rows)
    assert console.export_text().count("no group has different rewards") == (cause is not None)


def test_failed_rewards_are_said_on_the_console() -> None:
    def rows(*infos: dict[str, Any]) -> list[Trajectory]:
        ids, nothing = np.array([1]), np.zeros(1)
        return [
            Trajectory(ids, ids, nothing == 0, nothing, nothing, nothing, 0, index, FinishReason.STOP, reward_info=info)
            for index, info in enumerate(infos)
        ]

    console = Console(record=True, width=200)
    failures = RewardFailures(console)
    failed = {"failure": "exception", "failure_message": "score raised KeyError at line 3: 'level'"}
    failures.record(1, rows({}, failed, failed, {"agent": {"outcome": "bad_result", "message": "no number"}}))
    failures.record(2, rows({}, {}))
    failures.record(3, rows(failed, *[{}] * 30))
    failures.record(4, rows(failed, *[{}] * 3))
    said = console.export_text().splitlines()
    assert [line.split(":")[0] for line in said] == ["step 1", "step 4"]
    assert "3 of 4 rewards failed (2 exception, 1 bad_result)" in said[0] and "KeyError at line 3" in said[0]


def test_zero_never_ends_the_run() -> None:
    skipped = SkippedSteps(0)
    for step in range(1, 100):
        skipped.record(step, SkipReason.MISMATCH)
        skipped.check(step)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], None),
        ([{"actor/grad_norm": 1.0}, {"actor/grad_norm": float("nan"), "actor/nonfinite_grad": 1.0}], None),
        ([{"actor/grad_norm": float("inf"), "actor/nonfinite_grad": 1.0}] * 2, SkipReason.NONFINITE),
        ([{"actor/grad_norm": float("inf"), "actor/nonfinite_grad": 1.0}, {"critic/grad_norm": 1.0}],
         SkipReason.NONFINITE),
        ([{"critic/grad_norm": 1.0}], None),
        ([{"actor/grad_norm": 9.0, "actor/skipped_by_grad_norm": 1.0},
          {"actor/grad_norm": 1.0, "actor/skipped_by_grad_norm": 0.0}], None),
        ([{"actor/grad_norm": 9.0, "actor/skipped_by_grad_norm": 1.0}] * 2, SkipReason.LARGE_GRADIENT),
        ([{"actor/grad_norm": 1.0}, {"critic/grad_norm": 9.0, "critic/skipped_by_grad_norm": 1.0}],
         SkipReason.LARGE_GRADIENT),
        ([{"actor/grad_norm": 9.0, "actor/skipped_by_grad_norm": 1.0},
          {"actor/grad_norm": float("inf"), "actor/nonfinite_grad": 1.0}], SkipReason.NONFINITE),
    ],
    ids=["no_update", "one_of_two", "all", "critic_learns_on", "warm_up_of_the_critic", "one_of_two_large",
         "all_large", "large_for_the_critic", "large_and_nonfinite"],
)  # fmt: skip
def test_only_steps_without_any_applied_update_count(rows: list[dict[str, float]], expected: SkipReason | None) -> None:
    assert skipped_updates(rows) is expected


def trajectory(index: int) -> Trajectory:
    return Trajectory(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([3, 4, 5], np.int32),
        loss_mask=np.ones(3, bool),
        rollout_log_probs=np.full(3, -1.0, np.float32),
        turn_ids=np.zeros(3, np.int16),
        weight_versions=np.zeros(3, np.int32),
        group_id=0,
        index=index,
        finish_reason=FinishReason.STOP,
        reward=float(index),
    )


class FakeLearner:
    """Finds every token less likely than the engine did, by ``gap`` nats."""

    def __init__(self, gap: float, grad_norm: float) -> None:
        self.gap, self.grad_norm, self.updates = gap, grad_norm, 0

    async def log_probs(self, batch: Any, **_: Any) -> dict[str, Any]:
        log_probs = batch.rollout_log_probs - np.float32(self.gap)
        return {"log_probs": log_probs, "entropy": np.zeros_like(log_probs), "metrics": {}}

    async def update_fused(self, batch: Any, **options: Any) -> dict[str, Any]:
        found = await self.log_probs(batch)
        rejected = self.gap > 10 and not options["step_without_loss"]
        return found if rejected else {**found, "metrics": await self.update(batch)}

    async def update(self, batch: Any, **_: Any) -> dict[str, float]:
        self.updates += 1
        metrics = {"actor/grad_norm": self.grad_norm}
        return metrics if np.isfinite(self.grad_norm) else metrics | {"actor/nonfinite_grad": 1.0}


@pytest.mark.parametrize("fuse", ["auto", "never"])
@pytest.mark.parametrize(
    ("overrides", "gap", "grad_norm", "updates", "reason"),
    [
        ([], 0.0, 1.0, 1, None),
        ([], 0.0, float("nan"), 1, SkipReason.NONFINITE),
        ([], 20.0, 1.0, 0, SkipReason.REJECTED),
        (["algorithm.rollout_correction.batch_k3_limit=0.1"], 1.0, 1.0, 0, SkipReason.MISMATCH),
    ],
    ids=["learns", "nonfinite", "rejected", "mismatch"],
)
def test_each_reason_is_recognised(
    overrides: list[str], gap: float, grad_norm: float, updates: int, reason: SkipReason | None, fuse: str
) -> None:
    sizes = ["data.train_batch_size=1", "rollout.train.n=2", "learner.mini_batch_size=2"]
    config = load_config(None, [*sizes, f"learner.fuse_old_log_probs={fuse}", *overrides])
    learner = FakeLearner(gap, grad_norm)
    run: Any = SimpleNamespace(config=config, learner=learner, critic=None, gpu_phases=GpuPhases(False, list, list))
    state = TrainerState.first(config)
    state.step = 1
    learned = asyncio.run(learn(run, state, [trajectory(0), trajectory(1)], StepTimer()))
    assert (learned.skipped, learner.updates) == (reason, updates)
    fused = fuse == "auto" and reason is not SkipReason.MISMATCH
    assert learned.metrics["actor/fused_old_log_probs"] == float(fused)


def test_a_step_without_a_signal_asks_nothing_of_the_learner(tmp_path: Any) -> None:
    config = load_config()
    state = TrainerState.first(config)
    learned = asyncio.run(learn(SimpleNamespace(config=config), state, [], StepTimer()))
    assert learned.skipped is SkipReason.NO_SIGNAL and learned.metrics == {} == batch_metrics(learned.batch, 1, 1)
    write_estimates(learned.batch, tmp_path / "step.parquet")
    assert read_estimates(tmp_path / "step.parquet") == {}


def test_no_informative_group_keeps_nothing_and_does_not_end_the_run() -> None:
    sizes = ["data.train_batch_size=1", "rollout.train.n=2", "learner.mini_batch_size=2"]
    config = load_config(None, [*sizes, "algorithm.dynamic_sampling.max_generation_batches=2"])
    started: list[int] = []

    async def stream(prompts: Any, *_: Any, **__: Any) -> Any:
        waiting = list(prompts)
        while waiting:
            prompt = waiting.pop(0)
            group = [trajectory(index) for index in range(2)]
            for member in group:
                member.group_id, member.reward = prompt.group_id, 1.0
            changes = yield group
            if changes is not None:
                assert not changes.abort
                waiting += changes.prompts

    def next_batch(count: int) -> list[Any]:
        started.append(count)
        return [SimpleNamespace(group_id=sum(started), uid="u")] if count else []

    run: Any = SimpleNamespace(
        config=config,
        console=Console(quiet=True),
        watchdog=SimpleNamespace(progress=lambda phase: None),
        rollout=SimpleNamespace(
            stream=stream,
            statistics=RolloutStatistics(),
            engines=SimpleNamespace(serving=["an engine"]),
            paused_group_ids=[],
            finish_step=list,
        ),
        rewards=SimpleNamespace(score=lambda group: None, take_metrics=dict),
        tools=SimpleNamespace(take_metrics=dict),
        prompts=SimpleNamespace(
            next_batch=next_batch,
            give_back=lambda group_ids: started.append(-len(group_ids)),
            state_dict=lambda unfinished: {"drawn": sum(started)},
        ),
    )
    collected = asyncio.run(collect_groups(run, TrainerState.first(config), 1))
    assert collected.kept == [] and len(collected.generated) == 4 and max(started) == 1
    assert collected.prompt_state == {"drawn": 2}
    assert collected.metrics["dynamic_sampling/all_correct"] == 2
    assert not any(t.reward_info["trained"] for t in collected.generated)
