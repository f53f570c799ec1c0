"""Writing a learner's checkpoint, at once or while training continues.

Files are those of ``megatron.core.dist_checkpointing`` (``torch_dist``; the optimizer state is stored per model tensor,
"fully reshardable").  A checkpoint is built under a temporary name and renamed when it is complete, so a directory
without the COMPLETE marker is never one.  The marker holds the checksum of every file, which the rank that wrote it
takes while the file is still in memory.  In ``hf/`` lie the model's config and tokenizer, for
``conversion/mcore_to_hf.py``.  Weights lie in files of their own (``conversion/files/weights_alone.py``), and a
checkpoint of only the weights has no others: it is what ``conversion/hf_to_mcore.py`` makes.

An asynchronous save copies the state to host memory and writes it on a thread while training continues; planning and
writing talk over a process group of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from conversion.files.adapter_checkpoint import AdapterRecord
from conversion.files.checksums import FileRecord, record_files, write_marker
from conversion.files.companions import copy_companions
from conversion.files.directory import COMPANIONS, check_free_space, publish
from conversion.files.weights_alone import WEIGHTS_PART
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
    sharded_items,
    sharding_metadata,
)
from megatron_retool.runs.checkpoints import SaveError
from run_files.atomic_files import write_text

_groups: dict[str, tuple[Any, dist.ProcessGroup]] = {}


def _writing_group() -> dist.ProcessGroup:
    """Collectives of the writing thread run here, apart from those of training. Made by all ranks, once."""
    world = dist.group.WORLD
    if "writing" not in _groups or _groups["writing"][0] is not world:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "all ranks are members"
        _groups["writing"] = (world, group)
    return _groups["writing"][1]


class _Writer(dcp.FileSystemWriter):
    """Writes weights and the rest of a rank's state into files of their own."""

    def __init__(self, directory: str | Path, weights: frozenset[str], compression: str) -> None:
        extensions: Sequence[StreamTransformExtension] = [ZStandard()] if compression == "zstd" else []
        super().__init__(directory, sync_files=True, _extensions=extensions)
        self._weights = weights

    def storage_meta(self) -> StorageMeta | None:
        """With the path as text: a pickled Path of Python 3.13 names a module that 3.12 does not have."""
        result = super().storage_meta()
        return result and dataclasses.replace(result, checkpoint_id=str(result.checkpoint_id))

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> TorchFuture[list[WriteResult]]:
        written: list[WriteResult] = []
        for part, is_weights in ((WEIGHTS_PART, True), ("", False)):
            items = [item for item in plan.items if (item.index.fqn in self._weights) is is_weights]
            if items:
                place = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{part}")
                own = dataclasses.replace(plan, items=items, storage_data=place)
                written += super().write_data(own, planner).wait()
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(written)
        return done


class _ThreadSaveStrategy(TorchDistSaveShardedStrategy):
    """torch_dist through torch's own writer.

    Megatron's strategy forks writer processes from the training process, whose CUDA, gloo and Ray threads a fork
    leaves in an undefined state, and starts a manager process that outlives a killed trainer.
    """

    def __init__(self, copy_to_host: bool, weights: frozenset[str], compression: str) -> None:
        super().__init__()
        self.copy_to_host = copy_to_host
        self.weights = weights
        self.compression = compression
        self.records: dict[str, FileRecord] = {}
        """Of the files that this rank wrote, once they are."""

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str = "mcore"
    ) -> AsyncRequest:
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
                storage_writer=_Writer(checkpoint_dir, self.weights, self.compression),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=group,
            )
            own = Path(checkpoint_dir).glob(f"__{dist.get_rank(group)}_*.distcp")
            self.records = record_files(Path(checkpoint_dir), [path.name for path in own])

        return AsyncRequest(write, (), [])


class PendingSave:
    """A checkpoint that is being written. Every rank waits for it, in step."""

    def __init__(
        self,
        directory: Path,
        temporary: Path,
        request: AsyncRequest,
        records: Callable[[], dict[str, FileRecord]],
        before_rename: Callable[[Path], None],
    ) -> None:
        self.directory = directory
        self._temporary = temporary
        self._request = request
        self._records = records
        self._before_rename = before_rename
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[None] = self._executor.submit(request.async_fn, *request.async_fn_args)

    def wait(self) -> None:
        """Block until the checkpoint is complete; to be called once.

        Raises:
            SaveError: writing failed on some rank; the temporary directory is gone.
        """
        error = self._future.exception()
        self._executor.shutdown()
        _raise_together(error, self.directory, self._temporary)
        try:
            for finalize in self._request.finalize_fns:
                finalize()
            records: list[dict[str, FileRecord]] = [{}] * dist.get_world_size()
            dist.all_gather_object(records, self._records())
            if dist.get_rank() == 0:
                self._before_rename(self._temporary)
                _complete(self._temporary, self.directory, {name: r for own in records for name, r in own.items()})
        except Exception as caught:
            error = caught
        _raise_together(error, self.directory, self._temporary)


