"""Leaving a GPU to somebody else for a while: a learner's tensors go to host memory and come back.

Only the storages move: every tensor object, and every view that Megatron's buffers, buckets and optimizer shards hold,
stays what it is and has its values again after ``reload``. In between they must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class HostOffload:
    """Where the parts of a learner are: on their device, or in (pinned) host memory.

    weights are parameters and buffers of the model and of the reference; optimizer is its state with the main
    parameters in float32; gradients, which every update starts from zero, are dropped and come back as zeros.

    Args:
        learner: has model_chunks, reference_chunks, optimizer and device.
    """

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self._away: dict[str, list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}

    def offload(self, *parts: str) -> int:
        """Move ``parts`` away; bytes freed. Parts that are away already stay there."""
        freed = 0
        for part in parts:
            if part in self._away:
                continue
            moved = []
            for storage in self._storages(part):
                size = storage.nbytes()
                moved.append((storage, size, None if part == "gradients" else self._copy(storage)))
                freed += size
            # Only after all copies are made: copies to pinned memory are asynchronous.
            self._synchronize()
            for storage, _, _ in moved:
                storage.resize_(0)
            self._away[part] = moved
        if freed and self._learner.device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def reload(self, *parts: str) -> None:
        """Bring ``parts`` back; parts that are there already stay."""
        for part in parts:
            for storage, size, copy in self._away.pop(part, ()):
                storage.resize_(size)
                content = _bytes_of(storage)
                if copy is None:
                    content.zero_()
                else:
                    content.copy_(copy, non_blocking=True)
            self._synchronize()

    def _storages(self, part: str) -> list[torch.UntypedStorage]:
        # In float32 the optimizer steps the weights themselves, which then are no part of the optimizer.
        earlier = {storage.data_ptr() for name in ("weights", "gradients") for storage in self._found(name)}
        found = self._found(part)
        return found if part != "optimizer" else [s for s in found if s.data_ptr() not in earlier]

    def _found(self, part: str) -> list[torch.UntypedStorage]:
        tensors = {"weights": self._weights, "optimizer": self._optimizer_state, "gradients": self._gradients}[part]()
        distinct: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == self._learner.device.type and storage.nbytes():
                distinct.setdefault(storage.data_ptr(), storage)
        return list(distinct.values())

    def _weights(self) -> Iterator[Tensor]:
        # A DDP wrapper's attribute ``buffers`` hides the method of that name.
        own = [chunk.module for chunk in self._learner.model_chunks]
        for module in (*own, *(self._learner.reference_chunks or ())):
            yield from module.parameters()
            yield from module.buffers()

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

    def _copy(self, storage: torch.UntypedStorage) -> Tensor:
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        return host.copy_(_bytes_of(storage), non_blocking=True)

    def _synchronize(self) -> None:
        if self._learner.device.type == "cuda":
            torch.cuda.synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
