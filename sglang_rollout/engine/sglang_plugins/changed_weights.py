"""SGLang plugin: a weight update may bring only the elements that have changed (``weight_sync/delta.py``).

Where the parts of a changed tensor arrive, a ``ChangedWeight`` of the tensor's shape takes their place: it holds the
new values, and marks, NaNs of certain bits, everywhere else.  SGLang's own loaders cut it as they cut any weight; in
the end they copy a piece of it into a parameter, and that copy leaves an element as it is, or moves it by a few of the
numbers that its dtype can hold, as its mark says.

SGLang finds this plugin through the entry point beside this file, that is, only in processes which have this directory
on their path.
"""

from __future__ import annotations

from typing import Any

import torch

SHAPE, GAPS, POSITIONS, BITS = ".delta_shape", ".delta_gaps", ".delta_positions", ".delta_bits"
KINDS, STEPS, VALUES = ".delta_kinds", ".delta_steps", ".delta_values"
PARTS = (GAPS, POSITIONS, BITS, KINDS, STEPS, VALUES)
LONGEST_GAP = 255
LONGEST_STEP = 30
_MARKS = {
    torch.float32: (torch.int32, 0x7FC0DE17),
    torch.bfloat16: (torch.int16, 0x7FE0),
    torch.float16: (torch.int16, 0x7F00),
}
"""Of each dtype, the integer of its size and the bits of a NaN, the mark of an element that stays. The LONGEST_STEP
numbers above and below mark elements that move by so many. No computation yields such NaNs: CPUs make 0x7FC0 and
0x7E00, GPUs 0x7FFF."""


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
    result = []
    for name, tensor in tensors:
        if name.endswith(SHAPE):
            whole = name.removesuffix(SHAPE)
            parts = {part: by_name[whole + part] for part in PARTS if whole + part in by_name}
            result.append((whole, changed_weight(tensor.tolist(), parts)))
        elif not name.endswith(PARTS):
            result.append((name, tensor))
    return result


def positions_of(gaps: torch.Tensor) -> torch.Tensor:
    """Places in the flat tensor, int64 [n], of elements that are told by the gaps before them."""
    steps = gaps.long() + (gaps != LONGEST_GAP).long()
    return (steps.cumsum(0) - 1)[gaps != LONGEST_GAP]


def unpacked(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """``count`` numbers of ``width`` bits each, uint8, the first in the lowest bits."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & (1 << width) - 1).view(-1)[:count]


def changed_weight(shape: list[int], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of ``shape`` that holds the new values in their places, and is marked elsewhere."""
    values = parts[VALUES]
    kind, mark = _MARKS[values.dtype]
    words = torch.full(shape, mark, dtype=kind, device=values.device)
    if BITS in parts:
        places = unpacked(parts[BITS], 1, words.numel()).nonzero().squeeze(1)
    elif GAPS in parts:
        places = positions_of(parts[GAPS])
    else:
        places = parts[POSITIONS].long()
    result = values.contiguous().view(kind)
    if KINDS in parts:
        kinds = unpacked(parts[KINDS], 2, len(places))
        moved = mark + 1 - 2 * kinds.to(kind)
        moved[kinds == 2] = mark + parts[STEPS].to(kind)
        moved[kinds == 3] = result
        result = moved
    words.view(-1)[places] = result
    return words.view(values.dtype).as_subclass(ChangedWeight)


class ChangedWeight(torch.Tensor):
    """A weight, or a piece of one, whose marked elements change nothing where it is copied to."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copies do as the marks say; every other operation is the tensor's own."""
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
    """What ``present`` becomes, in its own dtype."""
    kind, mark = _MARKS[changed.dtype]
    changed = changed.to(present.device)
    steps = changed.view(kind) - mark
    stays = steps == 0
    if kind is torch.int16:
        # An engine may hold more bits than travel: what it holds came in this dtype.
        moved = (present.to(changed.dtype).view(kind) + steps).view(changed.dtype)
        changed = torch.where((steps >= -LONGEST_STEP) & (steps <= LONGEST_STEP), moved, changed)
    return torch.where(stays, present, changed.to(present.dtype))