def save_checkpoint(
    learner: Checkpointable, directory: str | Path, *, asynchronous: bool = False, weights_only: bool = False
) -> PendingSave:
    """Begin to write a checkpoint of ``learner`` to ``directory``. Every rank calls it with the same arguments.

    One save at a time: the caller waits for the one before.

    Args:
        directory: appears when the checkpoint is complete; what was there before is replaced then.
        asynchronous: copy the state to host memory first, so that training may continue while it is written. Without it
            the state must stay as it is until the save is complete.
        weights_only: without optimizer, schedule and random state; no learner continues from it.

    Returns:
        The save, which the caller waits for.

    Raises:
        SaveError: too little room on the disk, or writing failed, on any rank. Raised on every rank; nothing is
            left of the new checkpoint, and an old one in ``directory`` is intact.
    """
    directory = Path(directory).absolute()
    temporary = directory.with_name(f".{directory.name}.incomplete")
    cpu.fix_torch_adam()
    if weights_only:
        state = model_state(learner.model_chunks, learner.architecture)
    else:
        state = full_state(learner, is_loading=False)
    dequantize(state, torch.device("cpu"))  # the GPU may have no room for all of them
    weights = [item for name in model_names(learner.model_chunks) for item in sharded_items(state[name])]
    names = frozenset(item.unique_key if isinstance(item, ShardedObject) else item.key for item in weights)
    needed = _bytes_to_write(state)
    record = adapter_record(learner)
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

    writer = _ThreadSaveStrategy(asynchronous, names, learner.config.trainer.checkpoint_compression)
    strategy: TorchDistSaveShardedStrategy | FullyParallelSaveStrategyWrapper = writer
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
            content_metadata=sharding_metadata(),
        )
    except Exception as caught:
        error = caught
    _raise_together(error, directory, temporary)
    return PendingSave(
        directory,
        temporary,
        request,
        lambda: writer.records,
        lambda path: _write_companions(learner, path / COMPANIONS, record),
    )


def _comparable(common: Mapping[str, Any]) -> dict[str, Any]:
    # Megatron compares what is not sharded across ranks; pipeline stages differ in their optimizer's parameter groups.
    return {key: value for key, value in common.items() if key != "optimizer"}


def _bytes_to_write(state: ShardedState) -> int:
    """Bytes of all ranks together, each piece counted once."""
    local = 0
    for item in sharded_items(state):
        replica = item.replica_id
        is_main = replica == 0 if isinstance(replica, int) else all(part == 0 for part in replica)
        if isinstance(item, (ShardedTensor, ShardedTensorFactory)) and is_main and item.data is not None:
            local += item.data.numel() * item.data.element_size()
    total = torch.tensor([local], dtype=torch.int64)
    dist.all_reduce(total, group=_writing_group())
    return int(total)


def _write_companions(learner: Checkpointable, target: Path, record: AdapterRecord | None) -> None:
    target.mkdir()
    if record is not None:
        record.write(target)
    model_dir = Path(learner.config.model.path) if learner.config.model.path else None
    if model_dir is not None and (model_dir / "config.json").is_file():
        copy_companions(model_dir, target)
    elif learner.architecture.hf_config:
        write_text(target / "config.json", json.dumps(dict(learner.architecture.hf_config), indent=2) + "\n")
    tokenizer = learner.config.model.tokenizer_path
    if tokenizer is not None and Path(tokenizer).is_dir():
        copy_companions(Path(tokenizer), target, keep=lambda name: not (target / name).exists())


def _complete(temporary: Path, directory: Path, records: Mapping[str, FileRecord]) -> None:
    write_marker(temporary, records)
    descriptor = os.open(temporary, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    publish(temporary, directory)


def _raise_together(error: BaseException | None, directory: Path, temporary: Path) -> None:
    """Raise on every rank if any rank failed, so that none waits for the others; clear the temporary directory."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else explain(error))
    failed = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if not failed:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    raise SaveError(f"checkpoint {directory} was not written; {'; '.join(dict.fromkeys(failed))}") from error
