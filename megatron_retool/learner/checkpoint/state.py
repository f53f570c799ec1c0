"""What a learner's checkpoint holds: model, optimizer, schedule and random state, loadable in any other layout."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

from conversion.files.adapter_checkpoint import AdapterRecord, weight_files, weights_checksum
from conversion.files.checksums import FileRecord, record_files
from conversion.files.dist_checkpoint import SHARDING_METADATA
from conversion.model.architecture import Architecture
from megatron_retool.learner.adapters import Adapter
from megatron_retool.learner.weights import unwrap

ShardedState = dict[str, Any]


class Checkpointable(Protocol):
    """What is saved: the attributes of ``Learner`` that this module reads."""

    config: Any
    architecture: Architecture
    optimizer: Any
    scheduler: Any
    base: Path | None
    base_checksum: str | None

    @property
    def model_chunks(self) -> Sequence[torch.nn.Module]:
        """This rank's virtual pipeline stages."""


def sharding_metadata() -> dict[str, Any]:
    """How Megatron-Core lays out the state, the same for saving and loading."""
    # Optimizer state is gathered to one data-parallel rank in host memory: the other way holds it on every GPU.
    return {**SHARDING_METADATA, "distrib_optim_fully_reshardable_mem_efficient": True}


def model_state(model_chunks: Sequence[torch.nn.Module], architecture: Architecture) -> ShardedState:
    """The model's tensors; of a model with adapters only what is trained."""
    modules: list[Any] = [unwrap(chunk) for chunk in model_chunks]
    states = [module.sharded_state_dict(metadata=sharding_metadata()) for module in modules]
    for state in states:
        for item in sharded_items(state):
            if _of_layer_with_experts(item.key, architecture):
                # The local spec names this norm as if it were fused into a linear layer, which experts do not have.
                item.key = item.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    for number, module in enumerate(modules):
        if any(isinstance(part, Adapter) for part in module.modules()):
            trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
            states[number] = {name: item for name, item in states[number].items() if id(item.data) in trained}
    return dict(zip(model_names(model_chunks), states, strict=True))


def adapter_record(learner: Checkpointable) -> AdapterRecord | None:
    """What the learner's adapters are; None: it has none. Every rank calls it: the first time, each reads some of the
    base's files."""
    settings = learner.config.learner.lora
    if not settings.rank:
        return None
    if learner.base_checksum is None:
        records: list[dict[str, FileRecord]] = [{}] * dist.get_world_size()
        if learner.base is not None:
            own = weight_files(learner.base)[dist.get_rank() :: dist.get_world_size()]
            dist.all_gather_object(records, record_files(learner.base, own))
        learner.base_checksum = weights_checksum({name: each for part in records for name, each in part.items()})
    return AdapterRecord(
        settings.rank,
        settings.alpha,
        tuple(settings.targets),
        "" if learner.base is None else str(learner.base.absolute()),
        learner.base_checksum,
    )


def _of_layer_with_experts(key: str, architecture: Architecture) -> bool:
    # Where all layers are alike, their keys have no number.
    numbered = re.match(r"decoder\.layers\.(\d+)\.", key)
    return architecture.has_experts(int(numbered[1])) if numbered else architecture.is_moe


