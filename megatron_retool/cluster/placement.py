"""Which process gets which GPUs: a pure plan, checked against the nodes, printed at start, then asked of Ray.

Two ways. *disaggregated*: learner ranks, critic ranks (PPO's, as many as the learner's) and engines have GPUs of their
own. *colocated*: all see the same GPUs and take turns (the engine releases its memory while the learner works). On
hosts without GPUs the plan holds no GPU, and spreads each role evenly over the nodes. Every node has a sandbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_retool.config import AlgorithmConfig, Config, ConfigError, RolloutConfig, WeightSyncConfig
from megatron_retool.registry import Need

BROADCASTS = ("distributed", "sharded")
"""Methods of weight sync with process groups of learner and engines."""


@dataclass(frozen=True)
class Slot:
    """One process. ``role``: learner, critic, engine or sandbox; ``gpus``: global (node x gpus_per_node + local).

    An engine of more GPUs than a node has is one process on each of its nodes; ``part`` counts them.
    """

    role: str
    rank: int
    node: int
    gpus: tuple[int, ...]
    part: int = 0


@dataclass(frozen=True)
class Placement:
    """Which role runs on which GPUs of which node."""

    slots: tuple[Slot, ...]
    gpus_per_node: int
    colocated: bool
    sandboxes: tuple[Slot, ...] = ()
    """Servers of the code interpreter that the trainer starts, one on each node."""
    node_ids: tuple[str, ...] = ()
    """Ray's ids of the nodes, once they are known; with them every process is bound to the node of its slot."""

    def on_nodes(self, node_ids: Sequence[str]) -> Placement:
        """This plan on the nodes of a running Ray, in order of ``Slot.node``; empty: Ray chooses."""
        return dataclasses.replace(self, node_ids=tuple(node_ids))

    def with_engine(self, number: int, gpus: int, nodes: Sequence[int]) -> Placement:
        """This plan and one more engine.

        Args:
            number: its rank.
            gpus: as many in a row that no process has, or whole nodes; on hosts without GPUs it goes where the fewest
                engines are.
            nodes: that may be taken, in order.

        Raises:
            ConfigError: the engines share their GPUs with the learner, or as many are not free.
        """
        if self.colocated:
            raise ConfigError(
                "engines and learner take turns on the same GPUs (cluster.placement=colocated): no engine can be added"
            )
        per_node = self.gpus_per_node
        if not per_node:
            node = min(nodes, key=lambda node: sum(slot.node == node for slot in self.slots if slot.role == "engine"))
            return dataclasses.replace(self, slots=(*self.slots, Slot("engine", number, node, ())))
        taken = {gpu for slot in self.slots for gpu in slot.gpus}
        each = min(gpus, per_node)
        parts: list[Slot] = []
        for node in nodes:
            for first in range(node * per_node, (node + 1) * per_node - each + 1):
                own = tuple(range(first, first + each))
                if taken.isdisjoint(own):
                    parts.append(Slot("engine", number, node, own, len(parts)))
                    break
            if len(parts) * each == gpus:
                return dataclasses.replace(self, slots=(*self.slots, *parts))
        of = "of one node" if gpus <= per_node else f"of {gpus // per_node} nodes that no other process is on"
        raise ConfigError(
            f"an engine takes {gpus} GPU{'s' if gpus > 1 else ''} {of} (rollout.engine.tensor_parallel_size), "
            f"and the nodes that weight_sync.method reaches ({len(nodes)} of {per_node} GPUs) do not have them free: "
            "remove an engine, or let a node join Ray"
        )

    def without_engine(self, number: int) -> Placement:
        """This plan without an engine."""
        left = tuple(slot for slot in self.slots if (slot.role, slot.rank) != ("engine", number))
        return dataclasses.replace(self, slots=left)

    def learner_options(self, rank: int, role: str = "learner") -> dict[str, Any]:
        """Ray options of a rank of the learner, or of the critic."""
        return self._options(self.slot(role, rank))

    def engine_options(self, index: int, part: int = 0) -> dict[str, Any]:
        """Ray options of an engine's actor, on one of its nodes."""
        return self._options(self.parts(index)[part])

    def parts(self, index: int) -> list[Slot]:
        """Processes of an engine, one on each of its nodes; the first one serves it."""
        return self._slots_of("engine", index)

    def sandbox_options(self, index: int) -> dict[str, Any]:
        """Ray options of a sandbox server's actor."""
        return self._options(self.sandboxes[index])

    def gpus(self, role: str, rank: int, part: int = 0) -> tuple[int, ...]:
        """The process's own GPUs, as places on its node."""
        return tuple(gpu % self.gpus_per_node for gpu in self._slots_of(role, rank)[part].gpus)

    def ranks_beside(self, role: str, rank: int) -> int:
        """GPUs on the rank's node that have learner or critic ranks: ranks on one GPU take turns."""
        node = self.slot(role, rank).node
        near = [slot for slot in self.slots if slot.role in ("learner", "critic") and slot.node == node]
        return len({slot.gpus for slot in near})

    def engine_gpus(self, index: int, weight_sync_method: str, part: int = 0) -> tuple[int, ...]:
        """What an engine sees on one of its nodes, its own GPUs first.

        CUDA IPC opens memory on the device where it lies, so with ``tensor`` the GPU of its sender comes last, where
        that is not the engine's own.
        """
        own = self.gpus("engine", index, part)
        sender = self.gpus("learner", self.sender(index, "tensor")) if weight_sync_method == "tensor" else ()
        return (*own, *(gpu for gpu in sender if gpu not in own))

    def nodes_of(self, *roles: str) -> set[int]:
        """Nodes that have processes of these roles."""
        return {slot.node for slot in self.slots if slot.role in roles}

    def sender(self, index: int, weight_sync_method: str) -> int:
        """Learner rank that gives engine ``index`` its weights.

        With ``tensor`` one that shares its first GPU, or else the first rank on its node; otherwise rank 0.

        Raises:
            ConfigError: ``tensor``, and the engine's node has no learner rank, or it has several nodes.
        """
        if weight_sync_method != "tensor":
            return 0
        engine = self.slot("engine", index)
        if (nodes := len(self.parts(index))) > 1:
            raise ConfigError(
                f"weight_sync.method=tensor shares memory inside a node, and engine {index} has {len(engine.gpus)} "
                f"GPUs on each of {nodes} nodes: set weight_sync.method="
                + ("disk" if self.colocated else "distributed")
            )
        near = [slot for slot in self.slots if slot.role == "learner" and slot.node == engine.node]
        if not near:
            raise ConfigError(
                f"weight_sync.method=tensor shares memory inside a node: engine {index} would be on node "
                f"{engine.node}, where no learner rank is. Set weight_sync.method="
                + ("disk" if self.colocated else "distributed")
            )
        beside = [slot.rank for slot in near if slot.gpus and slot.gpus[0] in engine.gpus[:1]]
        return min(beside or [slot.rank for slot in near])

    def slot(self, role: str, rank: int) -> Slot:
        """The process of a role; of an engine that has several nodes, the first one's."""
        return self._slots_of(role, rank)[0]

    def _slots_of(self, role: str, rank: int) -> list[Slot]:
        return [slot for slot in self.slots if (slot.role, slot.rank) == (role, rank)]

    def _options(self, slot: Slot) -> dict[str, Any]:
        # The process takes its GPUs itself: see ``gpus``.
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        if self.node_ids:
            # Here, because the plan is also made where there is no Ray: before a job is submitted.
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node_ids[slot.node], soft=False)
        return options

    def table(self) -> Table:
        """The plan for people: role, rank, node, GPUs."""
        table = Table(title="placement")
        for column in ("role", "rank", "node", "GPUs"):
            table.add_column(column)
        for slot in (*self.slots, *self.sandboxes):
            gpus = ", ".join(str(gpu % self.gpus_per_node) for gpu in slot.gpus) if slot.gpus else "CPU"
            table.add_row(slot.role, str(slot.rank), str(slot.node), gpus)
        return table


