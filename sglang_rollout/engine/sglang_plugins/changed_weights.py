"""SGLang plugin: a weight update may bring only the elements that have changed (``weight_sync/delta.py``).

Where the parts of a changed tensor arrive, a ``ChangedWeight`` of the tensor's shape takes their place: it holds the
new values, and a mark, a NaN of certain bits, everywhere else.  SGLang's own loaders cut it as they cut any weight; in
the end they copy a piece of it into a parameter, and that copy leaves marked elements as they are.

SGLang finds this plugin through the entry point beside this file, that is, only in processes which have this directory
on their path.
"""

from __future__ import annotations

from typing import Any

import torch

SHAPE, GAPS, POSITIONS, VALUES = ".delta_shape", ".delta_gaps", ".delta_positions", ".delta_values"
LONGEST_GAP = 255
_MARKS = {
    torch.float32: (torch.int32, 0x7FC0DE17),
    torch.bfloat16: (torch.int16, 0x7FD1),
    torch.float16: (torch.int16, 0x7ED1),
}
"""Of each dtype, the integer of its size and a NaN's bits that no computation yields."""


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    bucket = "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorBucket.reconstruct_tensors"
    HookRegistry.register(bucket, with_changes, HookType.AFTER)


def with_changes(
    tensors: list[tuple[str, torch.Tensor]], *arguments: Any, **kwargs: Any
) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors, with the parts of changed ones put together."""
    by_name = dict(tensors)
    if not any(name.endswith(SHAPE) for name in by_name):
        return tensors
    found = []
    for name, tensor in tensors:
        if name.endswith(SHAPE):
            whole = name.removesuffix(SHAPE)
            gaps = by_name.get(whole + GAPS)
            places = by_name[whole + POSITIONS].long() if gaps is None else positions_of(gaps)
            found.append((whole, changed_weight(tensor.tolist(), places, by_name[whole + VALUES])))
        elif not name.endswith((GAPS, POSITIONS, VALUES)):
            found.append((name, tensor))
    return found


def positions_of(gaps: torch.Tensor) -> torch.Tensor:
    """Places in the flat tensor, int64 [n], of elements that are told by the gaps before them."""
    steps = gaps.long() + (gaps != LONGEST_GAP).long()
    return (steps.cumsum(0) - 1)[gaps != LONGEST_GAP]


def changed_weight(shape: list[int], positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor of ``shape`` that holds ``values`` at ``positions`` of its flat form, and is marked elsewhere."""
    kind, mark = _MARKS[values.dtype]
    words = torch.full(shape, mark, dtype=kind, device=values.device)
    words.view(-1)[positions] = values.contiguous().view(kind)
    return words.view(values.dtype).as_subclass(ChangedWeight)


class ChangedWeight(torch.Tensor):
    """A weight, or a piece of one, whose marked elements change nothing where it is copied to."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copies leave marked elements as they are; every other operation is the tensor's own."""
        if function is torch.Tensor.copy_ and isinstance(args[1], cls):
            target, source = args[0], plain(args[1])
            return target.copy_(merged(target, source.expand_as(target)))
        if function is torch.Tensor.__setitem__ and isinstance(args[2], cls):
            target, place, source = args[0], args[1], plain(args[2])
            target[place] = merged(target[place], source.expand_as(target[place]))
            return None
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor."""
    return weight.as_subclass(torch.Tensor)


def merged(present: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """``changed`` with the present elements where it is marked, in the dtype of ``present``."""
    kind, mark = _MARKS[changed.dtype]
    return torch.where(changed.view(kind) == mark, present, changed.to(present.device, present.dtype))
