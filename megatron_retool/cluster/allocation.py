"""Does a configuration fit an allocation of nodes? Asked before anything is submitted, and again inside the job.

    python -m megatron_retool.cluster.allocation --config FILE [--nodes N] [--gpus-per-node G] [--sft] [key=value …]

Prints what runs where. With ``--print KEYS`` only the named values appear on standard output, one a line, and the rest
goes to standard error: that is how the Slurm scripts learn the run's directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from megatron_retool.cluster.placement import Placement, check_weight_sync, needs_critic, plan_placement
from megatron_retool.config import ClusterConfig, Config, ConfigError, LearnerConfig, RolloutConfig, load_config

_TABLE_ROWS = 64
"""Longest placement that is printed; the sum says enough of larger ones."""


@dataclass(frozen=True)
class Allocation:
    """A configuration on the nodes it will run on.

    Attributes:
        needed_gpus: GPUs that learner and engines occupy together (0 on hosts without GPUs).
        warnings: sentences about what works but wastes GPUs or bandwidth.
        placement: who runs where; None for supervised fine-tuning, which has learner ranks only.
    """

    config: Config
    needed_gpus: int
    warnings: tuple[str, ...]
    placement: Placement | None

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.config.cluster.nodes * self.config.cluster.gpus_per_node

    def summary(self) -> str:
        """One line: what the run needs of what there is."""
        cluster = self.config.cluster
        if not cluster.gpus_per_node:
            return f"{cluster.nodes} nodes without GPUs: {_demand(self.config, self.placement is None)}"
        return (
            f"{self.needed_gpus} of {self.gpus} GPUs ({cluster.nodes} nodes x {cluster.gpus_per_node}): "
            f"{_demand(self.config, self.placement is None)}"
        )


def check_allocation(config: Config, nodes: int, gpus_per_node: int | None = None, *, sft: bool = False) -> Allocation:
    """Check ``config`` against ``nodes`` nodes of ``gpus_per_node`` GPUs.

    Args:
        gpus_per_node: None takes ``cluster.gpus_per_node``.
        sft: supervised fine-tuning, which runs only the learner, ``learner.world_size / nodes`` ranks on each node.

    Raises:
        ConfigError: the GPUs do not suffice, an engine would cut a node, ranks do not spread evenly, or new weights
            cannot reach an engine. The message says what to change.
    """
    given = config.cluster.gpus_per_node
    gpus_per_node = given if gpus_per_node is None else gpus_per_node
    if nodes < 1 or gpus_per_node < 0:
        raise ConfigError(f"an allocation of {nodes} nodes x {gpus_per_node} GPUs is empty: --nodes must be at least 1")
    if gpus_per_node == 0 and (given > 0 or "cuda" in (config.learner.device, config.rollout.engine.device)):
        raise ConfigError(
            "the configuration asks for GPUs and the allocation has none: add --gpus-per-node, or the cluster's own "
            "option for it (--gres=gpu:8)"
        )
    config = _on(config, nodes, gpus_per_node)
    if sft:
        needed, placement = _sft_gpus(config), None
    else:
        placement = plan_placement(config) if gpus_per_node == 0 else _gpu_placement(config)
        check_weight_sync(config.weight_sync, config.rollout, placement)
        needed = len({gpu for slot in placement.slots for gpu in slot.gpus})
    return Allocation(
        config, needed, tuple(_warnings(config.cluster, config.learner, config.rollout, needed, sft)), placement
    )


def _on(config: Config, nodes: int, gpus_per_node: int) -> Config:
    cluster: ClusterConfig = dataclasses.replace(config.cluster, nodes=nodes, gpus_per_node=gpus_per_node)
    return dataclasses.replace(config, cluster=cluster)


def _gpu_placement(config: Config) -> Placement:
    """The placement, or an error that knows how many nodes would do."""
    nodes, per_node = config.cluster.nodes, config.cluster.gpus_per_node
    ranks = config.learner.world_size * (2 if needs_critic(config.algorithm) else 1)
    engines = config.rollout.engine.count * config.rollout.engine.tensor_parallel_size
    ample = _on(config, -(-(ranks + engines) // per_node), per_node)
    slots = plan_placement(ample).slots
    needed_nodes = 1 + max(gpu for slot in slots for gpu in slot.gpus) // per_node
    if needed_nodes > nodes:
        gpus = len({gpu for slot in slots for gpu in slot.gpus})
        raise ConfigError(
            f"{gpus} GPUs are needed, the allocation has {nodes} nodes x {per_node} = {nodes * per_node}: "
            f"{_demand(config, sft=False)}. Submit with --nodes {needed_nodes}, or lower learner.world_size or "
            "rollout.engine.count"
            + ("" if config.cluster.placement == "colocated" else ", or set cluster.placement=colocated")
        )
    return plan_placement(config)


def _sft_gpus(config: Config) -> int:
    ranks, nodes, per_node = config.learner.world_size, config.cluster.nodes, config.cluster.gpus_per_node
    if ranks % nodes:
        raise ConfigError(f"learner.world_size={ranks} ranks do not spread evenly over {nodes} nodes")
    if per_node and ranks > nodes * per_node:
        raise ConfigError(
            f"{ranks} GPUs are needed, the allocation has {nodes} nodes x {per_node} = {nodes * per_node}: "
            f"{_demand(config, sft=True)}. Submit with --nodes {-(-ranks // per_node)}, or lower learner.world_size"
        )
    return ranks if per_node else 0


def _demand(config: Config, sft: bool) -> str:
    """The sum that makes the number of GPUs, in words."""
    learner, engine = config.learner, config.rollout.engine
    tp, pp, cp = (
        learner.tensor_model_parallel_size,
        learner.pipeline_model_parallel_size,
        learner.context_parallel_size,
    )
    text = f"learner {learner.world_size} = TP {tp} x PP {pp} x CP {cp} x DP {learner.world_size // (tp * pp * cp)}"
    if sft:
        return text
    if needs_critic(config.algorithm):
        text += f", critic {learner.world_size}"
    link = "sharing them with" if config.cluster.placement == "colocated" and config.cluster.gpus_per_node else "plus"
    return f"{text}, {link} {engine.count} engines x TP {engine.tensor_parallel_size}"


def _warnings(
    cluster: ClusterConfig, learner: LearnerConfig, rollout: RolloutConfig, needed: int, sft: bool
) -> list[str]:
    per_node, nodes = cluster.gpus_per_node, cluster.nodes
    if not per_node:
        return []
    result = []
    idle = nodes * per_node - needed
    if idle:
        knobs = "learner.world_size" if sft else "learner.world_size or rollout.engine.count"
        result.append(f"{idle} of {nodes * per_node} GPUs stay idle: raise {knobs}, or ask for fewer nodes")
    for key, size in (
        ("learner.tensor_model_parallel_size", learner.tensor_model_parallel_size),
        ("rollout.engine.tensor_parallel_size", 1 if sft else rollout.engine.tensor_parallel_size),
    ):
        if per_node % min(size, per_node) or size > per_node:
            result.append(
                f"{key}={size} crosses nodes of {per_node} GPUs: tensor parallelism talks in every layer and belongs "
                "inside a node"
            )
    return result


def main(arguments: list[str] | None = None) -> int:
    """Check a configuration against the job's nodes, or print values that a job script needs; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--nodes", type=int, help="default: cluster.nodes")
    parser.add_argument("--gpus-per-node", type=int, help="default: cluster.gpus_per_node")
    parser.add_argument("--sft", action="store_true", help="supervised fine-tuning: only the learner")
    parser.add_argument(
        "--print", dest="keys", metavar="KEYS",
        help="comma-separated: run_dir, experiment_name, nodes, gpus_per_node, world_size",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", help="dotted.key=value")
    options = parser.parse_intermixed_args(arguments)
    console = Console(soft_wrap=True, highlight=False, emoji=False, stderr=options.keys is not None)
    try:
        config = load_config(options.config, options.overrides)
        nodes = config.cluster.nodes if options.nodes is None else options.nodes
        allocation = check_allocation(config, nodes, options.gpus_per_node, sft=options.sft)
    except ConfigError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        return 1
    console.print(allocation.summary())
    placement = allocation.placement
    if placement is not None and len(placement.slots) <= _TABLE_ROWS:
        console.print(placement.table())
    for warning in allocation.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    values = {
        "run_dir": str(config.trainer.run_dir.absolute()),
        "experiment_name": config.trainer.experiment_name,
        "nodes": str(allocation.config.cluster.nodes),
        "gpus_per_node": str(allocation.config.cluster.gpus_per_node),
        "world_size": str(config.learner.world_size),
    }
    for key in options.keys.split(",") if options.keys else []:
        print(values[key])
    return 0


if __name__ == "__main__":
    sys.exit(main())
