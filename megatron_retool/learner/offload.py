"""Leaving a GPU to somebody else for a while: a learner's tensors go to host memory and come back.

Only the storages move: every tensor object, and every view that Megatron's buffers, buckets and optimizer shards hold,
stays what it is and has its values again after ``reload``. In between they must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 256 * 2**20
"""Of pinned host memory. torch rounds each pinned piece up to a power of two, for large ones by up to the same again;
a part is therefore spread over pieces of this size, which it also finds again in torch's cache the next time."""


class HostOffload:
    """Where the parts of a learner are: on their device, or in (pinned) host memory.

    weights are parameters and buffers of the model and of the reference; optimizer is its state with the main
    parameters in float32; gradients, which every update starts from zero, are dropped and come back as zeros.

    Args:
        learner: has model_chunks, reference_chunks, optimizer and device.
    """

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self._away: dict[str, tuple[list[tuple[torch.UntypedStorage, int]], _HostCopy | None]] = {}

    def offload(self, *parts: str) -> int:
        """Move ``parts`` away; bytes freed. Parts that are away already stay there."""
        freed = 0
        for part in parts:
            if part in self._away:
                continue
            if part == "weights":
                freed += self._drop_fp8_copies()
            moved = [(storage, storage.nbytes()) for storage in self._storages(part)]
            pinned = self._learner.device.type == "cuda"
            copy = None if part == "gradients" else _HostCopy([storage for storage, _ in moved], pinned)
            # Only after all copies are made: copies to pinned memory are asynchronous.
            self._synchronize()
            for storage, size in moved:
                storage.resize_(0)
                freed += size
            self._away[part] = (moved, copy)
        if freed and self._learner.device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def reload(self, *parts: str) -> None:
        """Bring ``parts`` back; parts that are there already stay."""
        for part in parts:
            if part not in self._away:
                continue
            moved, copy = self._away.pop(part)
            for storage, size in moved:
                storage.resize_(size)
            if copy is None:
                for storage, _ in moved:
                    _bytes_of(storage).zero_()
            else:
                copy.write_to([storage for storage, _ in moved])
            self._synchronize()

    def _drop_fp8_copies(self) -> int:
        """Forget the weights' FP8 copies that Transformer Engine keeps in its modules, and makes again when it needs
        them; bytes freed."""
        freed = 0
        for module in self._models():
            for owner in module.modules():
                workspaces = getattr(owner, "_fp8_workspaces", None)
                if workspaces:
                    freed += sum(part.nbytes for workspace in workspaces.values() for part in _held(workspace))
                    workspaces.clear()
        return freed

    def _storages(self, part: str) -> list[torch.UntypedStorage]:
        # In float32 the optimizer steps the weights themselves, which then are no part of the optimizer.
        earlier = {storage.data_ptr() for name in ("weights", "gradients") for storage in self._found(name)}
        result = self._found(part)
        return result if part != "optimizer" else [s for s in result if s.data_ptr() not in earlier]

    def _found(self, part: str) -> list[torch.UntypedStorage]:
        tensors = {"weights": self._weights, "optimizer": self._optimizer_state, "gradients": self._gradients}[part]()
        distinct: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == self._learner.device.type and storage.nbytes():
                distinct.setdefault(storage.data_ptr(), storage)
        return list(distinct.values())

    def _weights(self) -> Iterator[Tensor]:
        for module in self._models():
            for tensor in (*module.parameters(), *module.buffers()):
                yield from _held(tensor)

    def _models(self) -> list[torch.nn.Module]:
        # A DDP wrapper's attribute ``buffers`` hides the method of that name.
        own = [chunk.module for chunk in self._learner.model_chunks]
        return [*own, *(self._learner.reference_chunks or ())]

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._learner.model_chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def _optimizer_state(self) -> Iterator[Tensor]:
        for part in self._learner.optimizer.chained_optimizers:
            if getattr(part, "is_stub_optimizer", False):
                continue
            for group in part.optimizer.param_groups:
                yield from group["params"]
            yield from _tensors(part.optimizer.state.values())

    def _synchronize(self) -> None:
        if self._learner.device.type == "cuda":
            torch.cuda.synchronize()


class _HostCopy:
    """Bytes of storages, end to end in blocks of host memory; without waiting where the blocks are pinned."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], pinned: bool) -> None:
        total = sum(storage.nbytes() for storage in storages)
        count = -(-total // BLOCK_BYTES)
        self._blocks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        for block, content in self._pieces(storages):
            block.copy_(content, non_blocking=True)

    def write_to(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Into the same storages as they were, in the same order."""
        for block, content in self._pieces(storages):
            content.copy_(block, non_blocking=True)

    def _pieces(self, storages: Sequence[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        position = 0
        for storage in storages:
            content = _bytes_of(storage)
            while content.numel():
                index, start = divmod(position, BLOCK_BYTES)
                piece = self._blocks[index][start : start + content.numel()]
                yield piece, content[: piece.numel()]
                content = content[piece.numel() :]
                position += piece.numel()


def _held(tensor: Any) -> Iterator[Tensor]:
    """What has the tensor's memory: of one in FP8 its bytes, their transposed copy and the scales."""
    held = tensor.get_metadata().values() if hasattr(tensor, "get_metadata") else (tensor,)
    yield from (each for each in held if isinstance(each, Tensor))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
