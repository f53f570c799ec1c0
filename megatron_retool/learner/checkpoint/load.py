"""Reading a checkpoint into a learner, or only its weights into a model, in whatever layout it was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from conversion.files.adapter_checkpoint import read_record
from conversion.files.checksums import COMPLETE_NAME, Fault, find_faults, raise_damaged
from conversion.files.dist_checkpoint import DistCheckpoint, DistCheckpointError
from conversion.files.predictors import PREFIX as CARRIED_PREFIX
from conversion.model.architecture import Architecture
from conversion.model.mapping import Mapping, shard, to_mcore
from conversion.model.weight_map import PREDICTOR_PREFIX, CheckpointPlace
from megatron_retool.errors import OperationError
from megatron_retool.learner import cpu
from megatron_retool.learner.checkpoint.state import (
    Checkpointable,
    ShardedState,
    adapter_record,
    dequantize,
    explain,
    full_state,
    model_names,
    model_state,
    set_random_state,
    sharded_items,
)
from megatron_retool.learner.optimizer import round_main_parameters
from megatron_retool.learner.weights import (
    TensorParallelPlace,
    global_parameters,
    global_tensors,
    local_weight_map,
    unwrap,
)


class CheckpointError(OperationError):
    """A checkpoint cannot be read. The message names the directory and the reason."""


def load_checkpoint(learner: Checkpointable, directory: str | Path) -> None:
    """Continue from ``save_checkpoint``'s directory, whatever layout wrote it.

    In the layout that wrote it, the random state continues too; another layout keeps the state it has.

    Raises:
        CheckpointError: the directory is incomplete, or lacks a tensor of the model or of its optimizer.
        DamagedError: a file is not what it was when it was written.
    """
    directory = Path(directory)
    checkpoint = _open(directory)
    if learner.config.trainer.verify_checkpoints:
        verify_together(directory)
    _check_same_optimizer(learner, directory)
    _check_same_adapters(learner, directory)
    cpu.fix_torch_adam()
    state = full_state(learner, is_loading=True)
    if state["random"].unique_key not in checkpoint.objects:
        del state["random"]
    loaded = _load(state, directory, checkpoint)
    for chunk, name in zip(learner.model_chunks, model_names(learner.model_chunks), strict=True):
        unwrap(chunk).load_state_dict(loaded[name], strict=False)
    if learner.config.learner.use_distributed_optimizer:
        _load_distributed_optimizer(learner.optimizer, loaded["optimizer"], loaded["learner"])
        # A learner that keeps weights in FP8 stores what they stand for, which is less than its main parameters hold.
        round_main_parameters(learner.optimizer, learner.model_chunks)
    else:
        _load_plain_optimizer(learner.optimizer, loaded.get("optimizer", {}), loaded["learner"])
    _load_schedule(learner.scheduler, loaded["scheduler"])
    if "random" in loaded:
        set_random_state(loaded["random"])


def verify_together(directory: str | Path) -> None:
    """Hold a directory's files against its checksums, where it has some; every rank reads its share of them.

    Raises:
        DamagedError: on every rank, naming the files that are not what they were.
    """
    directory, ranks = Path(directory), dist.get_world_size()
    result: list[list[Fault]] = [[] for _ in range(ranks)]
    dist.all_gather_object(result, find_faults(directory, part=dist.get_rank(), parts=ranks))
    raise_damaged(directory, [fault for faults in result for fault in faults])


def _check_same_optimizer(learner: Checkpointable, directory: Path) -> None:
    stored = dist_checkpointing.load_common_state_dict(str(directory)).get("learner")
    if stored is None:
        raise CheckpointError(f"{directory} holds weights without optimizer state: give it as model.mcore_path instead")
    distributed = stored["use_distributed_optimizer"]
    if learner.config.learner.use_distributed_optimizer != distributed:
        raise CheckpointError(
            f"{directory} was saved with learner.use_distributed_optimizer={distributed}: load it with the same"
        )
    names = {"adam": "adamw"}
    own, other = learner.optimizer.config.optimizer, stored.get("optimizer", "adam")
    if own != other:
        raise CheckpointError(
            f"{directory} was saved with optimizer.name={names.get(other, other)}, whose state "
            f"{names.get(own, own)} cannot resume from: load it with the same, or give it as model.mcore_path to start "
            "from its weights"
        )


def _check_same_adapters(learner: Checkpointable, directory: Path) -> None:
    stored, own = read_record(directory), adapter_record(learner)
    if stored is None and own is None:
        return
    if own is None or stored is None:
        was = f"adapters of rank {stored.rank}" if stored else "all weights"
        raise CheckpointError(
            f"{directory} holds {was}, and learner.lora.rank={learner.config.learner.lora.rank}: load it with "
            f"learner.lora.rank={stored.rank if stored else 0}"
        )
    for name in ("rank", "alpha", "targets"):
        was, now = getattr(stored, name), getattr(own, name)
        if was != now:
            raise CheckpointError(
                f"{directory} was saved with learner.lora.{name}={_as_yaml(was)}, and this run has {_as_yaml(now)}: "
                "load it with the same"
            )
    if stored.base_checksum != own.base_checksum:
        raise CheckpointError(
            f"{directory} holds adapters of the model in {stored.base}, and the weights in {own.base} are others: "
            "start from the same model"
        )


def _as_yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


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


def _load_plain_optimizer(optimizer: Any, tensors: dict[Any, Any], stored: dict[str, Any]) -> None:
    parts = optimizer.chained_optimizers
    for number, part in enumerate(parts):
        if getattr(part, "is_stub_optimizer", False):
            continue
        own = tensors if len(parts) == 1 else tensors.get(number, {})
        state = part.state_dict()
        inner, result = (state["optimizer"], own.get("optimizer", {})) if "optimizer" in state else (state, own)
        inner["state"] = dict(result.get("state", {}))
        if isinstance(part.optimizer, torch.optim.Adam):
            for tensors_of_one in inner["state"].values():
                tensors_of_one["step"] = torch.tensor(float(stored["optimizer_step"]))
        elif "betas" in part.optimizer.defaults:
            for group in inner["param_groups"]:
                group["step"] = stored["optimizer_step"]
        if stored["grad_scaler"] is not None:
            state["grad_scaler"] = stored["grad_scaler"]
        if "fp32_from_fp16_params" in state:
            main = own.get("fp32_from_fp16_params", {})
            state["fp32_from_fp16_params"] = [
                [main[group][position] for position in range(len(parameters))]
                for group, parameters in enumerate(state["fp32_from_fp16_params"])
            ]
        part.load_state_dict(state)


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
    """Fill the model from a converted checkpoint or from one of the learner's, in any layout; only the weights.

    Parameters that are not the language model's (a critic's value head) keep their values where the checkpoint does
    not have them. Layers for multi-token prediction are read as conversion carries them along, where no learner has
    trained them. As with ``load_hf_weights``, an optimizer that exists already has to reload its main parameters.

    Raises:
        CheckpointError: the directory is incomplete or lacks a tensor of the model.
    """
    directory = Path(directory)
    checkpoint = _open(directory)
    if read_record(directory) is not None:
        raise CheckpointError(
            f"{directory} holds adapters without their model: export both with conversion/mcore_to_hf.py, and give "
            "what it writes as model.path"
        )
    state = model_state(model_chunks, architecture)
    weight_map = local_weight_map(model_chunks, architecture)
    own = {id(parameter) for name, parameter in global_parameters(model_chunks) if name not in weight_map}
    predictors = {name: t for name, t in global_tensors(model_chunks) if name.startswith(PREDICTOR_PREFIX)}
    carried = {} if any(key.startswith(PREDICTOR_PREFIX) for key in checkpoint.tensors) else predictors
    for part in state.values():
        for name in [n for n, item in part.items() if carried and item.key.startswith(PREDICTOR_PREFIX)]:
            del part[name]
        for name in [n for n, item in part.items() if id(item.data) in own and item.key not in checkpoint.tensors]:
            del part[name]
    loaded = _load(state, directory, checkpoint)
    for chunk, name in zip(model_chunks, model_names(model_chunks), strict=True):
        unwrap(chunk).load_state_dict(loaded[name], strict=False)
    for name, tensor in carried.items():
        tensor.data.copy_(_carried(weight_map[name], checkpoint))


def _carried(mapping: Mapping, checkpoint: DistCheckpoint) -> torch.Tensor:
    """This rank's part of a parameter whose Hugging Face tensors a converted checkpoint carries along."""
    try:
        named = zip(mapping.hf_names, mapping.hf_shapes, strict=True)
        tensors = [checkpoint.read(CheckpointPlace(CARRIED_PREFIX + name), shape) for name, shape in named]
    except DistCheckpointError as error:
        raise CheckpointError(f"{error}: convert the model with its layers for multi-token prediction") from error
    return shard(mapping, to_mcore(mapping, tensors), *TensorParallelPlace.current().of(mapping))


