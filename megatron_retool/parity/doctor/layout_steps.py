"""Several ranks: collectives, and the learner in each parallel layout against one that has no ranks at all."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_retool.parity.doctor import model
from megatron_retool.parity.doctor.learner_steps import compare, finest_dtype, learner_config, measure, read_reference
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.parity.doctor.speed_steps import fastest_seconds

MOST_IN_A_GROUP = 4
"""Layers, and attention heads, of the tiny models: the ranks beyond share the data."""
LEAST_SHARE_OF_NVLINK = 0.05
"""Of the planner's figure between two GPUs of a node: less is not even PCIe."""
BYTES_ON_GPU, BYTES_ON_CPU = 256 * 2**20, 16 * 2**20
"""Of a tensor that travels."""
REPEATS = 5


def dp(session: DoctorSession) -> list[StepFigure]:
    """All ranks in data parallelism, against one rank."""
    return _layout(session, model.DENSE, lambda ranks: [])


def tp(session: DoctorSession) -> list[StepFigure]:
    """All ranks in tensor parallelism, against one rank."""
    return _layout(session, model.DENSE, lambda ranks: [f"tensor_model_parallel_size={ranks}"])


def sp(session: DoctorSession) -> list[StepFigure]:
    """All ranks in tensor parallelism with sequence parallelism, against one rank."""
    return _layout(
        session, model.DENSE, lambda ranks: [f"tensor_model_parallel_size={ranks}", "sequence_parallel=true"]
    )


def pp(session: DoctorSession) -> list[StepFigure]:
    """All ranks in pipeline parallelism, against one rank."""
    return _layout(session, model.DENSE, lambda ranks: [f"pipeline_model_parallel_size={ranks}"])


def cp(session: DoctorSession) -> list[StepFigure]:
    """All ranks in context parallelism, against one rank."""
    return _layout(session, model.DENSE, lambda ranks: [f"context_parallel_size={ranks}"])


def ep(session: DoctorSession) -> list[StepFigure]:
    """All ranks in expert parallelism, against one rank."""
    return _layout(session, model.EXPERTS, lambda ranks: [f"expert_model_parallel_size={ranks}"])


def _layout(session: DoctorSession, kind: str, sizes: Callable[[int], list[str]]) -> list[StepFigure]:
    ranks = _ranks(session)
    names = [f"learner.{each}" for each in sizes(min(ranks, MOST_IN_A_GROUP))]
    dtype, bounds = finest_dtype()
    overrides = [f"learner.dtype={dtype}", f"learner.world_size={ranks}", *names]
    reference = read_reference(session, kind)
    config = learner_config(session, kind, *overrides)
    result = session.run_ranks(measure, ranks, config, model.mini_batch(), reference)
    return [StepFigure("ranks", ranks), StepFigure("dtype", dtype), *compare(kind, result, reference, bounds)]


def _ranks(session: DoctorSession) -> int:
    if session.gpus:
        session.need_gpus(2, "NCCL takes no two ranks on one GPU: this")
    return session.ranks


def collectives(session: DoctorSession) -> list[StepFigure]:
    """Sums and copies between all ranks, on values that tell who sent what."""
    ranks = _ranks(session)
    figures: list[StepFigure] = session.run_ranks(_collectives, ranks, BYTES_ON_GPU if session.gpus else BYTES_ON_CPU)
    return [StepFigure("ranks", ranks), *figures]


def _collectives(size: int) -> list[StepFigure]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join()
    cuda = device.type == "cuda"
    count = size // 4 // ranks * ranks
    total = ranks * (ranks + 1) / 2
    own = torch.full((count,), float(rank + 1), device=device)
    part = own[: count // ranks]
    whole = torch.empty_like(own)
    piece = torch.empty_like(part)
    expected = torch.arange(1, ranks + 1, device=device).repeat_interleave(count // ranks).float()

    def reduced() -> bool:
        whole.copy_(own)
        dist.all_reduce(whole)
        return bool((whole == total).all())

    def gathered() -> bool:
        dist.all_gather_into_tensor(whole, part)
        return bool((whole == expected).all())

    def scattered() -> bool:
        dist.reduce_scatter_tensor(piece, own)
        return bool((piece == total).all())

    def exchanged() -> bool:
        dist.all_to_all_single(whole, own)
        return bool((whole == expected).all())

    def broadcast() -> bool:
        whole.copy_(own)
        dist.broadcast(whole, src=ranks - 1)
        return bool((whole == ranks).all())

    def passed_on() -> bool:
        operations = [
            dist.P2POp(dist.isend, own, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, whole, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return bool((whole == (rank - 1) % ranks + 1).all())

    # Bytes that each rank's link carries at least, over the bytes of the tensor.
    share = (ranks - 1) / ranks
    least = _least_bandwidth() if cuda else None
    figures = []
    operations: dict[str, tuple[Callable[[], bool], float]] = {
        "all_reduce": (reduced, 2 * share),
        "all_gather": (gathered, share),
        "reduce_scatter": (scattered, share),
        "all_to_all": (exchanged, share),
        "broadcast": (broadcast, 1.0),
        "send and receive": (passed_on, 1.0),
    }
    for name, (operation, carried) in operations.items():
        right = torch.tensor([float(operation())], device=device)
        dist.all_reduce(right)
        seconds = fastest_seconds(operation, REPEATS if cuda else 2, device if cuda else None, before=dist.barrier)
        figures += [
            StepFigure(f"{name}: ranks with the right values", float(right), at_least=ranks),
            StepFigure(f"{name}: a link carries", carried * count * 4 / seconds / 1e9, "GB/s", at_least=least),
        ]
    dist.barrier()
    dist.destroy_process_group()
    return figures


def join() -> torch.device:
    """Join the group that the environment names, on the device of this rank, which is returned."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


def _least_bandwidth() -> float | None:
    from megatron_retool.planning.hardware import accelerator_of

    known = accelerator_of(torch.cuda.get_device_name())
    return None if known is None else LEAST_SHARE_OF_NVLINK * known.intra_node_bandwidth / 1e9
