"""The discrete-event simulation against a token-by-token one, and conservation laws."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.hardware import ACCELERATORS
from megatron_retool.planning.models import preset
from megatron_retool.planning.simulate import RolloutSimulation, StepResult, mean_result
from megatron_retool.planning.strategies import Scenario
from megatron_retool.planning.workload import LengthDistribution, ToolLatency, Workload
from tests.planning import published_run

LENGTHS = LengthDistribution.fit(2707, 0.0085, 16384)
ENGINE = EngineModel(preset("qwen2.5-32b"), ACCELERATORS["H200"], 4, memory_fraction=0.85, max_running=256)
WORKLOAD = Workload(groups=32, group_size=16, mini_batch_size=64, prompt_tokens=332, lengths=LENGTHS)


def one_step(workload: Workload, engines: int = 2, model: EngineModel = ENGINE, seed: int = 0) -> StepResult:
    simulation = RolloutSimulation(model, engines, workload, seed)
    simulation.start_groups(workload.groups)
    return simulation.collect(workload.groups)


def test_closed_formulas_agree_with_decoding_token_by_token() -> None:
    """One engine, no tools: every step in a plain loop, finished sequences replaced by waiting ones."""
    model = replace(ENGINE, max_running=12)
    workload = replace(WORKLOAD, groups=40, group_size=1, tool_calls=0.0)
    simulation = RolloutSimulation(model, 1, workload, seed=3)
    simulation.start_groups(workload.groups)
    waiting = [trajectory.length for trajectory in simulation._queue]
    found = simulation.collect(workload.groups)

    seconds, active = 0.0, []
    while waiting or active:
        while waiting and len(active) < 12:
            seconds += model.prefill_seconds(332)
            active.append([waiting.pop(0), 332.0])
        seconds += model.step_seconds(len(active), sum(context for _, context in active))
        active = [[left - 1, context + 1] for left, context in active if left > 1]
    assert found.seconds == pytest.approx(seconds, rel=2e-3)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    assert one_step(WORKLOAD) == one_step(WORKLOAD)
    assert one_step(WORKLOAD).seconds != one_step(WORKLOAD, seed=1).seconds


def test_every_token_is_sampled_once_whatever_happens_to_the_unfinished() -> None:
    def run(unfinished: str, over_sampling: float) -> tuple[list[StepResult], RolloutSimulation]:
        simulation = RolloutSimulation(ENGINE, 2, WORKLOAD, seed=5)
        results = []
        for _ in range(4):
            results.append(simulation.collect(WORKLOAD.groups, unfinished, 99, over_sampling))
        return results, simulation

    for unfinished, over_sampling in (("wait", 1.0), ("drop", 1.25), ("pause", 1.25), ("stream", 1.25)):
        results, simulation = run(unfinished, over_sampling)
        sampled = sum(result.sampled_tokens for result in results)
        # Tool results are not sampled: at most 100 tokens for each call.
        trained = sum(result.trained_tokens - WORKLOAD.responses * WORKLOAD.prompt_tokens for result in results)
        dropped = sum(result.dropped_tokens for result in results)
        in_flight = sum(
            member.sampled + member.progress()
            for group in (*simulation._open.values(), *simulation._complete)
            for member in group.members
        )
        tool_tokens = trained + dropped + in_flight - sampled
        responses = 4 * WORKLOAD.responses
        assert 0.5 * 2.9 * 100 * responses < tool_tokens < 1.1 * 2.9 * 100 * responses
        assert (dropped > 0) == (unfinished == "drop")
        assert (results[-1].paused > 0) == (unfinished == "pause")


def test_engine_bookkeeping_returns_to_zero() -> None:
    simulation = RolloutSimulation(ENGINE, 3, WORKLOAD, seed=2)
    simulation.start_groups(WORKLOAD.groups)
    simulation.collect(WORKLOAD.groups)
    assert not simulation._open and not simulation._complete
    for engine in simulation._engines:
        assert (engine.batch, engine.context, engine.heap) == (0, 0.0, [])
        assert engine.free_slots == engine.slots
    assert simulation._workers == WORKLOAD.sandbox_workers


def test_one_long_response_holds_the_step() -> None:
    """With an engine for every response nothing but the longest one counts."""
    result = one_step(replace(WORKLOAD, tool_calls=0.0), engines=512, seed=3)
    scenario = Scenario(2048, ENGINE, 512, 2048, WORKLOAD, 1e-4, 0.0)
    assert result.clip_ratio > 0
    assert result.seconds == pytest.approx(scenario.longest_alone_seconds, rel=0.02)
    assert result.tail_seconds > 0.5 * result.seconds
    assert result.idle > 0.5


def test_more_engines_help_until_the_tail_is_all_that_is_left() -> None:
    seconds = [one_step(WORKLOAD, engines).seconds for engines in (1, 2, 8, 64)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[1] > 1.3
    assert seconds[2] / seconds[3] < 1.3


def test_few_sandbox_workers_make_calls_wait() -> None:
    slow = ToolLatency(0.6, 1.0, 30.0)
    few = one_step(replace(WORKLOAD, sandbox_workers=4, tool_latency=slow))
    many = one_step(replace(WORKLOAD, sandbox_workers=512, tool_latency=slow))
    assert many.tool_wait_seconds == 0
    assert few.tool_wait_seconds > 1
    # 4 workers need this long for all calls, whatever the engines do.
    assert few.seconds > 512 * 2.5 * 1.0 / 4


def test_lost_prefixes_are_read_again() -> None:
    """The published run's stack: 4096 trajectories an engine, memory for 600."""
    step = published_run.STEPS[1]
    forgetful = published_run.predicted_generation(step)
    remembers = published_run.predicted_generation(step, replace(published_run.STACK, keeps_prefix=True))
    assert forgetful.seconds > 1.1 * remembers.seconds
    assert forgetful.sampled_tokens == pytest.approx(remembers.sampled_tokens)


