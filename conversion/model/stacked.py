"""Experts that lie in one Hugging Face tensor: how a table names one expert's part, and how parts make the tensor.

gpt-oss stores a matrix of all experts of a layer as one tensor [experts, in, out], in which the columns of gate and up
take turns.  A rule calls the part of an expert what numpy would, ``mlp.experts.gate_up_proj[3, 0::2]``: every second
output feature of expert 3.  Granite stores them as [experts, out, in], and ``input_linear.weight[3, :]`` is all of
expert 3.  The part itself is [out, in] like any other matrix, so that the weight map knows nothing of stacks; those who
read and write tensors do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_PART = re.compile(r"(?P<tensor>[^\[]+)\[(?P<index>[^,\]]+)(?:, (?:(?P<start>\d+)::(?P<step>\d+)|(?P<whole>:)))?\]")


@dataclass(frozen=True)
class StackPart:
    """Every ``step``-th output feature from ``start`` on of element ``index`` of ``tensor``.

    Output features are an element's columns, or, with ``in_rows``, its rows, all of which are then one part.
    """

    tensor: str
    index: int
    start: int = 0
    step: int = 1
    in_rows: bool = False

    def shape(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part of a tensor of shape ``stack``."""
        if self.in_rows:
            return stack[1:]
        return (len(range(self.start, stack[-1], self.step)), *stack[1:-1])

    def of(self, element: Tensor) -> Tensor:
        """View of the part in element ``index``, which is [in, out], [out, in] or, of a bias, [out]."""
        return element if self.in_rows else element.movedim(-1, 0)[self.start :: self.step]


def part_of(name: str) -> StackPart | None:
    """The part that a name means; None: it is a whole tensor's."""
    result = _PART.fullmatch(name)
    if result is None:
        return None
    start, step = int(result["start"] or 0), int(result["step"] or 1)
    return StackPart(result["tensor"], int(result["index"]), start, step, in_rows=result["whole"] is not None)


def tensor_of(name: str) -> str:
    """The tensor that a name means, or means a part of; of a rule's names too."""
    result = _PART.fullmatch(name)
    return name if result is None else result["tensor"]


def stacked_shapes(parts: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, in the order of its first part, from the names and shapes of parts and whole tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    rows: dict[str, int] = {}
    for name, shape in parts:
        part = part_of(name)
        if part is None:
            shapes[name] = shape
            continue
        if part.index == 0:
            rows[part.tensor] = rows.get(part.tensor, 0) + shape[0]
        element = (rows[part.tensor], *shape[1:])
        shapes[part.tensor] = (part.index + 1, *(element if part.in_rows else (*element[1:], element[0])))
    return shapes


class Stacker:
    """Puts parts together as they come, in any order; whole tensors pass.

    Args:
        shapes: of the tensors, see ``stacked_shapes``.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._stacks: dict[str, tuple[Tensor, int]] = {}

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensor whose last missing part this was, if any."""
        part = part_of(name)
        if part is None:
            yield name, tensor
            return
        kept = self._stacks.pop(part.tensor) if part.tensor in self._stacks else None
        stack, filled = kept or (tensor.new_empty(self._shapes[part.tensor]), 0)
        part.of(stack[part.index]).copy_(tensor)
        filled += tensor.numel()
        if filled == stack.numel():
            yield part.tensor, stack
        else:
            self._stacks[part.tensor] = stack, filled

    def add_all(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """``add`` of each."""
        for name, tensor in named:
            yield from self.add(name, tensor)
