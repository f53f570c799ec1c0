"""Nodes, GPUs and Ray."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.config.base import at_least_one, choice, not_negative


@dataclass(frozen=True)
class ClusterConfig:
    """Nodes, GPUs and Ray."""

    nodes: int = at_least_one(1, maximum=100_000)
    """Machines of the run."""
    gpus_per_node: int = not_negative(0, maximum=1024)
    """GPUs of each; 0: the run is on CPUs."""
    placement: str = choice("disaggregated", "colocated")
    """disaggregated: learner and engines have GPUs of their own. colocated: they take turns on the same ones."""
    ray_address: str = "local"
    """"local" starts a private Ray; "auto" joins the one that the Slurm script started."""
