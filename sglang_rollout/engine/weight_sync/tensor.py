"""Weights as handles of memory that the engines map."""

from __future__ import annotations

import base64
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch

from sglang_rollout.engine.weight_sync.base import Bucket, ServerWeightSync, is_local
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

_PATH = "/update_weights_from_tensor"


class TensorWeightSync(ServerWeightSync):
    """Handles of memory that the engines map: shared memory on CPU, CUDA IPC on GPU.

    Engines must run on this process's host (and, on GPU, see its device). Each bucket is copied once into a flat
    buffer: one handle for each reader, whatever the number of tensors. While the engines load it, the learner's ranks
    exchange the next one, so that two buckets take memory at a time: the flat one, and the one that is put together.
    """

    def __init__(self, engines: Sequence[str], **common: Any) -> None:
        super().__init__(engines, **common)
        self._memory: _SharedMemory | None = None
        self._loading: tuple[dict[str, Future[dict[str, Any]]], torch.Tensor] | None = None
        """The engines' answers to the bucket that they are loading, and the bucket, which lasts as long."""

    def _probe(self) -> None:
        super()._probe()
        foreign = [url for url in self.engines if not is_local(url)]
        if foreign:
            raise WeightSyncError(
                f"weight_sync.method=tensor shares memory, but {', '.join(foreign)} is on another host: use "
                "weight_sync.method=distributed",
                foreign,
            )

    def _send(self, bucket: Bucket) -> None:
        self._finish_sending()
        device = bucket[0][1].device
        flat = self._flat(sum(tensor.nbytes for _, tensor in bucket), device)
        metadata, offset = [], 0
        for name, tensor in bucket:
            end = offset + tensor.nbytes
            flat[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            metadata.append(
                SimpleNamespace(
                    name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=offset, end_idx=end, numel=end - offset
                )
            )
            offset = end
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        value = {"flattened_tensor": flat if self._memory is None else self._memory.path, "metadata": metadata}
        bodies: dict[str, dict[str, Any] | None] = {
            url: {
                # Every tensor-parallel rank of every engine maps the same memory and takes its own part. Each needs a
                # handle of its own: a handle is one count on the memory, and the rank that opens it takes it down.
                "serialized_named_tensors": [_pickled(value) for _ in range(int(self._infos[url].get("tp_size") or 1))],
                "load_format": "flattened_bucket",
                **self._models,
                "flush_cache": False,
            }
            for url in self.engines
        }
        self._loading = self._start_all(_PATH, bodies), flat

    def _finish_sending(self, check: bool = True) -> None:
        loading, self._loading = self._loading, None
        if loading is None:
            return
        try:
            self._await_all(loading[0], _PATH, check)
        finally:
            del loading  # an error's traceback would keep the bucket

    def _end(self, version: int) -> None:
        super()._end(version)
        self._free()

    def _give_up(self) -> None:
        self._finish_sending(check=False)  # none of them reads memory that is given back
        super()._give_up()
        self._free()

    def _flat(self, size: int, device: torch.device) -> torch.Tensor:
        """Memory for a bucket of ``size`` bytes."""
        if device.type == "cuda":
            # Never the one before: an engine answers when its first rank is done, while others may be reading still.
            # torch gives memory back when every reader has closed it, and not earlier.
            torch.cuda.ipc_collect()
            with _ordinary_segments():
                return torch.empty(size, dtype=torch.uint8, device=device)
        if self._memory is None or self._memory.tensor.numel() < size:
            self._free()
            self._memory = _SharedMemory(size)
        return self._memory.tensor[:size]

    def close(self) -> None:
        """Close the connections, and give the shared memory back."""
        super().close()
        self._loading = None
        self._free()

    def _free(self) -> None:
        # Between two syncs, where a run spends its time, the memory is the learner's again.
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # every rank has closed its handles


@contextlib.contextmanager
def _ordinary_segments() -> Iterator[None]:
    """Memory that is allocated here can be mapped by any process of this user, whatever learner.expandable_segments.

    torch shares a piece of an expandable segment by file descriptors, which other containers and hardened kernels
    refuse. Switched off, its allocator takes no block of such a segment (c10/cuda/CUDACachingAllocator.cpp, Note
    [Expandable Segments] and get_free_block).
    """
    given = torch._C._accelerator_getAllocatorSettings()
    if "expandable_segments:true" not in given.lower():
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"{given},expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(given)


class _SharedMemory:
    """Memory without a name, which ends with this process and needs no other: torch's own has a manager that may die.

    Attributes:
        tensor: uint8 [size].
        path: where other processes of this user open it; ``cpu_engine_plugin.map_weights`` does.
    """

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("weight_sync")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        try:
            os.ftruncate(self._descriptor, size)
            self.tensor = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


def _pickled(value: dict[str, Any]) -> str:
    """``value`` as SGLang's deserialiser takes it: ForkingPickler, which sends handles of shared tensors, in base64."""
    from multiprocessing.reduction import ForkingPickler

    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    if isinstance(value["flattened_tensor"], torch.Tensor):
        pickler.dispatch_table[torch.Tensor] = _reduce_cuda_tensor
    pickler.dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def _reduce_cuda_tensor(tensor: torch.Tensor) -> Any:
    """CUDA IPC handle that names the device by UUID: learner and engine may number their devices differently."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)
    device_position = 6
    uuid = str(torch.cuda.get_device_properties(arguments[device_position]).uuid)
    return rebuild, (*arguments[:device_position], uuid, *arguments[device_position + 1 :])
