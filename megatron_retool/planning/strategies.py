"""Answers to the long tail, each simulated on a cluster that generates and trains: seconds of a step, and who waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.simulate import RolloutSimulation, mean_result
from megatron_retool.planning.workload import Workload


@dataclass(frozen=True)
class Strategy:
    """One answer to the long tail.

    Attributes:
        unfinished: see ``simulate``.
        over_sampling: groups in flight for each group that a step needs.
        max_age: steps that a paused group may wait.
        engine_factor: engines (and their GPUs) for each one of the scenario.
        asynchronous: learner and engines divide the GPUs and work at the same time; one step of staleness.
    """

    name: str
    unfinished: str = "wait"
    over_sampling: float = 1.0
    max_age: int = 1
    engine_factor: float = 1.0
    asynchronous: bool = False


def standard_strategies(over_sampling: float = 1.25, max_age: int = 2) -> tuple[Strategy, ...]:
    """What the table compares."""
    return (
        Strategy("wait for all"),
        Strategy("over-sample, drop the rest", "drop", over_sampling),
        Strategy("partial rollout", "pause", over_sampling, max_age),
        Strategy("twice the engines", engine_factor=2.0),
        Strategy("asynchronous, 1 step off", asynchronous=True),
        Strategy("asynchronous, partial", "stream", over_sampling, asynchronous=True),
    )


@dataclass(frozen=True)
class Scenario:
    """A cluster and what it has to do in a step.

    Attributes:
        gpus: of learner and engines together.
        engines: where the learner waits for the rollout; ``asynchronous`` strategies divide ``gpus`` again.
        learner_gpus: the same for the learner. Colocated: both are all of ``gpus``.
        train_seconds_per_token: learner time on ``learner_gpus`` for each trained token (log-probs and update).
        sync_seconds: weight sync of a step.
        switch_seconds: moving the learner's states out of the engines' way and back; asynchronous strategies need none.
    """

    gpus: int
    model: EngineModel
    engines: int
    learner_gpus: int
    workload: Workload
    train_seconds_per_token: float
    sync_seconds: float
    switch_seconds: float = 0.0

    @property
    def engine_gpus(self) -> int:
        """Of one engine."""
        return self.model.tensor_parallel

    @property
    def longest_alone_seconds(self) -> float:
        """A response at the length limit that nothing else slows down: no number of engines makes a step shorter."""
        limit = self.workload.lengths.limit
        return limit * self.model.step_seconds(1, self.workload.prompt_tokens + limit / 2)


@dataclass(frozen=True)
class StrategyOutcome:
    """Means over the simulated steps after warm-up; see ``StepResult``.

    Attributes:
        step_seconds: between two updates of the weights.
        tokens_per_second_per_gpu: trained tokens, by step_seconds and all GPUs (perf/throughput).
        stale_share: of the trained response tokens, those that older weights sampled.
        dropped_share: of the sampled tokens, those thrown away.
    """

    strategy: Strategy
    gpus: int
    generation_seconds: float
    tail_seconds: float
    train_seconds: float
    step_seconds: float
    tokens_per_second_per_gpu: float
    stale_share: float
    dropped_share: float
    mean_length: float
    clip_ratio: float
    mean_batch: float
    idle: float
    tool_wait_seconds: float


def run_strategy(
    scenario: Scenario, strategy: Strategy, steps: int = 3, warmup: int = 2, seed: int = 0
) -> StrategyOutcome:
    """Simulate ``warmup`` + ``steps`` steps (no warm-up where nothing is carried over).

    Asynchronous strategies divide the scenario's GPUs so that generating (without its tail, which overlaps the next
    step where the strategy lets it) and training take about the same time.
    """
    engines = max(1, round(scenario.engines * strategy.engine_factor))
    gpus = (
        scenario.gpus + (engines - scenario.engines) * scenario.engine_gpus
        if strategy.engine_factor != 1.0
        else (scenario.gpus)
    )
    train_per_token = scenario.train_seconds_per_token
    if strategy.asynchronous:
        engines, learner_gpus = _divide(scenario, seed)
        train_per_token *= scenario.learner_gpus / learner_gpus
    simulation = RolloutSimulation(scenario.model, engines, scenario.workload, seed)
    needed = scenario.workload.groups
    if strategy.unfinished in ("wait", "rounds", "drop"):
        warmup = 0
    results = []
    for _ in range(warmup + steps):
        results.append(simulation.collect(needed, strategy.unfinished, strategy.max_age, strategy.over_sampling))
    results = results[warmup:]
    train = [train_per_token * result.trained_tokens for result in results]
    generation = [result.seconds for result in results]
    if strategy.asynchronous:
        # Step k + 1 is generated while step k is trained on; the weights move when both are done.
        durations = [max(pair) + scenario.sync_seconds for pair in zip(generation, train, strict=True)]
        if strategy.unfinished == "stream":
            # Groups complete at their own pace, so that only the means have to match.
            durations = [max(float(np.mean(generation)), float(np.mean(train))) + scenario.sync_seconds]
    else:
        fixed = scenario.sync_seconds + scenario.switch_seconds
        durations = [sum(pair) + fixed for pair in zip(generation, train, strict=True)]
    mean = mean_result(results)
    step_seconds = float(np.mean(durations))
    return StrategyOutcome(
        strategy=strategy,
        gpus=gpus,
        generation_seconds=mean.seconds,
        tail_seconds=mean.tail_seconds,
        train_seconds=float(np.mean(train)),
        step_seconds=step_seconds,
        tokens_per_second_per_gpu=mean.trained_tokens / step_seconds / gpus,
        # One step off: every token is from the weights before.
        stale_share=1.0
        if strategy.asynchronous and strategy.unfinished == "wait"
        else mean.stale_tokens / (mean.mean_length * scenario.workload.responses),
        dropped_share=mean.dropped_tokens / mean.sampled_tokens,
        mean_length=mean.mean_length,
        clip_ratio=mean.clip_ratio,
        mean_batch=mean.mean_batch,
        idle=mean.idle,
        tool_wait_seconds=mean.tool_wait_seconds,
    )


def _divide(scenario: Scenario, seed: int) -> tuple[int, int]:
    """Engines and learner GPUs of an asynchronous run on the scenario's GPUs."""
    alone = RolloutSimulation(scenario.model, scenario.engines, scenario.workload, seed)
    result = alone.collect(scenario.workload.groups)
    generation = (result.seconds - result.tail_seconds) * scenario.engines * scenario.engine_gpus
    training = scenario.train_seconds_per_token * result.trained_tokens * scenario.learner_gpus
    share = generation / (generation + training)
    most = max(1, (scenario.gpus - 1) // scenario.engine_gpus)
    engines = min(most, max(1, round(share * scenario.gpus / scenario.engine_gpus)))
    return engines, max(1, scenario.gpus - engines * scenario.engine_gpus)
