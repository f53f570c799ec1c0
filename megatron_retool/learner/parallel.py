# ruff: noqa: E402  (cpu.install must run before megatron.core is imported)
"""Process groups: who shares weights, layers, sequences and data with whom.

Ranks are laid out TP fastest, then CP, EP, DP, PP (Megatron-Core's default order).  ``validate_layout`` holds a layout
against the model's own shape before any process group exists; ``initialize`` joins the groups.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch

from conversion.model.architecture import Architecture
from megatron_retool.config import ConfigError, LearnerConfig
from megatron_retool.learner import cpu

cpu.install()

from megatron.core import parallel_state, tensor_parallel


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of every kind of parallelism. ``world_size`` = tensor x context x data x pipeline."""

    world_size: int
    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    data: int
    expert: int
    expert_tensor: int
    sequence_parallel: bool

    @property
    def sequence_multiple(self) -> int:
        """A sequence's length is padded to a multiple of this: context parallelism cuts it into 2 x CP chunks."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def micro_batch_multiple(self) -> int:
        """A micro-batch's length is padded to a multiple of this: sequence parallelism cuts each CP share by TP."""
        return self.sequence_multiple * (self.tensor if self.sequence_parallel else 1)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding and output layer: ``vocab_size`` rounded up to a multiple of 8 x TP.

    Published vocabularies are multiples of 64 or 128, so that nothing is padded and checkpoints have the same shapes in
    every layout up to TP 8.
    """
    multiple = 8 * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def validate_layout(learner: LearnerConfig, architecture: Architecture) -> ParallelLayout:
    """Check that the model can be cut as ``learner`` says.

    Raises:
        ConfigError: naming the key, the size that does not divide, and what would.
    """
    tp, pp, cp = (
        learner.tensor_model_parallel_size,
        learner.pipeline_model_parallel_size,
        learner.context_parallel_size,
    )
    ep = learner.expert_model_parallel_size
    etp = learner.expert_tensor_parallel_size or tp
    vpp = learner.virtual_pipeline_model_parallel_size
    for key, size in (
        ("world_size", learner.world_size),
        ("tensor_model_parallel_size", tp),
        ("pipeline_model_parallel_size", pp),
        ("context_parallel_size", cp),
        ("expert_model_parallel_size", ep),
        ("expert_tensor_parallel_size", etp),
    ):
        if size < 1:
            raise ConfigError(f"learner.{key}={size} must be at least 1")
    if learner.world_size % (tp * pp * cp):
        raise ConfigError(f"learner.world_size={learner.world_size} is not divisible by TP x PP x CP = {tp * pp * cp}")

    def divides(what: str, size: int, key: str, parts: int) -> None:
        if size % parts:
            raise ConfigError(f"learner.{key}={parts} does not divide the model's {what}={size}")

    divides("num_attention_heads", architecture.num_attention_heads, "tensor_model_parallel_size", tp)
    groups = architecture.num_query_groups
    if groups % tp and tp % groups:
        raise ConfigError(
            f"learner.tensor_model_parallel_size={tp} neither divides the model's num_key_value_heads={groups} "
            "nor is a multiple of it"
        )
    if not architecture.is_moe:
        divides("intermediate_size", architecture.ffn_hidden_size, "tensor_model_parallel_size", tp)
    divides("hidden_size", architecture.hidden_size, "tensor_model_parallel_size", tp)
    if learner.sequence_parallel and tp == 1:
        raise ConfigError("learner.sequence_parallel=true needs learner.tensor_model_parallel_size > 1")

    if vpp is not None:
        if pp < 2:
            raise ConfigError("learner.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1")
        if pp == 2:
            raise ConfigError(
                "learner.virtual_pipeline_model_parallel_size with pipeline_model_parallel_size=2 gives wrong "
                "gradients in Megatron-Core 0.16 without overlapped communication: use PP >= 4, or no VPP"
            )
    stages = pp * (vpp or 1)
    if architecture.num_layers % stages:
        raise ConfigError(
            f"the model's num_hidden_layers={architecture.num_layers} is not divisible by PP x VPP = {stages}: change "
            "learner.pipeline_model_parallel_size or learner.virtual_pipeline_model_parallel_size"
        )

    if architecture.is_moe:
        assert architecture.num_experts is not None and architecture.moe_ffn_hidden_size is not None
        divides("num_experts", architecture.num_experts, "expert_model_parallel_size", ep)
        divides("moe_intermediate_size", architecture.moe_ffn_hidden_size, "expert_tensor_parallel_size", etp)
        if tp > 1 and not learner.sequence_parallel:
            raise ConfigError(
                "a mixture-of-experts model with tensor_model_parallel_size > 1 needs learner.sequence_parallel=true"
            )
        if learner.world_size % (etp * ep * pp):
            raise ConfigError(
                f"learner.world_size={learner.world_size} is not divisible by ETP x EP x PP = {etp * ep * pp}"
            )
    elif ep > 1 or learner.expert_tensor_parallel_size not in (None, 1, tp):
        raise ConfigError(
            f"learner.expert_model_parallel_size={ep} and expert_tensor_parallel_size="
            f"{learner.expert_tensor_parallel_size} need a mixture-of-experts model, which "
            f"{architecture.family} is not"
        )
    sequence = 2 * cp if cp > 1 else 1
    budget = learner.max_tokens_per_micro_batch
    if budget < sequence * tp:
        raise ConfigError(
            f"learner.max_tokens_per_micro_batch={budget} is smaller than the layout's padding unit, {sequence * tp}"
        )
    return ParallelLayout(
        world_size=learner.world_size,
        tensor=tp,
        pipeline=pp,
        virtual_pipeline=vpp,
        context=cp,
        data=learner.world_size // (tp * pp * cp),
        expert=ep,
        expert_tensor=etp if architecture.is_moe else tp,
        sequence_parallel=learner.sequence_parallel,
    )


_active: ParallelLayout | None = None
"""The layout whose process groups this process has joined: an actor and a critic share them."""


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


def initialize(layout: ParallelLayout, device: torch.device, seed: int, timeout_seconds: float = 1800.0) -> None:
    """Join torch.distributed (unless the process already has) and Megatron's process groups; seed the generators.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them; a single process needs none of them.
    Does nothing where the process has joined the layout's groups already; leaves those of another layout first.

    Raises:
        ConfigError: WORLD_SIZE is not the layout's.
    """
    if layout.world_size == 1:
        # A single process rendezvouses with nobody: a store in memory needs no port.
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
            torch.distributed.init_process_group(backend, timeout=timeout)
        _connect(device)
    global _active
    if _active == layout and parallel_state.model_parallel_is_initialized():
        return
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    _active = layout


def _connect(device: torch.device) -> None:
    """Make NCCL's communicator of all ranks now, and not in the first exchange of weights.

    A batch of sends and receives between some ranks alone hangs where it is the first thing that a group does.
    """
    if device.type == "cuda":
        torch.distributed.all_reduce(torch.zeros(1, device=device))


def shutdown() -> None:
    """Leave every process group."""
    global _active
    _active = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def data_parallel_rank() -> int:
    """This process's place among those that hold the same weights and see different sequences."""
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def is_last_stage() -> bool:
    """True on the pipeline stage that computes the loss."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def sum_over_data_parallel(tensor: torch.Tensor, with_context_parallel: bool = False) -> torch.Tensor:
    """Sum a tensor that the last pipeline stage has over data-parallel ranks, in place, and give it to every rank.

    Every rank passes a tensor of the same shape; what earlier stages pass in is overwritten.  Tensor-parallel ranks
    hold equal copies; context-parallel ranks too, unless ``with_context_parallel`` says that theirs are parts.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=with_context_parallel)
    if is_last_stage() and group.size() > 1:
        torch.distributed.all_reduce(tensor, group=group)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            tensor,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return tensor
