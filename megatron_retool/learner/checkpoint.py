"""The learner's checkpoints: model, optimizer, schedule and random state, loadable in any other layout.

Files are those of ``megatron.core.dist_checkpointing`` (``torch_dist``; the optimizer state is stored per model tensor,
"fully reshardable").  A checkpoint is built under a temporary name and renamed when it is complete, so a directory
without the COMPLETE marker is never one.  In ``hf/`` lie the model's config and tokenizer, for
``conversion/mcore_to_hf.py``.

An asynchronous save copies the state to host memory and writes it on a thread while training goes on; planning and
writing talk over a process group of their own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from conversion.files.directory import COMPANIONS, COMPLETE_NAME, check_free_space, publish
from conversion.files.dist_checkpoint import SHARDING_METADATA, DistCheckpoint, DistCheckpointError
from conversion.files.hf_checkpoint import copy_companions, write_text
from conversion.model.architecture import Architecture
from megatron_retool.learner import cpu
from megatron_retool.learner.weights import global_parameters, local_weight_map, unwrap

ShardedState = dict[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the directory and the reason."""


class Checkpointable(Protocol):
    """What is saved: the attributes of ``Learner`` that this module reads."""

    config: Any
    architecture: Architecture
    model_chunks: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any


# --- what a checkpoint holds -------------------------------------------------------------------------------------


def _sharding_metadata() -> dict[str, Any]:
    # Optimizer state is gathered to one data-parallel rank in host memory: the other way holds it on every GPU.
    return {**SHARDING_METADATA, "distrib_optim_fully_reshardable_mem_efficient": True}


def _model_state(model_chunks: Sequence[torch.nn.Module], architecture: Architecture) -> ShardedState:
    states = [unwrap(chunk).sharded_state_dict(metadata=_sharding_metadata()) for chunk in model_chunks]
    for state in states:
        for item in _sharded_items(state):
            if architecture.is_moe:
                # The local spec names this norm as if it were fused into a linear layer, which experts do not have.
                item.key = item.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    if len(states) == 1:
        return {"model": states[0]}
    return {f"model{stage}": state for stage, state in enumerate(states)}


def _full_state(learner: Checkpointable, is_loading: bool) -> ShardedState:
    state = _model_state(learner.model_chunks, learner.architecture)
    optimizer = learner.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_sharding_metadata())
    distributed = learner.config.learner.use_distributed_optimizer
    # Only tensors: parameter groups are the configuration's, and there are as many optimizers as the layout needs.
    state["optimizer"] = _tensors_alone(optimizer) if distributed else optimizer
    state["scheduler"] = learner.scheduler.state_dict()
    state["random"] = _random_state_object(_random_state())
    state["learner"] = {
        "use_distributed_optimizer": distributed,
        "optimizer_step": _optimizer_step(learner.optimizer),
        "grad_scaler": _grad_scaler(learner.optimizer),
    }
    return state


def _grad_scaler(optimizer: Any) -> dict[str, Any] | None:
    """The dynamic loss scale of float16 training, the same on every rank; None in other precisions."""
    scalers = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
    return next((scaler.state_dict() for scaler in scalers if scaler is not None), None)


def _tensors_alone(optimizer_state: dict[Any, Any]) -> dict[Any, Any]:
    if "param_state" not in optimizer_state:
        return {number: _tensors_alone(part) for number, part in optimizer_state.items()}
    # Ranks that are not the one which gathered the state have none to save.
    return {} if optimizer_state["param_state"] is None else {"param_state": optimizer_state["param_state"]}


def _optimizer_step(optimizer: Any) -> int:
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