def plan_placement(config: Config) -> Placement:
    """Assign GPUs in node order: learner ranks, so that tensor-parallel neighbours share a node, critic's, engines.

    Raises:
        ConfigError: more GPUs are needed than cluster.nodes x cluster.gpus_per_node, or an engine is neither inside one
            node nor on all GPUs of several.
    """
    per_node = config.cluster.gpus_per_node
    ranks, engines, engine_gpus = (
        config.learner.world_size,
        config.rollout.engine.count,
        config.rollout.engine.tensor_parallel_size,
    )
    critics = ranks if needs_critic(config.algorithm) else 0
    own_sandboxes = config.rollout.multi_turn.uses_code_interpreter and not config.tools.code_interpreter.urls
    sandboxes = tuple(Slot("sandbox", node, node, ()) for node in range(config.cluster.nodes if own_sandboxes else 0))
    if per_node == 0:
        slots = [
            Slot(role, rank, rank * config.cluster.nodes // count, ())
            for role, count in (("learner", ranks), ("critic", critics), ("engine", engines))
            for rank in range(count)
        ]
        return Placement(tuple(slots), 0, False, sandboxes)
    colocated = config.cluster.placement == "colocated"
    available = config.cluster.nodes * per_node
    first_critic_gpu = 0 if colocated else ranks
    first_engine_gpu = 0 if colocated else ranks + critics
    needed = max(ranks, engines * engine_gpus) if colocated else ranks + critics + engines * engine_gpus
    if needed > available:
        critic = f", as many for the critic ({config.algorithm.needs[Need.CRITIC]})" if critics else ""
        raise ConfigError(
            f"cluster.nodes x cluster.gpus_per_node = {available} GPUs, but learner.world_size={ranks}{critic} and "
            f"rollout.engine.count x tensor_parallel_size = {engines} x {engine_gpus} need {needed} "
            f"({config.cluster.placement})"
        )
    slots = [Slot("learner", rank, rank // per_node, (rank,)) for rank in range(ranks)]
    for rank in range(critics):
        gpu = first_critic_gpu + rank
        slots.append(Slot("critic", rank, gpu // per_node, (gpu,)))
    for index in range(engines):
        first = first_engine_gpu + index * engine_gpus
        gpus = tuple(range(first, first + engine_gpus))
        if engine_gpus > per_node and first % per_node == engine_gpus % per_node == 0:
            parts = range(engine_gpus // per_node)
            slots += [
                Slot("engine", index, first // per_node + part, gpus[part * per_node :][:per_node], part)
                for part in parts
            ]
        elif first // per_node == gpus[-1] // per_node:
            slots.append(Slot("engine", index, first // per_node, gpus))
        else:
            raise ConfigError(
                f"engine {index} would have GPUs {first} to {gpus[-1]}, {per_node} a node: an engine lies inside one "
                "node or has all GPUs of several. Choose rollout.engine.tensor_parallel_size so that it divides the "
                "GPUs left on each node, or is a multiple of cluster.gpus_per_node"
                + ("" if colocated else ", and learner.world_size too")
            )
    return Placement(tuple(slots), per_node, colocated, sandboxes)


def check_weight_sync(weight_sync: WeightSyncConfig, rollout: RolloutConfig, placement: Placement) -> None:
    """Refuse what would fail only at the first weight sync, after everything has started.

    Raises:
        ConfigError: weight_sync.method cannot reach an engine where the plan puts it.
    """
    method = weight_sync.method
    for index in range(rollout.engine.count):
        placement.sender(index, method)
    if method in BROADCASTS and placement.colocated:
        raise ConfigError(
            f"weight_sync.method={method} joins learner and engines by NCCL, which takes no two processes on one GPU "
            "(cluster.placement=colocated): set weight_sync.method=tensor"
        )


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the run trains a value model beside the policy (PPO)."""
    return Need.CRITIC in algorithm.needs
