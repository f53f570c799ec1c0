"""Predicted seconds of a step, phase by phase.

    step = generation + log-probs (+ reference) + update (+ critic) + weight sync + phase switch

Generation is one run of the discrete-event simulation with the expected lengths (``simulate``).  The learner's phases
are

    passes x forward FLOPs / (GPUs x peak x efficiency)  +  exposed communication  +  pipeline bubble  +  imbalance

with 1 pass for log-probs and 3 (+ the recomputed share) for an update; FLOPs count causal attention and the response
tokens' logits (``conversion.model.flops``).  Where an asynchronous run overlaps generation and training, the longer one
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from conversion.model.architecture import Architecture
from conversion.model.flops import forward_flops
from conversion.model.layout import ParallelLayout
from megatron_retool.config import (
    Config,
    LearnerConfig,
    PartialRolloutConfig,
    RolloutConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from megatron_retool.config.old_log_probs import OldLogProbs, expected_updates, old_log_probs_source
from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.hardware import Machines
from megatron_retool.planning.learner_time import Assumptions, LearnerTime, learner_time, training_seconds
from megatron_retool.planning.memory import (
    adapters_of,
    checkpoint_bytes,
    frozen_architectures,
    learner_memory,
    weight_sync_bytes,
)
from megatron_retool.planning.simulate import RolloutSimulation, StepResult, mean_result
from megatron_retool.planning.workload import Workload
from megatron_retool.registry import Need
from run_files.phases import Phase

PARTIAL_STEPS = (2, 8)
"""Steps over which partial rollout is averaged, after as many that are not counted: fewest and most."""
PARTIAL_RESPONSES = 4096
"""Responses in them, between these bounds."""


@dataclass(frozen=True)
class StepTime:
    """Seconds by phase, under the names of the timing_s metrics."""

    generation: StepResult
    log_probs: LearnerTime
    reference: LearnerTime | None
    update: LearnerTime
    critic: float
    weight_sync: float
    phase_switch: float
    overlapped: bool
    trained_tokens: float
    stale_share: float
    """Of the trained response tokens, those that older weights sampled (partial rollout)."""
    gpus: int
    mfu: float
    """Of the update, by the model's FLOPs (recomputation does not count)."""

    @property
    def training(self) -> float:
        """Seconds of the learner's passes: log-probs, reference, update and critic."""
        return training_seconds(self.log_probs, self.reference, self.update, self.critic)

    @property
    def total(self) -> float:
        """Seconds from step to step."""
        generation = self.generation.seconds
        working = max(generation, self.training) if self.overlapped else generation + self.training
        return working + self.weight_sync + self.phase_switch

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """perf/throughput."""
        return self.trained_tokens / self.total / self.gpus

    def phases(self) -> dict[Phase, float]:
        """Seconds by phase, as a run's ``StepTimer`` counts them; they add up to ``total`` where nothing overlaps.

        Of the switch between learner and engines, a run times the way back from host memory as a phase of its own, and
        the way there with the weight sync.
        """
        phases = {Phase.GENERATION: self.generation.seconds, Phase.OLD_LOG_PROB: self.log_probs.total}
        if self.reference:
            phases[Phase.REFERENCE] = self.reference.total
        phases[Phase.UPDATE_ACTOR] = self.update.total
        if self.critic:
            phases[Phase.UPDATE_CRITIC] = self.critic
        phases[Phase.WEIGHT_SYNC] = self.weight_sync + self.phase_switch / 2
        if self.phase_switch:
            phases[Phase.PHASE_SWITCH] = self.phase_switch / 2
        return phases


def weight_sync_seconds(
    learner: LearnerConfig,
    weight_sync: WeightSyncConfig,
    rollout: RolloutConfig,
    architecture: Architecture,
    machines: Machines,
    assumptions: Assumptions,
) -> float:
    """From the learner's shards to every engine, in Hugging Face layout.

    The export assembles bucket by bucket where all other shards arrive (nothing arrives where one rank has everything):
    on rank 0, or with "tensor" beside every engine at once, from the same node where that holds a whole model.  Then
    "tensor" hands buckets over on the device, "distributed" broadcasts them, "disk" writes the model once and every
    engine reads it.  "sharded" assembles nothing: each rank that holds a part of its own broadcasts it to one engine
    after another, and an engine takes the parts of all of them.  An adapter without the weights is one bucket, which
    "distributed" sends to one engine after another, in base64.
    """
    size = weight_sync_bytes(architecture, learner)
    alone = learner.lora.sends_adapter
    buckets = 1 if alone else math.ceil(size / weight_sync.bucket_bytes)
    method = weight_sync.method
    stage_ranks = learner.tensor_model_parallel_size * learner.expert_model_parallel_size
    model_ranks = stage_ranks * learner.pipeline_model_parallel_size
    # Pipeline stages are the outermost of the ranks' order: with several nodes they are on different ones.
    on_one_node = learner.pipeline_model_parallel_size == 1 and stage_ranks <= machines.per_node
    reach = stage_ranks if method == "tensor" and on_one_node else learner.world_size
    if method == "sharded":
        link = machines.bandwidth_between(machines.count) * assumptions.link_efficiency
        messages = model_ranks * math.ceil(size / model_ranks / weight_sync.bucket_bytes)
        return size * max(1.0, rollout.engine.count / model_ranks) / link + messages * assumptions.bucket_seconds
    gather = size * (1 - 1 / model_ranks) / (machines.bandwidth_between(reach) * assumptions.link_efficiency)
    if method == "disk":
        reads = rollout.engine.count / machines.nodes
        return gather + size * (1 + reads) / assumptions.storage_bandwidth
    reach = machines.count if method == "distributed" else min(machines.count, machines.per_node)
    copies = rollout.engine.count * 4 / 3 if alone and method == "distributed" else 1
    send = copies * size / (machines.bandwidth_between(reach) * assumptions.link_efficiency)
    return gather + send + buckets * assumptions.bucket_seconds


