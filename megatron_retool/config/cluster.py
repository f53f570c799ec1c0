"""Nodes, GPUs and Ray."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.config.base import choice


@dataclass(frozen=True)
class ClusterConfig:
    nodes: int = 1
    gpus_per_node: int = 0
    placement: str = choice("disaggregated", "colocated")
    """disaggregated: learner and engines have GPUs of their own. colocated: they take turns on the same ones."""
    ray_address: str = "local"
    """"local" starts a private Ray; "auto" joins the one that the Slurm script started."""
