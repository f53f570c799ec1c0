"""What a configuration needs of each GPU's memory, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.config import ClusterConfig, Config, EngineConfig, LearnerConfig, RolloutConfig
from megatron_retool.planning.activations import PARAMETER_BYTES
from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.hardware import GIB, Accelerator, Machines
from megatron_retool.planning.memory import LearnerMemory, learner_memory, weight_sync_bytes
from megatron_retool.planning.workload import Workload

SLEEPING_ENGINE_BYTES = 3 * GIB
"""What a colocated engine that has released weights and cache still holds on each GPU beside its CUDA graphs (CUDA
context, NCCL, workspaces)."""
SLEEPING_LEARNER_BYTES = 3 * GIB
"""What a learner rank whose states lie in host memory still holds (CUDA context, NCCL)."""


@dataclass(frozen=True)
class LayoutProblem:
    """Something that will not run. ``needed`` and ``available`` are bytes; 0 where the problem is not about memory."""

    what: str
    needed: float = 0.0
    available: float = 0.0

    def __str__(self) -> str:
        if not self.needed:
            return self.what
        return f"{self.what}: {self.needed / GIB:.1f} GiB needed, {self.available / GIB:.1f} GiB available"


@dataclass(frozen=True)
class MemoryPlan:
    """Both sides of a configuration on one kind of GPU.

    Attributes:
        learner: peak while updating.
        engine_weights, engine_cache: bytes on each of an engine's GPUs.
        cache_tokens: what the cache holds, in tokens of one engine.
        concurrent: trajectories that decode at one time on an engine.
        engine_graphs: bytes of CUDA graphs on each of an engine's GPUs, asleep or not.
        host_bytes_per_node: learner states that wait in host memory during the rollout (colocated).
        experts_host_bytes_per_node: what the engines keep of routed experts in host memory (routing_replay=rollout).
        problems: empty where everything fits.
    """

    learner: LearnerMemory
    engine_weights: float
    engine_cache: float
    engine_graphs: float
    cache_tokens: float
    concurrent: int
    host_bytes_per_node: float
    experts_host_bytes_per_node: float
    learner_needed: float
    """The learner's peak and what the sleeping engine holds beside it."""
    capacity: float
    problems: tuple[LayoutProblem, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.problems


def plan_memory(
    config: Config, architecture: Architecture, layout: ParallelLayout, machines: Machines, workload: Workload
) -> MemoryPlan:
    """Memory of learner and engines, and everything about it that will not run."""
    accelerator = machines.accelerator
    colocated = config.cluster.placement == "colocated"
    learner = learner_memory(config.learner, config.algorithm, config.model, architecture, layout, accelerator.is_cpu)
    engine = EngineModel.from_config(
        config.rollout.engine, architecture, machines, config.rollout.max_concurrent_trajectories
    )
    beside = SLEEPING_ENGINE_BYTES + engine.graph_bytes if colocated and not accelerator.is_cpu else 0.0
    longest = config.data.max_prompt_length + config.data.max_response_length
    problems = _learner_problems(config.learner, architecture, layout, learner, beside, accelerator, longest)
    problems += _cache_problems(config.rollout.engine, engine, accelerator, longest)
    if colocated and not accelerator.is_cpu:
        largest_tensor = architecture.vocab_size * architecture.hidden_size * PARAMETER_BYTES[config.learner.dtype]
        buckets = 2.0 * max(config.weight_sync.bucket_bytes, largest_tensor)  # each holds a whole tensor at least
        if config.learner.lora.sends_adapter:
            buckets = float(weight_sync_bytes(architecture, config.learner))
        problems += _colocation_problems(config.rollout.engine, learner, engine, beside, buckets, accelerator)
    problems += _placement_problems(config.rollout, config.learner, config.cluster, machines)
    ranks_per_node = min(machines.per_node, config.learner.world_size)
    engine_ranks_per_node = min(machines.per_node, config.rollout.engine.count * engine.tensor_parallel)
    replayed = config.learner.routing_replay == "rollout" and not accelerator.is_cpu
    return MemoryPlan(
        learner=learner,
        engine_weights=engine.weight_bytes / engine.tensor_parallel,
        engine_cache=max(0.0, engine.cache_tokens) * engine.kv_bytes_per_token / engine.tensor_parallel,
        engine_graphs=engine.graph_bytes,
        cache_tokens=max(0.0, engine.cache_tokens),
        concurrent=engine.concurrency(workload.expected_context) if engine.cache_tokens > 0 else 0,
        host_bytes_per_node=learner.pinned * ranks_per_node if colocated and not accelerator.is_cpu else 0.0,
        experts_host_bytes_per_node=engine.routed_experts_host_bytes * engine_ranks_per_node if replayed else 0.0,
        learner_needed=learner.total + beside,
        capacity=accelerator.memory_bytes,
        problems=tuple(problems),
    )


def _learner_problems(
    config: LearnerConfig,
    architecture: Architecture,
    layout: ParallelLayout,
    memory: LearnerMemory,
    beside: float,
    accelerator: Accelerator,
    longest: int,
) -> list[LayoutProblem]:
    """``beside``: bytes that a sleeping engine holds on the same GPU. ``longest``: tokens of the longest sequence."""
    problems, needed = [], memory.total + beside
    if needed > accelerator.memory_bytes:
        largest = max(memory.components().items(), key=lambda item: item[1])
        what = f"the learner does not fit (pipeline stage {memory.stage}; its largest part is {largest[0]})"
        problems.append(LayoutProblem(what, needed, accelerator.memory_bytes))
    budget = config.max_tokens_per_micro_batch
    if budget < longest:
        problems.append(
            LayoutProblem(
                f"learner.max_tokens_per_micro_batch={budget} is less than the longest sequence of "
                f"{longest:,} tokens (data.max_prompt_length + data.max_response_length)"
            )
        )
    stage_layers, again = architecture.num_layers // layout.pipeline, config.recompute.num_layers
    if again is not None and again > stage_layers:
        problems.append(
            LayoutProblem(
                f"learner.recompute.num_layers={again} is more than the {stage_layers} layers of a pipeline stage"
            )
        )
    return problems


def _cache_problems(
    config: EngineConfig, engine: EngineModel, accelerator: Accelerator, longest: int
) -> list[LayoutProblem]:
    """``longest``: tokens of the longest trajectory."""
    weights, static = (
        engine.weight_bytes / engine.tensor_parallel,
        config.mem_fraction_static * accelerator.memory_bytes,
    )
    if not accelerator.is_cpu and weights >= static:
        return [LayoutProblem("the engine's weights do not fit into mem_fraction_static", weights, static)]
    if engine.cache_tokens >= longest:
        return []
    if accelerator.is_cpu:
        return [
            LayoutProblem(
                f"rollout.engine.max_total_tokens={config.max_total_tokens} is less than one longest trajectory of "
                f"{longest:,} tokens"
            )
        ]
    what = (
        f"the engine's cache holds {engine.cache_tokens:,.0f} tokens, less than one longest trajectory of "
        f"{longest:,} tokens"
    )
    return [LayoutProblem(what, longest * engine.kv_bytes_per_token / engine.tensor_parallel, static - weights)]


def _colocation_problems(
    config: EngineConfig,
    learner: LearnerMemory,
    engine: EngineModel,
    beside: float,
    buckets: float,
    accelerator: Accelerator,
) -> list[LayoutProblem]:
    """``beside``: bytes that a sleeping engine holds. ``buckets``: bytes that a weight sync holds."""
    problems, capacity = [], accelerator.memory_bytes
    # Optimizer, gradients and the engine's cache are away while weights are sent.
    weights = learner.parameters + learner.reference + engine.weight_bytes / engine.tensor_parallel
    sending = weights + beside + SLEEPING_LEARNER_BYTES + buckets
    if sending > capacity:
        what = (
            "the learner's weights and two buckets of weight_sync.bucket_bytes do not fit beside the engine's weights"
        )
        problems.append(LayoutProblem(what, sending, capacity))
    awake = config.mem_fraction_static * capacity + engine.graph_bytes + SLEEPING_LEARNER_BYTES
    if awake > capacity:
        what = "rollout.engine.mem_fraction_static leaves no room for the sleeping learner on the same GPUs"
        problems.append(LayoutProblem(what, awake, capacity))
    return problems


def _placement_problems(
    rollout: RolloutConfig, learner: LearnerConfig, cluster: ClusterConfig, machines: Machines
) -> Iterator[LayoutProblem]:
    engine = rollout.engine
    engines = engine.count * engine.tensor_parallel_size
    ranks = learner.world_size
    if machines.accelerator.is_cpu:
        return
    if engine.tensor_parallel_size > machines.per_node and engine.tensor_parallel_size % machines.per_node:
        yield LayoutProblem(
            f"an engine of TP {engine.tensor_parallel_size} is neither inside a node of {machines.per_node} GPUs "
            "nor on all GPUs of several"
        )
    if cluster.placement == "colocated":
        if max(engines, ranks) > machines.count:
            yield LayoutProblem(f"{max(engines, ranks)} GPUs are needed (colocated), {machines.count} are there")
    elif engines + ranks > machines.count:
        yield LayoutProblem(
            f"{ranks} learner + {engines} engine GPUs = {engines + ranks} are needed, {machines.count} are there"
        )