def phase_switch_seconds(
    config: Config, architecture: Architecture, layout: ParallelLayout, machines: Machines
) -> float:
    """Colocated: the learner's states to host memory before the rollout and back after it."""
    if config.cluster.placement != "colocated" or machines.accelerator.is_cpu:
        return 0.0
    memory = learner_memory(config.learner, config.algorithm, config.model, architecture, layout)
    return 2 * memory.sleeping / machines.accelerator.host_bandwidth


def predict_step(
    config: Config,
    architecture: Architecture,
    layout: ParallelLayout,
    machines: Machines,
    workload: Workload,
    assumptions: Assumptions | None = None,
    engine: EngineModel | None = None,
    generation: StepResult | None = None,
) -> StepTime:
    """Seconds of a step with ``config`` on ``machines``.

    Args:
        engine: instead of the one that ``config`` describes.
        generation: a result of ``predict_generation``, to save running it again for another learner layout.
    """
    assumptions = assumptions or Assumptions()
    learner = config.learner
    arguments = (architecture, learner, layout, machines, workload, assumptions)
    log_probs = learner_time(*arguments, training=False).scaled(share_of_log_probs(config))
    update = learner_time(*arguments, training=True)
    algorithm = config.algorithm
    # Of several teachers each reads the rows of its data sources: all of them are as slow as the slowest at most.
    frozen = [
        learner_time(each, *arguments[1:], training=False)
        for each in frozen_architectures(config.algorithm, config.learner, config.model, architecture)
    ]
    reference = max(frozen, key=lambda time: time.total, default=None)
    # The critic reads values once and learns from them with the same passes.
    critic = update.total + log_probs.total if Need.CRITIC in algorithm.needs else 0.0
    if generation is None:
        engine = engine or EngineModel.from_config(
            config.rollout.engine, architecture, machines, config.rollout.max_concurrent_trajectories
        )
        training = training_seconds(log_probs, reference, update, critic)
        generation = predict_generation(
            engine, config.rollout.engine.count, workload, config.rollout.partial, age_bound(config.trainer), training
        )
    passes = 3 if adapters_of(learner) is None else 2  # of frozen weights no gradient is computed
    model_flops = passes * forward_flops(
        architecture, workload.total_lengths(workload.responses), round(workload.responses * workload.lengths.mean)
    )
    colocated = config.cluster.placement == "colocated" or machines.accelerator.is_cpu
    return StepTime(
        generation=generation,
        log_probs=log_probs,
        reference=reference,
        update=update,
        critic=critic,
        weight_sync=weight_sync_seconds(
            config.learner, config.weight_sync, config.rollout, architecture, machines, assumptions
        ),
        phase_switch=phase_switch_seconds(config, architecture, layout, machines),
        overlapped=(config.rollout.staleness > 0 or config.trainer.mode == "async") and not colocated,
        trained_tokens=workload.trained_tokens,
        # A generation may be one of fewer responses (``Planner.generation``).
        stale_share=generation.stale_tokens
        * (1 + workload.prompt_tokens / generation.mean_length)
        / generation.trained_tokens,
        gpus=machines.count,
        mfu=model_flops / (layout.world_size * machines.accelerator.flops * update.total),
    )


def share_of_log_probs(config: Config) -> float:
    """The part of a step's mini-batches whose old log-probs take a pass: learner.fuse_old_log_probs."""
    updates = expected_updates(config.learner, config.data, config.rollout)
    source = old_log_probs_source(config.learner, config.algorithm, updates).source
    if source is OldLogProbs.FIRST_UPDATE:
        return (updates - 1) / updates
    return 1.0 if source is OldLogProbs.PASS else 0.0


def age_bound(trainer: TrainerConfig) -> int | None:
    """trainer.max_age of asynchronous training; None where a step waits for its groups."""
    return None if trainer.mode == "sync" else trainer.max_age


