"""The strategies against the long tail on clusters of several sizes, from one configuration."""

from __future__ import annotations

import math
from dataclasses import replace

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.config import Config
from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.hardware import Machines
from megatron_retool.planning.learner_time import Assumptions, learner_time
from megatron_retool.planning.strategies import Scenario, Strategy, StrategyOutcome, run_strategy, standard_strategies
from megatron_retool.planning.timing import phase_switch_seconds, share_of_log_probs, weight_sync_seconds
from megatron_retool.planning.workload import Workload

SIZES = (8, 64, 512, 4096)
MAX_RESPONSES = 4096
"""The batch grows with the cluster up to here: larger batches of responses slow learning down, whatever they cost."""
SIMULATED_RESPONSES = 16384
"""Responses over which ``compare`` averages, in 4 to 32 steps."""


def scenario_of(
    config: Config,
    architecture: Architecture,
    layout: ParallelLayout,
    machines: Machines,
    workload: Workload,
    gpus: int,
    max_responses: int = MAX_RESPONSES,
    assumptions: Assumptions | None = None,
) -> Scenario:
    """``config`` on ``gpus`` GPUs of the kind of ``machines``.

    TP, PP, CP and EP stay, data parallelism and the number of engines take up the rest; the split between learner and
    engines of a disaggregated configuration stays.  The batch and its mini-batches grow with the GPUs up to
    ``max_responses`` (or the configuration's own batch, if that is more).
    """
    assumptions = assumptions or Assumptions()
    rollout = config.rollout
    engine = EngineModel.from_config(rollout.engine, architecture, machines, rollout.max_concurrent_trajectories)
    engine_gpus = rollout.engine.count * engine.tensor_parallel
    own_gpus = max(engine_gpus, layout.world_size)
    engine_share = engine_gpus / own_gpus
    learner_share = layout.world_size / own_gpus
    if config.cluster.placement != "colocated" and not machines.accelerator.is_cpu:
        own_gpus = engine_gpus + layout.world_size
        engine_share, learner_share = engine_gpus / own_gpus, layout.world_size / own_gpus
    engines = max(1, round(gpus * engine_share / engine.tensor_parallel))
    learner_gpus = max(1, round(gpus * learner_share))

    most = max(max_responses, workload.responses) / workload.responses
    work = workload.scaled(min(most, max(1.0, gpus / own_gpus)))
    model_ranks = layout.tensor * layout.pipeline * layout.context
    data = max(1, learner_gpus // model_ranks)
    # Every node brings its sandbox.
    sandboxes = -(-gpus // machines.per_node) / max(1, -(-own_gpus // machines.per_node))
    work = replace(work, sandbox_workers=max(1, round(work.sandbox_workers * max(1.0, sandboxes))))
    there = replace(machines, count=gpus, per_node=min(machines.per_node, gpus))
    wide = replace(layout, world_size=data * model_ranks, data=data)
    arguments = (architecture, config.learner, wide, there, work, assumptions)
    log_probs = share_of_log_probs(config) * learner_time(*arguments, training=False).total
    seconds = log_probs + learner_time(*arguments, training=True).total
    # Fewer GPUs than one copy of the model takes: the same work on fewer of them.
    seconds *= wide.world_size / learner_gpus if learner_gpus < model_ranks else 1.0
    return Scenario(
        gpus=gpus,
        model=engine,
        engines=engines,
        learner_gpus=learner_gpus,
        workload=work,
        train_seconds_per_token=seconds / work.trained_tokens,
        sync_seconds=weight_sync_seconds(
            config.learner, config.weight_sync, config.rollout, architecture, there, assumptions
        ),
        switch_seconds=phase_switch_seconds(config, architecture, layout, there),
    )


def compare(scenario: Scenario, strategies: tuple[Strategy, ...] | None = None, seed: int = 0) -> list[StrategyOutcome]:
    """Every strategy on the same scenario; small batches for more steps, since their tails differ from step to step."""
    steps = min(32, max(4, math.ceil(SIMULATED_RESPONSES / scenario.workload.responses)))
    return [run_strategy(scenario, strategy, steps, seed=seed) for strategy in strategies or standard_strategies()]