def test_dynamic_sampling_generates_what_it_discards() -> None:
    """Half of the groups are of no use: twice the work, and in rounds a tail for each."""
    workload = replace(WORKLOAD, kept_groups=0.5)
    continuous, rounds = (
        mean_result([RolloutSimulation(ENGINE, 2, workload, seed).collect(32, unfinished) for seed in range(4)])
        for unfinished in ("wait", "rounds")
    )
    plain = one_step(WORKLOAD)
    for result in (continuous, rounds):
        assert result.sampled_tokens > 1.5 * plain.sampled_tokens
        assert result.trained_tokens == pytest.approx(plain.trained_tokens, rel=0.25)
    assert plain.seconds < continuous.seconds < rounds.seconds
    assert continuous.dropped_tokens > 0 == rounds.dropped_tokens


def test_a_refilled_batch_is_as_long_as_what_the_policy_gives() -> None:
    """Who is complete first is short; order alone prefers nobody."""
    workload = replace(WORKLOAD, kept_groups=0.5, groups=16, tool_calls=0.0)

    def mean_length(unfinished: str) -> float:
        steps = [RolloutSimulation(ENGINE, 2, workload, seed).collect(16, unfinished, 1, 1.5) for seed in range(12)]
        return mean_result(steps).mean_length

    # Of 192 groups, whose responses are alike: the mean scatters by about 6 %.
    assert mean_length("wait") == pytest.approx(2707, rel=0.15)
    assert mean_length("drop") < 0.65 * 2707


def test_thousands_of_responses_take_seconds() -> None:
    workload = replace(WORKLOAD, groups=512)
    started = time.process_time()
    result = one_step(workload, engines=1024)
    assert time.process_time() - started < 10
    assert np.isfinite(result.seconds)
    assert result.trained_tokens == pytest.approx(workload.trained_tokens, rel=0.1)
