"""Several hosts: what the network between them carries, by the sums that data parallel ranks make over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_retool.parity.doctor.layout_steps import BYTES_ON_CPU, BYTES_ON_GPU, REPEATS, join
from megatron_retool.parity.doctor.outcome import Skipped, StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.parity.doctor.speed_steps import fastest_seconds

LEAST_SHARE_OF_NETWORK = 0.2
"""Of the planner's figure for a GPU's own adapter: eight GPUs that share one, or TCP in its place, carry less."""


def between_nodes(session: DoctorSession) -> list[StepFigure]:
    """All-reduce and all-gather over the network, on values that tell who sent what.

    The ranks of equal number of all nodes are a group, as those of data parallelism are, and all groups work at the
    same time: every adapter is in use. Then all ranks are one group.
    """
    if session.nodes is None:
        raise Skipped("it needs two nodes: --slurm with more than one, or --nodes, --node-rank and --rendezvous")
    ranks = session.gpus or 1
    size = BYTES_ON_GPU if session.gpus else BYTES_ON_CPU
    result: list[StepFigure] = session.run_ranks(_between_nodes, ranks, size, nodes=session.nodes)
    return [StepFigure("nodes", session.nodes.count), StepFigure("ranks on each", ranks), *result]


def _between_nodes(size: int) -> list[StepFigure]:
    device = join()
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    least = least_bandwidth(torch.cuda.get_device_name() if device.type == "cuda" else None)
    # Every rank has to take part in making every group.
    rails = [dist.new_group(list(range(first, ranks, local))) for first in range(local)]
    groups: dict[str, tuple[Any, range]] = {
        "between ranks of equal number": (rails[rank % local], range(rank % local, ranks, local))
    }
    if local > 1:
        groups["between all ranks"] = (dist.group.WORLD, range(ranks))
    figures = []
    for name, (group, members) in groups.items():
        count = size // 4 // len(members) * len(members)
        own = torch.full((count,), float(rank + 1), device=device)
        part = own[: count // len(members)]
        whole = torch.empty_like(own)
        values = torch.tensor([float(member + 1) for member in members], device=device)

        def reduced(group: Any = group, own: Tensor = own, whole: Tensor = whole, values: Tensor = values) -> bool:
            whole.copy_(own)
            dist.all_reduce(whole, group=group)
            return bool((whole == values.sum()).all())

        def gathered(group: Any = group, part: Tensor = part, whole: Tensor = whole, values: Tensor = values) -> bool:
            dist.all_gather_into_tensor(whole, part, group=group)
            return bool((whole == values.repeat_interleave(len(part))).all())

        # Bytes that each rank's link carries at least, over the bytes of the tensor.
        share = (len(members) - 1) / len(members)
        operations: dict[str, tuple[Callable[[], bool], float]] = {
            "all_reduce": (reduced, 2 * share),
            "all_gather": (gathered, share),
        }
        for operation, (work, carried) in operations.items():
            right = torch.tensor([float(work())], device=device)
            dist.all_reduce(right)
            on_gpu = device if device.type == "cuda" else None
            seconds = fastest_seconds(work, REPEATS if on_gpu else 2, on_gpu, before=dist.barrier)
            slowest = torch.tensor([seconds], device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            rate = carried * count * 4 / float(slowest) / 1e9
            figures += [
                StepFigure(f"{operation} {name}: ranks with the right values", float(right), at_least=ranks),
                StepFigure(f"{operation} {name}: a link carries", rate, "GB/s", at_least=least),
            ]
    dist.barrier()
    dist.destroy_process_group()
    return figures


def least_bandwidth(device_name: str | None) -> float | None:
    """GB/s in one direction that a GPU's link to other nodes has to carry; None where the GPU is not known."""
    from megatron_retool.planning.hardware import accelerator_of

    known = None if device_name is None else accelerator_of(device_name)
    return None if known is None else LEAST_SHARE_OF_NETWORK * known.inter_node_bandwidth / 1e9