def _open(directory: Path) -> DistCheckpoint:
    if not (directory / COMPLETE_NAME).is_file() and not (directory.parent / COMPLETE_NAME).is_file():
        raise CheckpointError(f"{directory} has no {COMPLETE_NAME} marker: it does not exist or was never completed")
    try:
        return DistCheckpoint(directory)
    except DistCheckpointError as error:
        raise CheckpointError(str(error)) from error


def _load(state: ShardedState, directory: Path, checkpoint: DistCheckpoint) -> dict[str, Any]:
    _drop_absent_extra_state(state, checkpoint)
    dequantize(state)
    wanted = {item.key for item in sharded_items(state) if not isinstance(item, ShardedObject)}
    missing = sorted(wanted - checkpoint.tensors.keys())
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(f"{directory} lacks {shown}: it holds another model, or weights without optimizer state")
    strategy = get_default_load_sharded_strategy(str(directory))
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, replicas)
    try:
        checkpoint.check_objects()
        return dict(dist_checkpointing.load(state, str(directory), strategy))
    except Exception as error:
        raise CheckpointError(f"{directory} cannot be loaded: {explain(error)}") from error


def _drop_absent_extra_state(state: Any, checkpoint: DistCheckpoint) -> None:
    """Transformer Engine keeps FP8 scales in objects that a checkpoint from elsewhere does not have."""
    for value in state.values():
        if not isinstance(value, dict):
            continue
        for name in [n for n, item in value.items() if isinstance(item, ShardedObject)]:
            if value[name].key.endswith("_extra_state") and value[name].unique_key not in checkpoint.objects:
                del value[name]
