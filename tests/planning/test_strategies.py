"""What the strategies against the long tail are for, and what each of them costs."""

from __future__ import annotations

import pytest

from megatron_retool.planning.strategies import Scenario, Strategy, StrategyOutcome, run_strategy, standard_strategies
from tests.planning.test_simulate import ENGINE, WORKLOAD

SCENARIO = Scenario(
    gpus=128, model=ENGINE, engines=32, learner_gpus=128, workload=WORKLOAD.scaled(2),
    train_seconds_per_token=10e-6, sync_seconds=8.0, switch_seconds=4.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, StrategyOutcome]:
    return {strategy.name: run_strategy(SCENARIO, strategy) for strategy in standard_strategies()}


def test_partial_rollout_shortens_the_step_without_losing_the_long_responses(
    outcomes: dict[str, StrategyOutcome],
) -> None:
    wait, drop, pause = (outcomes[name] for name in ("wait for all", "over-sample, drop the rest", "partial rollout"))
    assert pause.step_seconds < 0.8 * wait.step_seconds
    assert pause.mean_length > 0.93 * wait.mean_length
    assert pause.clip_ratio > 0 and pause.dropped_share == 0
    assert 0.1 < pause.stale_share < 0.7
    # Dropping is as fast, and trains on another distribution.
    assert drop.generation_seconds < 0.8 * wait.generation_seconds
    assert drop.mean_length < 0.8 * wait.mean_length
    assert drop.clip_ratio < 0.2 * wait.clip_ratio
    assert drop.dropped_share > 0.2


def test_twice_the_engines_cost_more_than_they_bring_and_asynchrony_hides_the_tail(
    outcomes: dict[str, StrategyOutcome],
) -> None:
    wait, engines, off, stream = (
        outcomes[name]
        for name in ("wait for all", "twice the engines", "asynchronous, 1 step off", "asynchronous, partial")
    )
    assert engines.gpus == 256
    assert engines.tokens_per_second_per_gpu < wait.tokens_per_second_per_gpu
    assert (off.gpus, off.stale_share) == (128, 1.0)
    assert stream.step_seconds < off.step_seconds < wait.step_seconds
    assert stream.step_seconds >= max(stream.generation_seconds, stream.train_seconds)


def test_a_group_that_is_too_old_is_dropped() -> None:
    patient = run_strategy(SCENARIO, Strategy("p", "pause", 1.5, max_age=5), steps=4)
    strict = run_strategy(SCENARIO, Strategy("s", "pause", 1.5, max_age=0), steps=4)
    assert patient.dropped_share == 0
    assert strict.dropped_share > 0
    assert strict.stale_share == 0
