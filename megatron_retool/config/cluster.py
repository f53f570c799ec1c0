"""Nodes, GPUs and Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_retool.config.base import ConfigError, at_least_one, choice, not_negative


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


def visible_devices(gpus: Sequence[int], inherited: str | None) -> list[str]:
    """Names of a node's GPUs for the CUDA_VISIBLE_DEVICES of a process.

    Ray is asked for no GPU and then leaves CUDA_VISIBLE_DEVICES as it is on the node. It can share out fractions of one
    GPU, but it does not know that an engine over four GPUs and four learner ranks take turns on the same four, nor in
    which order ranks have theirs.

    Args:
        gpus: places among the GPUs that Ray's processes on the node see.
        inherited: their CUDA_VISIBLE_DEVICES (indices or UUIDs); None: all of the node's.

    Raises:
        ConfigError: fewer GPUs are visible than the plan counts on.
    """
    if inherited is None:
        return [str(gpu) for gpu in gpus]
    names = [name.strip() for name in inherited.split(",") if name.strip()]
    if max(gpus, default=-1) >= len(names):
        raise ConfigError(
            f"GPU {max(gpus)} of the node is in the plan, but CUDA_VISIBLE_DEVICES={inherited!r} shows {len(names)}: "
            "lower cluster.gpus_per_node, or start Ray with all of the node's GPUs visible"
        )
    return [names[gpu] for gpu in gpus]