def _sharded_items(state: Any) -> Iterable[Any]:
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _sharded_items(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _sharded_items(value)
    elif isinstance(state, ShardedBase):
        yield state


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


def _set_random_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# --- saving ------------------------------------------------------------------------------------------------------


_groups: dict[str, tuple[Any, dist.ProcessGroup]] = {}


def _writing_group() -> dist.ProcessGroup:
    """Collectives of the writing thread run here, apart from those of training. Made by all ranks, once."""
    world = dist.group.WORLD
    if "writing" not in _groups or _groups["writing"][0] is not world:
        _groups["writing"] = (world, dist.new_group(backend="gloo"))
    return _groups["writing"][1]


class _ThreadSaveStrategy(AsyncSaveShardedStrategy):
    """torch_dist through torch's own writer.

    Megatron's strategy forks writer processes from the training process, whose CUDA, gloo and Ray threads a fork
    leaves in an undefined state, and starts a manager process that outlives a killed trainer.
    """

    def __init__(self, copy_to_host: bool) -> None:
        super().__init__("torch_dist", 1)
        self.copy_to_host = copy_to_host

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        if self.copy_to_host:
            for items in by_key.values():
                for item in items:
                    if isinstance(item, ShardedTensor):
                        item.data = item.data.detach().to("cpu", copy=True)
        state = mcore_to_pyt_state_dict(by_key, False)
        group = _writing_group()

        def write() -> None:
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(checkpoint_dir, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=group,
            )

        return AsyncRequest(write, (), [])

    def can_handle_sharded_objects(self) -> bool:
        return True


_in_flight: list[PendingSave] = []


class PendingSave:
    """A checkpoint that is being written. Every rank polls or waits, in step."""

    def __init__(
        self,
        directory: Path,
        temporary: Path,
        request: AsyncRequest,
        before_rename: Callable[[Path], None],
        on_complete: Callable[[], None],
    ) -> None:
        self.directory = directory
        self._temporary = temporary
        self._request = request
        self._before_rename = before_rename
        self._on_complete = on_complete
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[None] = self._executor.submit(request.async_fn, *request.async_fn_args)
        self.finished = False
        _in_flight.append(self)

    def poll(self) -> bool:
        """Complete the checkpoint if every rank has written its part; returns whether it is complete.

        Raises:
            CheckpointError: writing failed on some rank; the temporary directory is gone.
        """
        if not self.finished and _agree(self._future.done()):
            self._finish()
        return self.finished

    def wait(self) -> None:
        """Block until the checkpoint is complete. Raises as ``poll`` does."""
        if not self.finished:
            # An error is raised together with the other ranks below.
            self._future.exception()
            self._finish()

    def _finish(self) -> None:
        self.finished = True
        _in_flight.remove(self)
        self._executor.shutdown()
        _raise_together(self._future.exception(), self.directory, self._temporary)
        error: BaseException | None = None
        try:
            for finalize in self._request.finalize_fns:
                finalize()
            if dist.get_rank() == 0:
                self._before_rename(self._temporary)
                _complete(self._temporary, self.directory)
                self._on_complete()
        except Exception as caught:
            error = caught
        _raise_together(error, self.directory, self._temporary)


def save_checkpoint(
    learner: Checkpointable,
    directory: str | Path,
    *,
    asynchronous: bool = False,
    on_complete: Callable[[], None] = lambda: None,
) -> PendingSave:
    """Write a checkpoint of ``learner`` to ``directory``. Every rank calls it with the same arguments.

    A save that is still in flight is completed first.

    Args:
        directory: appears when the checkpoint is complete; what was there before is replaced then.
        asynchronous: return as soon as the state is copied to host memory; the caller polls or waits.
        on_complete: run by rank 0 after the rename (to commit what surrounds the checkpoint, or to prune old ones).

    Returns:
        The save; finished already unless ``asynchronous``.

    Raises:
        CheckpointError: too little room on the disk, or writing failed, on any rank. Raised on every rank; nothing is
            left of the new checkpoint, and an old one in ``directory`` is intact.
    """
    finish_pending_saves()
    directory = Path(directory).absolute()
    temporary = directory.with_name(f".{directory.name}.incomplete")
    cpu.fix_torch_adam()
    state = _full_state(learner, is_loading=False)
    needed = _bytes_to_write(state)
    error: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            check_free_space(directory.parent, needed)
            temporary.mkdir()
        except OSError as caught:
            error = caught
    _raise_together(error, directory, temporary)

    strategy: AsyncSaveShardedStrategy = _ThreadSaveStrategy(copy_to_host=asynchronous)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        strategy = FullyParallelSaveStrategyWrapper(strategy, replicas)
    try:
        request = dist_checkpointing.save(
            state,
            str(temporary),
            strategy,
            async_sharded_save=True,
            preprocess_common_before_consistancy_check=_comparable,
            content_metadata=_sharding_metadata(),
        )
    except Exception as caught:
        error = caught
    _raise_together(error, directory, temporary)
    save = PendingSave(
        directory, temporary, request, lambda path: _write_companions(learner, path / COMPANIONS), on_complete
    )
    if not asynchronous:
        save.wait()
    return save


def finish_pending_saves() -> None:
    """Complete what is still being written; before the process groups are left, for one. Every rank calls it.

    Raises:
        CheckpointError: as ``PendingSave.wait``.
    """
    for save in list(_in_flight):
        save.wait()


def _comparable(common: Mapping[str, Any]) -> dict[str, Any]:
    # Megatron compares what is not sharded across ranks; pipeline stages differ in their optimizer's parameter groups.
    return {key: value for key, value in common.items() if key != "optimizer"}


def _bytes_to_write(state: ShardedState) -> int:
    """Bytes of all ranks together, each piece counted once."""
    local = 0
    for item in _sharded_items(state):
        replica = item.replica_id
        is_main = replica == 0 if isinstance(replica, int) else all(part == 0 for part in replica)
        if isinstance(item, (ShardedTensor, ShardedTensorFactory)) and is_main and item.data is not None:
            local += item.data.numel() * item.data.element_size()
    total = torch.tensor([local], dtype=torch.int64)
    dist.all_reduce(total, group=_writing_group())
    return int(total)


def _write_companions(learner: Checkpointable, target: Path) -> None:
    target.mkdir()
    model_dir = Path(learner.config.model.path) if learner.config.model.path else None
    if model_dir is not None and (model_dir / "config.json").is_file():
        copy_companions(model_dir, target)
    elif learner.architecture.hf_config:
        write_text(target / "config.json", json.dumps(dict(learner.architecture.hf_config), indent=2) + "\n")
    tokenizer = learner.config.model.tokenizer_path
    if tokenizer is not None and Path(tokenizer).is_dir():
        copy_companions(Path(tokenizer), target, keep=lambda name: not (target / name).exists())


def _complete(temporary: Path, directory: Path) -> None:
    with open(temporary / COMPLETE_NAME, "w") as marker:
        os.fsync(marker.fileno())
    descriptor = os.open(temporary, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    publish(temporary, directory)


def _agree(ready: bool) -> bool:
    """True where every rank is ready."""
    flag = torch.tensor([int(ready)])
    # Not the writing group: the writing thread may be using it.
    if dist.get_backend() == "nccl":
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _raise_together(error: BaseException | None, directory: Path, temporary: Path) -> None:
    """Raise on every rank if any rank failed, so that none waits for the others; clear the temporary directory."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else _explain(error))
    failed = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if not failed:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    raise CheckpointError(f"checkpoint {directory} was not written; {'; '.join(dict.fromkeys(failed))}") from error


def _explain(error: BaseException) -> str:
    # torch wraps each rank's exception together with its traceback; the cause is what a reader can act on.
    if isinstance(error, dcp.CheckpointException):
        causes = {str(wrapped[0]) or repr(wrapped[0]) for wrapped in error.failures.values()}
        return "; ".join(sorted(causes)) or "another rank failed"
    return str(error) or repr(error)


# --- loading -----------------------------------------------------------------------------------------------------


def load_checkpoint(learner: Checkpointable, directory: str | Path) -> None:
    """Continue from ``save_checkpoint``'s directory, whatever layout wrote it.

    In the layout that wrote it, the random state continues too; another layout keeps the state it has.

    Raises:
        CheckpointError: the directory is incomplete, or lacks a tensor of the model or of its optimizer.
    """
    directory = Path(directory)
    checkpoint = _open(directory)
    _check_same_optimizer(learner, directory)
    cpu.fix_torch_adam()
    state = _full_state(learner, is_loading=True)
    if state["random"].unique_key not in checkpoint.objects:
        del state["random"]
    loaded = _load(state, directory, checkpoint)
    for chunk, name in zip(learner.model_chunks, _model_names(learner.model_chunks), strict=True):
        unwrap(chunk).load_state_dict(loaded[name], strict=False)
    if learner.config.learner.use_distributed_optimizer:
        _load_distributed_optimizer(learner.optimizer, loaded["optimizer"], loaded["learner"])
    else:
        learner.optimizer.load_state_dict(loaded["optimizer"])
    _load_schedule(learner.scheduler, loaded["scheduler"])
    if "random" in loaded:
        _set_random_state(loaded["random"])


def _check_same_optimizer(learner: Checkpointable, directory: Path) -> None:
    stored = dist_checkpointing.load_common_state_dict(str(directory)).get("learner")
    if stored is None:
        raise CheckpointError(f"{directory} holds weights without optimizer state: give it as model.mcore_path instead")
    distributed = stored["use_distributed_optimizer"]
    if learner.config.learner.use_distributed_optimizer != distributed:
        raise CheckpointError(
            f"{directory} was saved with learner.use_distributed_optimizer={distributed}: load it with the same"
        )


def _load_distributed_optimizer(optimizer: Any, tensors: dict[Any, Any], stored: dict[str, Any]) -> None:
    parts = optimizer.chained_optimizers
    for number, part in enumerate(parts):
        if getattr(part, "is_stub_optimizer", False):
            continue
        state = part.state_dict()
        for group in state["optimizer"]["param_groups"]:
            group["step"] = stored["optimizer_step"]
        if stored["grad_scaler"] is not None:
            state["grad_scaler"] = stored["grad_scaler"]
        own = tensors if len(parts) == 1 else tensors[number]
        part.load_state_dict({**state, **own, "param_state_sharding_type": "fully_reshardable"})


def _load_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Take the number of steps from the checkpoint and the schedule's shape from the configuration.

    So a run may be resumed with another learning rate or for more steps.
    """
    for group in scheduler.optimizer.param_groups:
        group.update({name: getattr(scheduler, name) for name in ("max_lr", "min_lr") if name in group})
    scheduler.num_steps = 0
    scheduler.step(increment=state["num_steps"])


def load_model_weights(
    model_chunks: Sequence[torch.nn.Module], architecture: Architecture, directory: str | Path
) -> None:
    """Fill the model from a converted checkpoint or from one of the learner's, in any layout; weights alone.

    Parameters that are not the language model's (a critic's value head) keep their values where the checkpoint does
    not have them. As with ``load_hf_weights``, an optimizer that exists already has to reload its main parameters.

    Raises:
        CheckpointError: the directory is incomplete or lacks a tensor of the model.
    """
    directory = Path(directory)
    checkpoint = _open(directory)
    state = _model_state(model_chunks, architecture)
    weight_map = local_weight_map(model_chunks, architecture)
    own = {id(parameter) for name, parameter in global_parameters(model_chunks) if name not in weight_map}
    for part in state.values():
        for name in [n for n, item in part.items() if id(item.data) in own and item.key not in checkpoint.tensors]:
            del part[name]
    loaded = _load(state, directory, checkpoint)
    for chunk, name in zip(model_chunks, _model_names(model_chunks), strict=True):
        unwrap(chunk).load_state_dict(loaded[name], strict=False)


def _model_names(model_chunks: Sequence[torch.nn.Module]) -> list[str]:
    return ["model"] if len(model_chunks) == 1 else [f"model{stage}" for stage in range(len(model_chunks))]


def _open(directory: Path) -> DistCheckpoint:
    if not (directory / COMPLETE_NAME).is_file() and not (directory.parent / COMPLETE_NAME).is_file():
        raise CheckpointError(f"{directory} has no {COMPLETE_NAME} marker: it does not exist or was never completed")
    try:
        return DistCheckpoint(directory)
    except DistCheckpointError as error:
        raise CheckpointError(str(error)) from error


def _load(state: ShardedState, directory: Path, checkpoint: DistCheckpoint) -> dict[str, Any]:
    _drop_absent_extra_state(state, checkpoint)
    wanted = {item.key for item in _sharded_items(state) if not isinstance(item, ShardedObject)}
    missing = sorted(wanted - checkpoint.tensors.keys())
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(f"{directory} lacks {shown}: it holds another model, or weights without optimizer state")
    strategy = get_default_load_sharded_strategy(str(directory))
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, replicas)
    try:
        return dict(dist_checkpointing.load(state, str(directory), strategy))
    except Exception as error:
        raise CheckpointError(f"{directory} cannot be loaded: {_explain(error)}") from error


def _drop_absent_extra_state(state: Any, checkpoint: DistCheckpoint) -> None:
    """Transformer Engine keeps FP8 scales in objects that a checkpoint from elsewhere does not have."""
    for value in state.values():
        if not isinstance(value, dict):
            continue
        for name in [n for n, item in value.items() if isinstance(item, ShardedObject)]:
            if value[name].key.endswith("_extra_state") and value[name].unique_key not in checkpoint.objects:
                del value[name]


# --- retention ---------------------------------------------------------------------------------------------------