def model_names(model_chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Under which names the state holds the virtual pipeline stages."""
    return ["model"] if len(model_chunks) == 1 else [f"model{stage}" for stage in range(len(model_chunks))]


def full_state(learner: Checkpointable, is_loading: bool) -> ShardedState:
    """Model, optimizer, schedule and random state as sharded tensors and objects.

    Args:
        is_loading: the tensors are going to be overwritten.
    """
    state = model_state(learner.model_chunks, learner.architecture)
    distributed = learner.config.learner.use_distributed_optimizer
    if not (distributed and is_loading):
        begin_moments(learner.optimizer)
    optimizer = learner.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=sharding_metadata())
    # Only tensors: parameter groups are the configuration's, and there are as many optimizers as the layout needs.
    state["optimizer"] = _tensors_alone(optimizer) if distributed else _sharded_alone(optimizer)
    state["scheduler"] = learner.scheduler.state_dict()
    state["random"] = _random_state_object(_random_state())
    state["learner"] = {
        "use_distributed_optimizer": distributed,
        "optimizer": learner.optimizer.config.optimizer,
        "optimizer_step": optimizer_step(learner.optimizer),
        "grad_scaler": _grad_scaler(learner.optimizer),
    }
    return state


def begin_moments(optimizer: Any) -> None:
    """Make the moments of an optimizer that has made no step yet, as zeros: a checkpoint without them is none."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.optimizer.state:
            continue
        inner = part.optimizer
        if hasattr(inner, "sub_optimizers"):  # with state on the host
            for each in inner.sub_optimizers:
                _begin_adam(each)
            inner._sync_sub_optimizers_state_to_hdo()
        elif isinstance(inner, torch.optim.Adam):
            _begin_adam(inner)
        elif part.config.use_precision_aware_optimizer:
            # Transformer Engine's Adam, which Megatron-Core's function calls without the second argument.
            for parameter in _parameters(inner):
                inner.initialize_state(parameter, inner.store_param_remainders and parameter.dtype == torch.bfloat16)
        else:
            part.init_state_fn(inner, part.config)


def _begin_adam(optimizer: torch.optim.Optimizer) -> None:
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _grad_scaler(optimizer: Any) -> dict[str, Any] | None:
    """The dynamic loss scale of float16 training, the same on every rank; None in other precisions.

    On the host: it is saved beside what every reader of a checkpoint opens, who may have no GPU.
    """
    scalers = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
    state = next((scaler.state_dict() for scaler in scalers if scaler is not None), None)
    return state and {name: value.cpu() if torch.is_tensor(value) else value for name, value in state.items()}


def _tensors_alone(optimizer_state: dict[Any, Any]) -> dict[Any, Any]:
    if "param_state" not in optimizer_state:
        return {number: _tensors_alone(part) for number, part in optimizer_state.items()}
    # Ranks that are not the one which gathered the state have none to save.
    return {} if optimizer_state["param_state"] is None else {"param_state": optimizer_state["param_state"]}


def _sharded_alone(state: Any) -> Any:
    """The sharded tensors of a state that is nested in mappings and lists; lists become mappings by position, since
    those of two layouts may differ in length."""
    if isinstance(state, ShardedBase):
        return state
    items = enumerate(state) if isinstance(state, (list, tuple)) else state.items()
    kept = ((key, value) for key, value in items if isinstance(value, (ShardedBase, Mapping, list, tuple)))
    inner = {key: _sharded_alone(value) for key, value in kept}
    return {key: value for key, value in inner.items() if isinstance(value, ShardedBase) or value}


def optimizer_step(optimizer: Any) -> int:
    """Steps that Adam has counted; the same on every rank, though some hold no parameter of some optimizer."""
    counts = [0]
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        inner = part.optimizer
        counts += [int(state["step"]) for state in inner.state.values() if "step" in state]
        counts += [int(group["step"]) for group in inner.param_groups if group.get("step") is not None]
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, max(counts))
    return max(steps)


def sharded_items(state: Any) -> Iterable[Any]:
    """All sharded tensors and objects in nested mappings and sequences."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from sharded_items(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from sharded_items(value)
    elif isinstance(state, ShardedBase):
        yield state


def dequantize(state: ShardedState, device: torch.device | None = None) -> None:
    """Put what FP8 and FP4 parameters stand for in their place, one after another, on ``device`` (None: on theirs)."""
    for item in sharded_items(state):
        if is_float8tensor(item.data):
            item.data = dequantize_fp8_tensor(item.data).to(device)


def _random_state() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": {name: value.cpu() for name, value in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _random_state_object(state: dict[str, Any]) -> ShardedObject:
    # One object for each rank, under a key that says how many there are: another layout finds none of its own.
    world, rank = dist.get_world_size(), dist.get_rank()
    place = "x".join(
        str(size)
        for size in (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
    )
    return ShardedObject(f"random_state.{place}", state, (world,), (rank,), replica_id=0)


def set_random_state(state: dict[str, Any]) -> None:
    """Continue the random generators of Python, numpy, torch and Megatron-Core."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def explain(error: BaseException) -> str:
    """The error's message. torch wraps each rank's exception with its traceback; then the causes, which tell enough."""
    if isinstance(error, dcp.CheckpointException):
        causes = {str(wrapped[0]) or repr(wrapped[0]) for wrapped in error.failures.values()}
        return "; ".join(sorted(causes)) or "another rank failed"
    return str(error) or repr(error)
