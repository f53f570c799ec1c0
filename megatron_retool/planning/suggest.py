"""What does not fit, which knob would make it fit, and which layout would be the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.cluster.allocation import check_allocation
from megatron_retool.cluster.placement import needs_critic
from megatron_retool.config import Config, ConfigError, validate
from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.hardware import Machines
from megatron_retool.planning.learner_time import Assumptions
from megatron_retool.planning.memory import frozen_architectures
from megatron_retool.planning.memory_plan import MemoryPlan, plan_memory
from megatron_retool.planning.simulate import StepResult
from megatron_retool.planning.timing import StepTime, age_bound, predict_generation, predict_step
from megatron_retool.planning.workload import Workload

ENGINE_SHARE = 0.85
"""What a suggestion gives an engine with GPUs of its own (mem_fraction_static)."""
HEADROOM = 0.05
"""Share of the device memory that a suggestion leaves free: activations are an estimate."""
SIMULATED_RESPONSES = 1024
"""Larger rollouts are simulated at a smaller scale, with as many responses for each engine, to compare layouts."""


# --- variations -------------------------------------------------------------------------------------------------------


def vary(config: Config, **changes: Any) -> Config:
    """``config`` with dotted keys replaced (dots written as double underscores), validated.

    Raises:
        ConfigError: the combination is not valid.
    """
    for key, value in changes.items():
        config = _replace(config, key.split("__"), value)
    validate(config)
    return config


def _replace(node: Any, path: list[str], value: Any) -> Any:
    if len(path) == 1:
        return replace(node, **{path[0]: value})
    return replace(node, **{path[0]: _replace(getattr(node, path[0]), path[1:], value)})


def vary_section(config: Config, section: str, changes: dict[str, Any]) -> Any:
    """``section`` of ``config`` with those of ``changes`` that are in it, unchecked."""
    node = getattr(config, section)
    for key, value in changes.items():
        name, *path = key.split("__")
        if name == section:
            node = _replace(node, path, value)
    return node


def overrides_of(changes: dict[str, Any]) -> list[str]:
    """The same changes as command-line overrides, dotted.key=value."""

    def text(value: Any) -> str:
        if value is None:
            return "null"
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [f"{key.replace('__', '.')}={text(value)}" for key, value in changes.items()]


@dataclass(frozen=True)
class Candidate:
    """A variation of the configuration that fits, and that scripts/slurm/submit.sh would submit."""

    changes: dict[str, Any]
    layout: ParallelLayout
    memory: MemoryPlan
    time: StepTime

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.time.total


def _cut(candidate: Candidate) -> tuple[Any, ...]:
    """How the model is cut, by learner and engines."""
    layout, changes = candidate.layout, candidate.changes
    placed = changes["cluster__placement"], changes["rollout__engine__tensor_parallel_size"]
    return layout.tensor, layout.pipeline, layout.expert, *placed


def _keep_faster(found: dict[tuple[Any, ...], Candidate], key: tuple[Any, ...], candidate: Candidate) -> None:
    if key not in found or candidate.seconds < found[key].seconds:
        found[key] = candidate


class Planner:
    """Evaluates variations of one configuration; rollouts are simulated once for each set of engines."""

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        machines: Machines,
        workload: Workload,
        assumptions: Assumptions | None = None,
    ) -> None:
        self.config = config
        self.architecture = architecture
        self.machines = machines
        self.workload = workload
        self.assumptions = assumptions or Assumptions()
        self._generation: dict[tuple[Any, ...], StepResult] = {}

    def candidate(self, changes: dict[str, Any]) -> Candidate | None:
        """The variation, or None where it is invalid, cannot be placed or does not fit with some headroom.

        Its ``changes`` name ``cluster`` and ``weight_sync.method`` too where the configuration's own do not go with it.
        """
        try:
            # Most of the layouts that are tried do not divide the ranks: the whole tree is checked only for the others.
            learner = vary_section(self.config, "learner", changes)
            learner.check()
            layout = learner.layout(self.architecture)
            config = vary(self.config, **changes)
            frozen_architectures(
                config.algorithm, config.learner, config.model, self.architecture
            )  # the layout has to divide teachers too
        except ConfigError:
            return None
        if layout.tensor > self.machines.per_node:
            return None
        memory = plan_memory(config, self.architecture, layout, self.machines, self.workload)
        if not memory.fits or memory.learner_needed > (1 - HEADROOM) * memory.capacity:
            return None
        submitted = self._submitted(changes)
        if submitted is None:
            return None
        changes, config = submitted
        time = predict_step(
            config,
            self.architecture,
            layout,
            self.machines,
            self.workload,
            self.assumptions,
            generation=self.generation(config),
        )
        return Candidate(changes, layout, memory, time)

    def _submitted(self, changes: dict[str, Any]) -> tuple[dict[str, Any], Config] | None:
        """``changes`` with what the check before submission wants beside them, or None where nothing satisfies it."""
        machines = self.machines
        clusters: list[dict[str, Any]] = [self._cluster()] if not machines.accelerator.is_cpu else []
        if machines.accelerator.is_cpu or self.config.cluster.gpus_per_node:
            clusters.insert(0, {})
        for cluster in clusters:
            for sync in ({}, *({"weight_sync__method": method} for method in ("tensor", "distributed", "disk"))):
                complete = {**changes, **cluster, **sync}
                try:
                    config = vary(self.config, **complete)
                    check_allocation(config, config.cluster.nodes)
                except ConfigError:
                    continue
                return complete, config
        return None

    def _cluster(self) -> dict[str, Any]:
        machines = self.machines
        return {"cluster__nodes": machines.nodes, "cluster__gpus_per_node": min(machines.per_node, machines.count)}

    def generation(self, config: Config) -> StepResult:
        """A rollout with the engines of ``config``, at a smaller scale where there are many responses."""
        rollout = config.rollout
        engine = EngineModel.from_config(
            rollout.engine, self.architecture, self.machines, rollout.max_concurrent_trajectories
        )
        count = rollout.engine.count
        key = (engine.tensor_parallel, engine.memory_fraction, engine.weight_bytes_per_parameter, count)
        if key not in self._generation:
            scale = min(1.0, max(SIMULATED_RESPONSES / self.workload.responses, 1 / count))
            engines = max(1, round(count * scale))
            self._generation[key] = predict_generation(
                *(engine, engines, self.workload.scaled(engines / count), rollout.partial),
                age_bound(config.trainer),
            )
        return self._generation[key]

    def cures(self) -> list[Candidate]:
        """Single knobs that would make the configuration fit, fastest first; where GPUs are unused, also with all."""
        knobs = list(self._single_knobs())
        world = self._learner_gpus()
        if world != self.config.learner.world_size:
            knobs += [{"learner__world_size": world, **changes} for changes in ({}, *knobs)]
        result = [candidate for changes in knobs if (candidate := self.candidate(changes))]
        return sorted(result, key=lambda candidate: candidate.seconds)

    def _single_knobs(self) -> Iterator[dict[str, Any]]:
        learner, engine = self.config.learner, self.config.rollout.engine
        if learner.recompute.granularity != "full" or learner.recompute.method == "block":
            yield {
                "learner__recompute__granularity": "full",
                "learner__recompute__method": "uniform",
                "learner__recompute__num_layers": 1,
                "learner__recompute__modules": [],
            }
        if not learner.use_distributed_optimizer:
            yield {"learner__use_distributed_optimizer": True}
        if not learner.optimizer.cpu_offload and not self.machines.accelerator.is_cpu:
            changes: dict[str, Any] = {"learner__optimizer__cpu_offload": True}
            if learner.optimizer.use_precision_aware_optimizer:
                changes["learner__optimizer__use_precision_aware_optimizer"] = False
            yield changes
        longest = self.config.data.max_prompt_length + self.config.data.max_response_length
        if learner.max_tokens_per_micro_batch != longest:
            yield {"learner__max_tokens_per_micro_batch": longest}
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        ):
            for factor in (2, 4, 8):
                changes = {f"learner__{key}": getattr(learner, key) * factor}
                if key == "tensor_model_parallel_size":
                    changes["learner__sequence_parallel"] = True
                yield changes
        for factor in (2, 4, 8):
            tensor = engine.tensor_parallel_size * factor
            if engine.count % factor == 0 and engine.count >= factor:
                count = engine.count // factor
                yield {"rollout__engine__tensor_parallel_size": tensor, "rollout__engine__count": count}
        for fraction in (0.6, 0.7, 0.8, 0.85, 0.9):
            if fraction != engine.mem_fraction_static:
                yield {"rollout__engine__mem_fraction_static": fraction}
        if engine.quantization is None and self.machines.accelerator.fp8_flops:
            yield {"rollout__engine__quantization": "fp8"}

    def _learner_gpus(self) -> int:
        """All GPUs that engines leave to the learner."""
        engine = self.config.rollout.engine
        taken = 0 if self.config.cluster.placement == "colocated" else engine.count * engine.tensor_parallel_size
        return max(1, self.machines.count - taken)

    def suggestions(self, count: int = 5) -> list[Candidate]:
        """The fastest layouts found on all the machines, at most one for each way of cutting the model."""
        best: dict[tuple[Any, ...], Candidate] = {}
        for changes in self._layouts():
            candidate = self.candidate(changes)
            if candidate is not None:
                _keep_faster(best, (*_cut(candidate), candidate.layout.context), candidate)
        fastest: dict[tuple[Any, ...], Candidate] = {}
        for candidate in map(self._recomputing_less, best.values()):
            _keep_faster(fastest, _cut(candidate), candidate)
        return sorted(fastest.values(), key=lambda candidate: candidate.seconds)[:count]

    def _recomputing_less(self, candidate: Candidate) -> Candidate:
        """``candidate`` with the fewest layers computed again that fit, where it computes all of them again."""
        if candidate.changes["learner__recompute__granularity"] != "full":
            return candidate
        fewest, most = 1, self.architecture.num_layers // candidate.layout.pipeline - 1
        while fewest <= most:
            layers = (fewest + most) // 2
            block = {"learner__recompute__method": "block", "learner__recompute__num_layers": layers}
            less = self.candidate({**candidate.changes, **block})
            if less is None:
                fewest = layers + 1
            else:
                candidate, most = less, layers - 1
        return candidate

    def _layouts(self) -> Iterator[dict[str, Any]]:
        a, machines = self.architecture, self.machines
        powers = [1, 2, 4, 8]
        tensors = [size for size in powers if size <= machines.per_node and a.num_attention_heads % size == 0]
        pipelines = [size for size in (1, 2, 4, 8, 16) if a.num_layers % size == 0]
        experts = [1]
        if a.is_moe:
            experts = [size for size in (1, 2, 4, 8, 16, 32, 64) if (a.num_experts or 1) % size == 0]
        # Without recomputation, and with as much of it as there is.
        recomputes: list[dict[str, Any]] = [
            {
                "learner__recompute__granularity": None,
                "learner__recompute__method": None,
                "learner__recompute__num_layers": None,
                "learner__recompute__modules": [],
            },
            {
                "learner__recompute__granularity": "full",
                "learner__recompute__method": "uniform",
                "learner__recompute__num_layers": 1,
                "learner__recompute__modules": [],
            },
        ]
        for split in self._splits():
            world = split["learner__world_size"]
            for tensor in tensors:
                for pipeline in pipelines:
                    for context in (1, 2, 4, 8):
                        if world % (tensor * pipeline * context):
                            continue
                        for expert in experts:
                            for recompute in recomputes:
                                yield {
                                    **split,
                                    "learner__tensor_model_parallel_size": tensor,
                                    "learner__sequence_parallel": tensor > 1,
                                    "learner__pipeline_model_parallel_size": pipeline,
                                    "learner__virtual_pipeline_model_parallel_size": None,
                                    "learner__context_parallel_size": context,
                                    "learner__expert_model_parallel_size": expert,
                                    "learner__expert_tensor_parallel_size": 1 if a.is_moe else None,
                                    **recompute,
                                }

    def _splits(self) -> Iterator[dict[str, Any]]:
        """Colocated on all GPUs; or disaggregated, with an eighth to three quarters of the GPUs for engines.

        An engine is on several nodes only where one does not hold it.
        """
        machines = self.machines
        if machines.accelerator.is_cpu:
            return
        cluster = self._cluster()
        models = 2 if needs_critic(self.config.algorithm) else 1
        sizes = [size for size in (1, 2, 4, 8) if size <= min(machines.per_node, machines.count)]
        node = machines.per_node * machines.accelerator.memory_bytes * ENGINE_SHARE
        if EngineModel.from_config(self.config.rollout.engine, self.architecture, machines).weight_bytes > node:
            sizes = [nodes * machines.per_node for nodes in (2, 4, 8) if nodes <= machines.nodes]
        for tensor in sizes:
            yield {
                **cluster,
                "cluster__placement": "colocated",
                "learner__world_size": machines.count,
                "rollout__engine__tensor_parallel_size": tensor,
                "rollout__engine__count": machines.count // tensor,
                "rollout__engine__mem_fraction_static": 0.8,
            }
            for eighths in (1, 2, 4, 6):
                engine_gpus = machines.count * eighths // 8 // tensor * tensor
                world = (machines.count - engine_gpus) // models
                if engine_gpus < tensor or world < 1:
                    continue
                yield {
                    **cluster,
                    "cluster__placement": "disaggregated",
                    "learner__world_size": world,
                    "rollout__engine__tensor_parallel_size": tensor,
                    "rollout__engine__count": engine_gpus // tensor,
                    "rollout__engine__mem_fraction_static": ENGINE_SHARE,
                }
