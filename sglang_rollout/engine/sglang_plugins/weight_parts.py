"""SGLang plugin: a weight may come in parts, each from the learner's rank that holds it (``weight_sync/sharded.py``).

A part's name says of which tensor it is, ``NAME.part:4096x1024:0:512``: of a tensor of shape [4096, 1024] the rows
(dimension 0) from 512 on.  A ``WeightPart`` takes its place: it has the whole tensor's shape and no memory but the
part's.  SGLang's own loaders cut it as they cut any weight; in the end they copy a piece of it into a parameter, and
that copy writes what the part holds of the piece and leaves the rest as it is.

SGLang finds this plugin through the entry point beside this file, that is, only in processes which have this directory
on their path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

PART = ".part:"
_THE_SAME = ("contiguous", "to", "cuda", "cpu", "detach", "clone", "float", "bfloat16", "half", "type")
"""Methods that change where or how a weight lies, which the copy into a parameter does anyway."""


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    bucket = "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorBucket.reconstruct_tensors"
    HookRegistry.register(bucket, with_parts, HookType.AFTER)


def with_parts(
    tensors: list[tuple[str, torch.Tensor]], *arguments: Any, **kwargs: Any
) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors, with each part in the shape of its whole tensor."""
    return [weight_part(name, tensor) if PART in name else (name, tensor) for name, tensor in tensors]


def weight_part(wire_name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The whole tensor's name, and the part in its shape."""
    name, _, place = wire_name.partition(PART)
    shape, dim, start = place.split(":")
    whole = [int(size) for size in shape.split("x")]
    view = torch.empty(whole, dtype=tensor.dtype, device="meta")
    return name, _of(view, _Held(tensor.contiguous(), tuple(whole), int(dim), int(start)))


@dataclass(frozen=True, eq=False)
class _Held:
    """What is here of a tensor of shape ``whole``: ``values``, from index ``start`` of dimension ``dim`` on."""

    values: torch.Tensor
    whole: tuple[int, ...]
    dim: int
    start: int


class WeightPart(torch.Tensor):
    """A view of a whole weight of which only a part is here.

    It is a tensor without memory, whose strides say which elements of the whole it means.

    Attributes:
        held: the part.
    """

    held: _Held

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Views are views of the same part, copies out of it write what it holds, and nothing else is allowed."""
        if function is torch.Tensor.copy_ and isinstance(args[1], cls):
            write(args[0], args[1])
            return args[0]
        if function is torch.Tensor.__setitem__ and isinstance(args[2], cls):
            write(args[0][args[1]], args[2])
            return None
        name = getattr(function, "__name__", str(function))
        if name in _THE_SAME and isinstance(args[0], cls):
            return args[0]
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        weight = next((argument for argument in args if isinstance(argument, cls)), None)
        if isinstance(result, torch.Tensor):
            return _view(weight, result, name)
        if isinstance(result, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in result):
            return type(result)(_view(weight, each, name) for each in result)
        return result


def write(target: torch.Tensor, weight: WeightPart) -> None:
    """Copy into ``target``, of the shape of ``weight``, what its part holds of it."""
    held = weight.held
    if target.shape != weight.shape:
        weight = weight.expand_as(target)  # type: ignore[assignment]
    steps: list[int] = [math.prod(held.whole[dim + 1 :]) for dim in range(len(held.whole))]
    offset = int(weight.storage_offset())
    first = [offset // step % size for step, size in zip(steps, held.whole, strict=True)]
    dims = _dims(weight, steps, held.whole, first)
    if dims is None:
        _write_by_element(target, weight, steps)
        return
    axis = next((axis for axis, dim in enumerate(dims) if dim == held.dim), None)
    held_size = held.values.shape[held.dim]
    low = held.start - first[held.dim]
    if axis is None:
        if not -held_size < low <= 0:
            return
        inside = -low
    else:
        start, stop = max(low, 0), min(low + held_size, weight.shape[axis])
        if start >= stop:
            return
        target = target.narrow(axis, start, stop - start)
        inside = start - low
    place = [inside if dim == held.dim else index for dim, index in enumerate(first)]
    strides = [0 if dim is None else held.values.stride(dim) for dim in dims]
    begin = held.values.storage_offset() + sum(index * held.values.stride(dim) for dim, index in enumerate(place))
    target.copy_(torch.as_strided(held.values, target.shape, strides, begin))


def _dims(weight: torch.Tensor, steps: list[int], whole: tuple[int, ...], first: list[int]) -> list[int | None] | None:
    """The whole tensor's dimension that each axis of a view runs along; None for an axis of one element, and at all
    where one runs along none."""
    dims: list[int | None] = []
    for size, stride in zip(weight.shape, weight.stride(), strict=True):
        if size == 1:
            dims.append(None)
            continue
        result = [
            dim
            for dim, step in enumerate(steps)
            if step == stride and first[dim] + size <= whole[dim] and dim not in dims
        ]
        if not result:
            return None
        dims.append(result[0])
    return dims


def _write_by_element(target: torch.Tensor, weight: WeightPart, steps: list[int]) -> None:
    """``write`` for views whose axes run through several dimensions, or along a part of one."""
    held = weight.held
    places = torch.full(weight.shape, weight.storage_offset(), dtype=torch.int64, device=held.values.device)
    for axis, (size, stride) in enumerate(zip(weight.shape, weight.stride(), strict=True)):
        along = [1] * weight.dim()
        along[axis] = size
        places += (torch.arange(size, device=places.device) * stride).view(along)
    index = places // steps[held.dim] % held.whole[held.dim] - held.start
    inside = (index >= 0) & (index < held.values.shape[held.dim])
    position = torch.zeros_like(places)
    for dim, (step, size) in enumerate(zip(steps, held.whole, strict=True)):
        position += (index if dim == held.dim else places // step % size) * held.values.stride(dim)
    values = held.values.view(-1)[position[inside]]
    inside = inside.to(target.device)
    target[inside] = values.to(target.device, target.dtype)


def _of(view: torch.Tensor, held: _Held) -> WeightPart:
    weight = view.as_subclass(WeightPart)
    weight.held = held
    return weight


def _view(weight: WeightPart | None, result: torch.Tensor, name: str) -> torch.Tensor:
    """``result`` as a view of the same part.

    Raises:
        NotImplementedError: it is no view: its elements would have to be computed.
    """
    if weight is None or result.untyped_storage()._cdata != weight.untyped_storage()._cdata:
        raise NotImplementedError(
            f"the model's loader calls {name} on a weight of which only a part is here: set weight_sync.method to "
            "another than sharded"
        )
    return _of(result, weight.held)
