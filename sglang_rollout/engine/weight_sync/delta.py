"""What has changed in the weights since the last sync, in few bytes and exact to the bit.

The sender keeps what it sent last, in the engines' dtype on the host.  Of a tensor it sends the elements whose bits are
others, as their places and what becomes of them, or the whole tensor where that is smaller:

| part | dtype, shape | meaning |
|---|---|---|
| ``NAME.delta_shape`` | int64 [dimensions] | shape of the tensor |
| ``NAME.delta_gaps`` | uint8 [n or more] | elements skipped before each changed one; 255: skip so many, no element |
| ``NAME.delta_positions`` | int32 [n] | in place of gaps where changes are rare: places in the flat tensor |
| ``NAME.delta_bits`` | uint8 [elements / 8] | in place of gaps where changes are many: a bit for each element |
| ``NAME.delta_kinds`` | uint8 [n / 4] | of 16-bit dtypes, 2 bits for each changed element, see below |
| ``NAME.delta_steps`` | int8 [s] | of 16-bit dtypes |
| ``NAME.delta_values`` | dtype of the tensor, [v] | new values; all n where there are no kinds |

An optimizer's step moves most weights by few of the numbers that 16 bits can hold, so that it is shorter to say by how
many: 0 and 1 of ``delta_kinds`` stand for the next number away from zero and towards it (its bits as an integer, one
more or one less), 2 for the next of ``delta_steps`` (so many more), 3 for the next of ``delta_values``.  First elements
are in the lowest bits.

The engine's side is ``sglang_plugins/changed_weights.py``.  A sender whose last sync failed, a new sender, an engine of
another version and every ``weight_sync.delta_whole_every``-th sync take whole weights.
"""

from __future__ import annotations

import torch

Bucket = list[tuple[str, torch.Tensor]]
SHAPE, GAPS, POSITIONS, BITS = ".delta_shape", ".delta_gaps", ".delta_positions", ".delta_bits"
KINDS, STEPS, VALUES = ".delta_kinds", ".delta_steps", ".delta_values"
SMALLEST = 1024
"""Elements of the smallest tensor whose changes are told apart: engines may read a smaller one as a number."""
LONGEST_GAP = 255
LONGEST_STEP = 30
"""For which the engine's side has marks."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeltaEncoder:
    """Turns buckets into what has changed since the last sync.

    Args:
        whole_every: weight_sync.delta_whole_every.

    Attributes:
        version: of the weights that engines have if all went well; None: not known, and the next sync is whole.
    """

    def __init__(self, whole_every: int | None = None) -> None:
        self.version: int | None = None
        self._whole_every = whole_every
        self._since_whole = 0
        self._sent: dict[str, torch.Tensor] = {}
        self._whole = True

    def begin(self, served: set[int]) -> None:
        """Start a sync into engines that serve these versions."""
        due = self._whole_every is not None and self._since_whole >= self._whole_every
        self._whole = due or served != {self.version}
        self.version = None  # until the sync has ended well
        if self._whole:
            self._sent.clear()
            self._since_whole = 0

    def encode(self, bucket: Bucket) -> Bucket:
        """What has to travel for ``bucket``, wide elements first; perhaps nothing."""
        parts: Bucket = []
        for name, tensor in bucket:
            before = self._sent.get(name)
            if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
                self._sent[name] = tensor.detach().to("cpu", copy=True)
                parts.append((name, tensor))
                continue
            parts += changes(name, tensor, before.to(tensor.device))
            before.copy_(tensor)
        return sorted(parts, key=lambda part: -part[1].element_size())

    def end(self, version: int) -> None:
        """The sync has ended well."""
        self.version = version
        self._since_whole += 1


def changes(name: str, new: torch.Tensor, old: torch.Tensor) -> Bucket:
    """The parts that make ``old`` into ``new``; none where they are equal, ``new`` itself where that is smaller."""
    if new.numel() < SMALLEST or new.numel() >= 2**31:
        return [] if torch.equal(_words(new), _words(old)) else [(name, new)]
    words, before = _words(new), _words(old)
    changed = words != before
    positions = changed.nonzero().squeeze(1)
    if not len(positions):
        return []
    parts = [(SHAPE, torch.tensor(new.shape, dtype=torch.int64, device=new.device)), _places(changed, positions)]
    values = new.reshape(-1)[positions]
    if new.element_size() == 2:
        steps = words[positions].to(torch.int32) - before[positions]
        kinds = torch.where(steps.abs() == 1, steps == -1, 2 + (steps.abs() > LONGEST_STEP)).to(torch.uint8)
        parts += [(KINDS, _packed(kinds, 2)), (STEPS, steps[kinds == 2].to(torch.int8))]
        values = values[kinds == 3]
    parts.append((VALUES, values))
    smaller = sum(part.nbytes for _, part in parts) < new.nbytes
    return [(name + part, tensor) for part, tensor in parts] if smaller else [(name, new)]


def _places(changed: torch.Tensor, positions: torch.Tensor) -> tuple[str, torch.Tensor]:
    """``positions``, those of the elements that have ``changed`` (bool), in the shortest form."""
    of_gaps = len(positions) + changed.numel() // LONGEST_GAP
    if changed.numel() // 8 < of_gaps:
        return BITS, _packed(changed.to(torch.uint8), 1)
    return (POSITIONS, positions.to(torch.int32)) if 4 * len(positions) < of_gaps else (GAPS, gaps_of(positions))


def _packed(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """``numbers``, uint8 [n] of ``width`` bits each, as uint8 [n width / 8, rounded up]."""
    each = 8 // width
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % each)).view(-1, each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed |= rows[:, place] << place * width
    return packed


def gaps_of(positions: torch.Tensor) -> torch.Tensor:
    """Ascending ``positions``, int64 [n], as gaps: uint8, n of them and one more for each 255 skipped elements."""
    skipped = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    fillers = skipped // LONGEST_GAP
    places = (fillers + 1).cumsum(0) - 1
    gaps = torch.full((int(places[-1]) + 1,), LONGEST_GAP, dtype=torch.uint8, device=positions.device)
    gaps[places] = (skipped % LONGEST_GAP).to(torch.uint8)
    return gaps


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, flat: a negative zero differs from zero, and NaN equals itself."""
    return tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])
