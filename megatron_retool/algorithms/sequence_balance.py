"""Sharing sequences out over data-parallel ranks and packing them into micro-batches.

A step ends when its slowest rank does, so ranks should get equal *work*, not equal numbers of sequences.  Work is
modelled as ``linear * length + quadratic * length**2``: projections and feed-forward layers are linear in the length
of a sequence, attention is quadratic.

Everything here is plain arithmetic on row numbers: deterministic, no tensor, no communication, so that every rank
computes the same plan from the same lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.errors import InputError


def sequence_cost(length: Any, linear: float = 1.0, quadratic: float = 0.0) -> Any:
    """Cost of processing a sequence, in the unit of the coefficients (FLOPs or seconds, say).

    Args:
        length: tokens; a number or an integer array of any shape.
        linear: cost of one token outside attention.
        quadratic: cost of one (query, key) pair; a causal model attends to about half of ``length**2`` pairs, which
            belongs into the coefficient.

    Returns:
        float or float64 array of ``length``'s shape.
    """
    length = np.asarray(length, dtype=np.float64)
    cost = linear * length + quadratic * length * length
    return float(cost) if cost.ndim == 0 else cost


def cut_rollouts(
    rollout_ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], max_tokens: int
) -> npt.NDArray[np.bool_]:
    """bool [M]: rollouts of several rows that no micro-batch of ``max_tokens`` holds: each row is packed by itself.

    Args:
        rollout_ids: int64 [N] in [0, M), the rollout of each row.
        lengths: int64 [N], tokens of each row, padding included.
    """
    result: npt.NDArray[np.bool_] = (np.bincount(rollout_ids) > 1) & (np.bincount(rollout_ids, lengths) > max_tokens)
    return result


def balanced_partition(
    costs: Sequence[float] | npt.NDArray[Any], num_parts: int, equal_size: bool = False
) -> list[list[int]]:
    """Split rows into ``num_parts`` parts of nearly equal total cost.

    Karmarkar-Karp largest differencing method for k parts: every row starts as a tuple of k partial sums (its cost
    and k - 1 zeros); the two tuples with the largest spread between their biggest and smallest sum are merged again
    and again, biggest onto smallest, until one is left.  With ``equal_size`` each starting tuple holds k rows of
    neighbouring cost, one per part, so that sizes stay equal, and single rows are swapped afterwards as long as that
    lowers the heaviest part.  O(n (k log k + log n)) time.

    Invariants: every row appears exactly once; rows inside a part ascend; the answer depends only on the costs; with
    ``equal_size`` the sizes of two parts differ by at most one.  A part can be empty only where there are fewer rows
    than parts.  No partition can make the most expensive part cheaper than the most expensive row.

    Args:
        costs: [N], finite and not negative.
        num_parts: at least 1.
        equal_size: every part gets N / num_parts rows (rounded up or down).

    Returns:
        ``num_parts`` lists of row numbers.

    Raises:
        ValueError: ``num_parts`` < 1, or a cost is negative or not finite.
    """
    costs = np.asarray(costs, dtype=np.float64)
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts} must be at least 1")
    if costs.ndim != 1:
        raise ValueError(f"costs must be one-dimensional, not {costs.shape}")
    if not np.all(np.isfinite(costs)) or np.any(costs < 0):
        row = int(np.flatnonzero(~np.isfinite(costs) | (costs < 0))[0])
        raise ValueError(f"cost of row {row} is {costs[row]}: costs must be finite and not negative")
    if len(costs) == 0:
        return [[] for _ in range(num_parts)]

    # Stable sort, descending: equal costs keep their row order, which makes the plan reproducible.
    order = np.argsort(-costs, kind="stable")
    group = num_parts if equal_size else 1
    states: list[_State] = [
        [(float(costs[row]), (int(row),)) for row in order[start : start + group]]
        for start in range(0, len(order), group)
    ]
    partition = _merge_by_largest_difference(states, num_parts)
    if equal_size:
        _swap_until_even(partition, costs)
    elif len(costs) >= num_parts:
        _fill_empty_parts(partition, costs)
    return [sorted(part) for part in partition]


# The non-empty subsets of a partial partition as (cost, rows), in descending order of cost.
_State = list[tuple[float, tuple[int, ...]]]


def _merge_by_largest_difference(states: list[_State], num_parts: int) -> list[list[int]]:
    heap: list[tuple[float, int, _State]] = []
    for serial, state in enumerate(states):
        heap.append((-_spread(state, num_parts), serial, state))
    heapq.heapify(heap)
    serial = len(states)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        first = first + [(0.0, ())] * (num_parts - len(first))
        merged = list(first)
        for position, (cost, rows) in enumerate(second):
            partner_cost, partner_rows = first[num_parts - 1 - position]
            merged[num_parts - 1 - position] = (partner_cost + cost, partner_rows + rows)
        merged = sorted((subset for subset in merged if subset[1]), key=lambda subset: -subset[0])
        heapq.heappush(heap, (-_spread(merged, num_parts), serial, merged))
        serial += 1
    final = heap[0][2]
    return [list(rows) for _, rows in final] + [[] for _ in range(num_parts - len(final))]


def _spread(state: _State, num_parts: int) -> float:
    smallest = state[-1][0] if len(state) == num_parts else 0.0
    return state[0][0] - smallest


def _swap_until_even(partition: list[list[int]], costs: npt.NDArray[np.float64]) -> None:
    # With whole groups of k rows to merge, differencing has few choices left on a heavy tail. Exchanging one row of
    # the heaviest part for a cheaper one of another part keeps sizes and evens out the rest.
    totals = np.array([costs[part].sum() for part in partition])
    for _ in range(16 * len(partition)):
        heavy = int(totals.argmax())
        rows = np.asarray(partition[heavy], dtype=np.int64)
        best, best_peak = None, float(totals[heavy])
        for light in np.argsort(totals, kind="stable")[:4]:
            if light == heavy or not partition[light]:
                continue
            others = np.asarray(partition[light], dtype=np.int64)
            moved = costs[rows][:, None] - costs[others][None, :]
            peak = np.maximum(totals[heavy] - moved, totals[light] + moved)
            give, take = np.unravel_index(int(peak.argmin()), peak.shape)
            if peak[give, take] < best_peak * (1 - 1e-9):
                best, best_peak = (int(light), int(give), int(take), float(moved[give, take])), float(peak[give, take])
        if best is None:
            return
        partner, give_at, take_at, moved_cost = best
        taken = partition[partner][take_at]
        partition[partner][take_at] = partition[heavy][give_at]
        partition[heavy][give_at] = taken
        totals[heavy] -= moved_cost
        totals[partner] += moved_cost


def _fill_empty_parts(partition: list[list[int]], costs: npt.NDArray[np.float64]) -> None:
    # Rows of cost zero can all land in one part; a rank without any sequence would break collective calls.
    for part in partition:
        if not part:
            donor = max((other for other in partition if len(other) > 1), key=len)
            cheapest = min(donor, key=lambda row: (costs[row], row))
            donor.remove(cheapest)
            part.append(cheapest)


def pack_micro_batches(
    lengths: Sequence[int] | npt.NDArray[Any],
    max_tokens: int,
    num_micro_batches: int | None = None,
    costs: Sequence[float] | npt.NDArray[Any] | None = None,
) -> list[list[int]]:
    """Pack whole sequences into micro-batches of at most ``max_tokens`` tokens.

    First-fit decreasing, which needs at most 11/9 of the fewest possible micro-batches (plus one).  The rows are then
    spread over that many micro-batches by ``balanced_partition`` where the budget allows it, which evens them out.

    Invariants: every row appears exactly once, rows inside a micro-batch ascend, no micro-batch is above the budget,
    micro-batches come in descending order of cost.  Without ``num_micro_batches`` none is empty.

    Args:
        lengths: int [N], tokens.
        max_tokens: budget of one micro-batch.
        num_micro_batches: exactly this many, where ranks must agree on the number; at least what first-fit needs.
            Empty micro-batches appear only where there are more of them than rows.
        costs: [N]; what to even out. Default: the lengths.

    Raises:
        ValueError: a sequence is longer than the budget, or ``num_micro_batches`` is too small for it.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    weights = np.asarray(lengths if costs is None else costs, dtype=np.float64)
    if len(lengths) and lengths.max() > max_tokens:
        row = int(lengths.argmax())
        raise InputError(
            f"sequence {row} has {lengths[row]} tokens, more than the micro-batch budget of {max_tokens}: raise "
            "learner.max_tokens_per_micro_batch or lower data.max_prompt_length + data.max_response_length"
        )
    packed = _first_fit_decreasing(lengths, max_tokens)
    wanted = len(packed) if num_micro_batches is None else num_micro_batches
    if wanted < len(packed):
        raise InputError(
            f"{len(lengths)} sequences of {int(lengths.sum())} tokens need {len(packed)} micro-batches of {max_tokens} "
            f"tokens, {wanted} are too few"
        )
    if wanted == 0:
        return []
    even = balanced_partition(weights, wanted)
    if all(int(lengths[part].sum()) <= max_tokens for part in even):
        packed = even
    while len(packed) < wanted:
        divisible = [part for part in packed if len(part) > 1]
        if not divisible:
            packed.append([])
            continue
        heaviest = max(divisible, key=lambda part: (float(weights[part].sum()), -part[0]))
        packed.remove(heaviest)
        packed.extend([heaviest[i] for i in half] for half in balanced_partition(weights[heaviest], 2))
    packed = [sorted(part) for part in packed]
    return sorted(packed, key=lambda part: (-float(weights[part].sum()), part))


def _first_fit_decreasing(lengths: npt.NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    # Free space of every opened micro-batch, padded to the number of rows, so that the first fit is one argmax.
    bins: list[list[int]] = []
    free = np.zeros(len(lengths), dtype=np.int64)
    for row in np.argsort(-lengths, kind="stable"):
        fits = free[: len(bins)] >= lengths[row]
        place = int(fits.argmax()) if fits.any() else len(bins)
        if place == len(bins):
            bins.append([])
            free[place] = max_tokens
        bins[place].append(int(row))
        free[place] -= lengths[row]
    return bins