def predict_generation(
    engine: EngineModel,
    engines: int,
    workload: Workload,
    partial: PartialRolloutConfig | None = None,
    max_age: int | None = None,
    learner_seconds: float = 0.0,
) -> StepResult:
    """One step's rollout with the expected lengths.

    Every response is waited for. With ``partial`` rollout it is the mean over several steps, after some that fill the
    queue of paused trajectories; with ``max_age`` (``age_bound``) that of asynchronous steps, from one to the next,
    whose learner takes ``learner_seconds`` (0: what the engines alone allow).
    """
    if max_age is None and (partial is None or not partial.enable):
        # The constants were fitted to groups that are no more alike than others.
        workload = replace(workload, lengths=replace(workload.lengths, correlation=0.0))
        return RolloutSimulation(engine, engines, workload, seed=0, expected=True).collect(workload.groups)
    simulation = RolloutSimulation(engine, engines, workload, seed=0, expected=True)
    fewest, most = PARTIAL_STEPS
    counted = min(most, max(fewest, PARTIAL_RESPONSES // workload.responses))
    if max_age is not None:
        return mean_result(simulation.take_steps(workload.groups, max_age, learner_seconds, 2 * counted)[counted:])
    assert partial is not None
    factor = partial.over_sampling_factor
    steps = [simulation.collect(workload.groups, "pause", partial.max_age, factor) for _ in range(2 * counted)]
    return mean_result(steps[counted:])


@dataclass(frozen=True)
class RunTime:
    """A whole run: ``steps`` steps, the validations and checkpoints (whole, and of only the weights) between them."""

    steps: int
    step_seconds: float
    validations: int
    validation_seconds: float
    checkpoints: int
    checkpoint_seconds: float
    quick_validations: int = 0
    quick_validation_seconds: float = 0.0
    weights_checkpoints: int = 0
    weights_checkpoint_seconds: float = 0.0

    @property
    def hours(self) -> float:
        """Hours of the run: steps, validations and checkpoints."""
        seconds = self.steps * self.step_seconds + self.validations * self.validation_seconds
        seconds += self.quick_validations * self.quick_validation_seconds
        seconds += self.checkpoints * self.checkpoint_seconds
        return (seconds + self.weights_checkpoints * self.weights_checkpoint_seconds) / 3600


def predict_run(
    config: Config,
    architecture: Architecture,
    machines: Machines,
    workload: Workload,
    step_seconds: float,
    steps: int,
    validation_prompts: int = 0,
    assumptions: Assumptions | None = None,
    engine: EngineModel | None = None,
) -> RunTime:
    """Hours of ``steps`` steps with config's test_freq, quick_test_freq, save_freq and save_weights_freq.

    Validation generates rollout.val.n responses to each of ``validation_prompts`` prompts, a quick one
    rollout.quick_val.n to each of data.quick_val_samples of them; a checkpoint writes ``checkpoint_bytes`` over all
    nodes' storage bandwidth.
    """
    assumptions = assumptions or Assumptions()
    trainer = config.trainer
    validations = quick = checkpoints = 0
    validation_seconds = quick_seconds = 0.0
    if validation_prompts:
        validations = int(trainer.val_before_train) + (steps // trainer.test_freq if trainer.test_freq else 1)
        engine = engine or EngineModel.from_config(
            config.rollout.engine, architecture, machines, config.rollout.max_concurrent_trajectories
        )
        problems = replace(workload, groups=validation_prompts, group_size=config.rollout.val.n, kept_groups=1.0)
        validation_seconds = predict_generation(engine, config.rollout.engine.count, problems).seconds
        if trainer.quick_test_freq:
            both = math.lcm(trainer.quick_test_freq, trainer.test_freq)
            quick = steps // trainer.quick_test_freq - (steps // both if both else 0)
            few = min(config.data.quick_val_samples, validation_prompts)
            problems = replace(problems, groups=few, group_size=config.rollout.quick_val.n)
            quick_seconds = predict_generation(engine, config.rollout.engine.count, problems).seconds
    checkpoints = steps // trainer.save_freq if trainer.save_freq else 1
    storage = assumptions.storage_bandwidth * machines.nodes
    dtype = config.learner.dtype
    return RunTime(
        steps=steps,
        step_seconds=step_seconds,
        validations=validations,
        validation_seconds=validation_seconds,
        checkpoints=checkpoints,
        checkpoint_seconds=checkpoint_bytes(
            architecture, dtype, optimizer=config.learner.optimizer.name, adapters=adapters_of(config.learner)
        )
        / storage,
        quick_validations=quick,
        quick_validation_seconds=quick_seconds,
        weights_checkpoints=steps // trainer.save_weights_freq if trainer.save_weights_freq else 0,
        weights_checkpoint_seconds=checkpoint_bytes(
            architecture, dtype, with_optimizer=False, adapters=adapters_of(config.learner)
        )
        / storage,
    )
