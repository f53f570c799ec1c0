"""Process groups: who shares weights, layers, sequences and data with whom.

Ranks are laid out TP fastest, then CP, EP, DP, PP (Megatron-Core's default order).
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from conversion.model.layout import ParallelLayout
from megatron_retool.algorithms.dynamic_context import context_sizes
from megatron_retool.config import ConfigError
from megatron_retool.ports import is_address, listening_descriptor

_active: ParallelLayout | None = None
"""The layout whose process groups this process has joined: an actor and a critic share them."""
_of_layout: list[Any] = []
"""Process groups for it."""
_context_groups: dict[int, Any] = {}
"""By size, those of context-parallel ranks that this process belongs to."""


def _rendezvous(backend: str, world_size: int, timeout: timedelta) -> None:
    """Join torch.distributed by MASTER_ADDR, MASTER_PORT and RANK.

    Rank 0 listens only on MASTER_ADDR where that is an address; torch itself would on every one of the host. A host's
    name may lead elsewhere on the host itself, and torchrun serves its ranks from a process of its own.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if not is_address(address) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        torch.distributed.init_process_group(backend, timeout=timeout)
        return
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    listener = listening_descriptor(address, port) if rank == 0 else None
    store = torch.distributed.TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener
    )
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def resolve_device(device: str) -> torch.device:
    """The device of this process for ``learner.device``; with CUDA, the one that LOCAL_RANK names.

    Raises:
        ConfigError: "cuda" was asked for on a host without CUDA, or "cpu" on a host that has it.
    """
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise ConfigError("learner.device=cuda, but torch finds no CUDA device on this host: use cpu or auto")
    if device == "cpu" and present:
        raise ConfigError(
            "learner.device=cpu on a host with CUDA is not supported: hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= or use auto"
        )
    if not present:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def use_expandable_segments(device: torch.device) -> None:
    """Let torch's allocator grow its segments from now on, on a GPU; what PYTORCH_ALLOC_CONF says else stays.

    Not by that variable, which an engine of this process would inherit: SGLang's memory saver needs ordinary segments.
    """
    if device.type == "cuda":
        given = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (given, "expandable_segments:True"))))


def use_host_threads(device: torch.device, threads: int) -> int:
    """Set and return the CPU threads of this process: ``threads``, or with a GPU its share of the node's cores.

    Ranks with GPUs compute on the host too: Adam where its state lies there, checksums, copies. LOCAL_WORLD_SIZE, the
    ranks of this node, is torchrun's name and set by the cluster room as well; without it each GPU has a rank.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE is no number of ranks.
    """
    if device.type == "cuda":
        given = os.environ.get("LOCAL_WORLD_SIZE")
        if given and (not given.isdecimal() or int(given) < 1):
            raise ConfigError(f"LOCAL_WORLD_SIZE={given}: it has to be the number of ranks on this node, or unset")
        ranks = int(given or torch.cuda.device_count())
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    torch.set_num_threads(threads)
    return threads


def initialize(layout: ParallelLayout, device: torch.device, seed: int, timeout_seconds: float = 1800.0) -> None:
    """Join torch.distributed (unless the process already has) and Megatron's process groups; seed the generators.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them; a single process needs none of them.
    Does nothing where the process has joined the layout's groups already; leaves those of another layout first.

    Raises:
        ConfigError: WORLD_SIZE is not the layout's.
    """
    if layout.world_size == 1:
        # A single process meets no other: a store in memory needs no port.
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    else:
        world_size = int(os.environ.get("WORLD_SIZE", "0"))
    if torch.distributed.is_initialized():
        world_size = torch.distributed.get_world_size()
    if world_size != layout.world_size:
        raise ConfigError(
            f"learner.world_size={layout.world_size}, but this job has {world_size} process(es): start it with "
            f"torchrun --nproc-per-node {layout.world_size}, or change learner.world_size"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_seconds)
        if layout.world_size == 1:
            torch.distributed.init_process_group(
                backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            _rendezvous(backend, world_size, timeout)
        _connect(device)
    global _active
    if _active == layout and parallel_state.model_parallel_is_initialized():
        return
    if _of_layout:
        torch.distributed.barrier()  # a rank that is still joining these groups would find its connections closed
    _leave_layout()
    others = _process_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    _make_context_groups(layout)
    _active = layout
    _of_layout[:] = [group for group in _process_groups() if group not in others]


def _make_context_groups(layout: ParallelLayout) -> None:
    """Groups of the ranks that share a micro-batch under dynamic context parallelism."""
    whole = parallel_state.get_context_parallel_group()
    _context_groups[layout.context] = whole
    if layout.context == 1:
        return
    everyone: list[Any] = [None] * layout.world_size
    torch.distributed.all_gather_object(everyone, torch.distributed.get_process_group_ranks(whole))
    for size in context_sizes(layout.context)[1:]:
        # Every process makes every group, in the same order: torch wants that.
        for ranks in sorted({tuple(ranks) for ranks in everyone}):
            for first in range(0, len(ranks), size):
                part = ranks[first : first + size]
                group = torch.distributed.new_group(part)
                if torch.distributed.get_rank() in part:
                    _context_groups[size] = group


def context_group(size: int) -> Any:
    """The process group of the ``size`` context-parallel ranks, this one among them, that share a micro-batch."""
    return _context_groups[size]


def _process_groups() -> list[Any]:
    return list(torch.distributed.distributed_c10d._world.pg_map)


def _leave_layout() -> None:
    """Megatron forgets its groups, torch does not: each would keep its threads and buffers, a GPU's too. So it does
    while anything refers to it, as a model of that layout does, which refers to itself, until Python collects it."""
    global _active
    _active = None
    _context_groups.clear()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for group in _process_groups():
        if group in _of_layout:
            torch.distributed.destroy_process_group(group)
    if _of_layout:
        _of_layout.clear()
        gc.collect()


def _connect(device: torch.device) -> None:
    """Make NCCL's communicator of all ranks now, and not in the first exchange of weights.

    A batch of sends and receives between only some ranks hangs where it is the first thing that a group does.
    """
    if device.type == "cuda":
        torch.distributed.all_reduce(torch.zeros(1, device=device))


def shutdown() -> None:
    """Leave every process group."""
    _leave_layout()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def data_parallel_rank() -> int:
    """This process's place among those that hold the same weights and see different sequences."""
    return parallel_state.get_data_parallel_rank()


def is_last_stage() -> bool:
    """True on the pipeline stage that computes the loss."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def sum_over_data_parallel(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor of the last pipeline stage over data- and context-parallel ranks, in place; every rank gets it.

    Every rank passes a tensor of the same shape; what earlier stages pass in is overwritten.  Tensor-parallel ranks
    hold equal copies.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if is_last_stage() and group.size() > 1:
        torch.distributed.all_reduce(tensor, group=group)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            tensor,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return tensor
