"""Which process gets which GPUs: a pure plan, checked against the nodes, printed at start, then asked of Ray.

Two ways. *disaggregated*: learner ranks and engines have GPUs of their own. *colocated*: both see the same GPUs and
take turns (the engine releases its memory while the learner works). On hosts without GPUs every process runs wherever
Ray puts it, and the plan holds no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_retool.config import Config, ConfigError


@dataclass(frozen=True)
class Slot:
    """One process: ``role`` is learner or engine, ``gpus`` are global indices (node x gpus_per_node + local)."""

    role: str
    rank: int
    node: int
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    slots: tuple[Slot, ...]
    gpus_per_node: int
    colocated: bool

    def learner_options(self, rank: int) -> dict[str, Any]:
        """Ray options of a learner rank."""
        return self._options(len(self._slot("learner", rank).gpus))

    def engine_options(self, index: int) -> dict[str, Any]:
        """Ray options of an engine's actor."""
        return self._options(len(self._slot("engine", index).gpus))

    def _slot(self, role: str, rank: int) -> Slot:
        return next(slot for slot in self.slots if slot.role == role and slot.rank == rank)

    def _options(self, gpus: int) -> dict[str, Any]:
        # Colocated processes share a GPU, which Ray expresses as a fraction of it.
        return {"num_cpus": 0, "num_gpus": gpus * (0.5 if self.colocated else 1)}

    def table(self) -> Table:
        """The plan for people: role, rank, node, GPUs."""
        table = Table(title="placement")
        for column in ("role", "rank", "node", "GPUs"):
            table.add_column(column)
        for slot in self.slots:
            gpus = ", ".join(str(gpu % self.gpus_per_node) for gpu in slot.gpus) if slot.gpus else "CPU"
            table.add_row(slot.role, str(slot.rank), str(slot.node), gpus)
        return table


def plan_placement(config: Config) -> Placement:
    """Assign GPUs in node order: learner ranks first, so that tensor-parallel neighbours share a node, then engines.

    Raises:
        ConfigError: more GPUs are needed than cluster.nodes x cluster.gpus_per_node, or an engine would span nodes.
    """
    per_node = config.cluster.gpus_per_node
    ranks, engines, engine_gpus = (
        config.learner.world_size,
        config.rollout.engine.count,
        config.rollout.engine.tensor_parallel_size,
    )
    if per_node == 0:
        slots = [Slot("learner", rank, 0, ()) for rank in range(ranks)]
        slots += [Slot("engine", index, 0, ()) for index in range(engines)]
        return Placement(tuple(slots), 0, False)
    colocated = config.cluster.placement == "colocated"
    available = config.cluster.nodes * per_node
    first_engine_gpu = 0 if colocated else ranks
    needed = max(ranks, engines * engine_gpus) if colocated else ranks + engines * engine_gpus
    if needed > available:
        raise ConfigError(
            f"cluster.nodes x cluster.gpus_per_node = {available} GPUs, but learner.world_size={ranks} and "
            f"rollout.engine.count x tensor_parallel_size = {engines} x {engine_gpus} need {needed} "
            f"({config.cluster.placement})"
        )
    slots = [Slot("learner", rank, rank // per_node, (rank,)) for rank in range(ranks)]
    for index in range(engines):
        first = first_engine_gpu + index * engine_gpus
        gpus = tuple(range(first, first + engine_gpus))
        if engine_gpus <= per_node and first // per_node != gpus[-1] // per_node:
            raise ConfigError(
                f"engine {index} would span two nodes (GPUs {first} to {gpus[-1]}, {per_node} a node): choose "
                "rollout.engine.tensor_parallel_size so that it divides the GPUs left on each node"
            )
        slots.append(Slot("engine", index, first // per_node, gpus))
    return Placement(tuple(slots), per_node, colocated)
