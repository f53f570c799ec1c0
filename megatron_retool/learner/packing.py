"""From a TrajectoryBatch to packed micro-batches: whole sequences end to end, no padding but what a layout needs.

Every rank gets the same batch, computes the same plan and cuts out its own share: data-parallel ranks take different
sequences, context-parallel ranks different pieces of the same ones.  Context parallelism cuts a sequence into 2 x CP
chunks and gives rank r the chunks r and 2 x CP - 1 - r ("zigzag"), so that every rank has as many causal
query-key pairs as the others.  ``dynamic_context.py`` lets fewer ranks share what is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conversion.model import flops
from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.algorithms.dynamic_context import context_sizes, place, ranks_needed
from megatron_retool.algorithms.prefix_tree import PrefixTree
from megatron_retool.algorithms.sequence_balance import (
    balanced_partition,
    cut_rollouts,
    pack_micro_batches,
    sequence_cost,
)
from megatron_retool.errors import InputError
from megatron_retool.learner.attention_pieces import Bucket, ContextBucket
from megatron_retool.learner.micro_batch import Int64Array, MicroBatch, Prediction
from megatron_retool.learner.stream import Responses, Stream, numbered, ramp
from megatron_retool.trajectory import TrajectoryBatch


@dataclass(frozen=True)
class PlannedMicroBatch:
    """What one micro-batch is to be.

    Attributes:
        rows: row numbers of the batch, ascending.
        context_ranks: the context-parallel ranks that share it.
        num_tokens: that the model computes, without padding.
        tree: of the rows' sequences, where common prefixes stand once.
        part: of ``Packer.plan``.
    """

    rows: Int64Array
    context_ranks: range
    num_tokens: int = 0
    tree: PrefixTree | None = None
    part: int = 0


@dataclass(frozen=True)
class Plan:
    """Which rows of a batch each data-parallel rank computes together; the same on every rank.

    Attributes:
        stream: the batch's sequences.
        units: int64 [N], of ``Packer.units``.
        shares: [data_rank][micro_batch]; each context-parallel rank of each computes equally many of them.
    """

    stream: Stream
    units: Int64Array
    shares: list[list[PlannedMicroBatch]]

    @property
    def num_tokens(self) -> list[int]:
        """That the model computes for each data-parallel rank's share, without padding."""
        return [sum(planned.num_tokens for planned in share) for share in self.shares]


class Packer:
    """Plans and cuts micro-batches for one rank of a layout.

    Args:
        layout: sizes of the parallel dimensions.
        max_tokens: token budget of a micro-batch over all context-parallel ranks, padding included.
        data_rank, context_rank: this process's place.
        device: where the tensors go.
        quadratic_cost: cost of one query-key pair relative to one token outside attention.
        token_multiple: every rank's own part of a micro-batch, under sequence parallelism each of TP, is padded to a
            multiple of this (FP8 kernels want 16 or more).
        attention_buckets: fill ``MicroBatch.buckets``; Transformer Engine does without.
        pairs_per_call: query-key pairs of padding that are as slow as one more attention call.
        predictors: layers for multi-token prediction, for each of which ``MicroBatch.predictions`` has one.
        dynamic_context: let fewer context-parallel ranks share a micro-batch where they can.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        max_tokens: int,
        data_rank: int,
        context_rank: int,
        device: torch.device,
        *,
        quadratic_cost: float = 0.0,
        token_multiple: int = 1,
        attention_buckets: bool = True,
        pairs_per_call: float = 16384.0,
        predictors: int = 0,
        dynamic_context: bool = False,
    ) -> None:
        self.layout = layout
        self.max_tokens = max_tokens
        self.data_rank = data_rank
        self.context_rank = context_rank
        self.device = device
        self.quadratic_cost = quadratic_cost
        self.token_multiple = token_multiple
        self.attention_buckets = attention_buckets
        self.pairs_per_call = pairs_per_call
        self.predictors = predictors
        self.dynamic_context = dynamic_context

    def stream_multiple(self, layout: ParallelLayout) -> int:
        """Tokens of a micro-batch over all context-parallel ranks that share it are a multiple of this."""
        ranks = layout.context * (layout.tensor if layout.sequence_parallel else 1)
        return int(np.lcm(layout.micro_batch_multiple, self.token_multiple * ranks))

    def plan(self, batch: TrajectoryBatch, parts: Int64Array | None = None) -> Plan:
        """The micro-batches of every data-parallel rank.

        All ranks get equally many, under VPP a multiple of the pipeline size; ranks that have too few sequences get
        empty ones.

        Args:
            parts: int64 [N]; a micro-batch has rows of one part, and all ranks get equally many of each. Rows of one
                unit have the same.

        Raises:
            ValueError: one sequence exceeds the token budget; the message names its row.
        """
        stream, units = Stream(batch), self.units(batch)
        if parts is None:
            return Plan(stream, units, self._shares(stream, units))
        shares: list[list[PlannedMicroBatch]] = [[] for _ in range(self.layout.data)]
        for part in np.unique(parts):
            rows, lengths = np.flatnonzero(parts == part), stream.lengths
            planned = self.shares_of_lengths(lengths[rows], numbered(units[rows]))
            for share, more in zip(shares, planned, strict=True):
                share += [
                    replace(each, rows=rows[each.rows], num_tokens=int(lengths[rows[each.rows]].sum()), part=int(part))
                    for each in more
                ]
        return Plan(stream, units, shares)

    def _shares(self, stream: Stream, units: Int64Array) -> list[list[PlannedMicroBatch]]:
        lengths = stream.lengths
        return [
            [replace(planned, num_tokens=int(lengths[planned.rows].sum())) for planned in share]
            for share in self.shares_of_lengths(lengths, units)
        ]

    def shares_of_lengths(
        self, lengths: Sequence[int] | npt.NDArray[Any], units: Int64Array | None = None
    ) -> list[list[PlannedMicroBatch]]:
        """``Plan.shares`` for sequences of so many tokens, without ``num_tokens``.

        Args:
            lengths: tokens of each sequence.
            units: [N], of ``units``; rows of one share a micro-batch. None: each row is one.

        Raises:
            ValueError: as ``plan``.
        """
        padded = self._padded(np.asarray(lengths, dtype=np.int64))
        self._check_budget(padded, lengths)
        own_costs = np.asarray(sequence_cost(padded, 1.0, self.quadratic_cost), dtype=np.float64)
        units = np.arange(len(padded)) if units is None else units
        costs = np.asarray(np.bincount(units, own_costs), dtype=np.float64)
        return self._share_out(units, np.bincount(units, padded).astype(np.int64, copy=False), costs)

    def _share_out(
        self, units: Int64Array, padded: Int64Array, costs: npt.NDArray[np.float64]
    ) -> list[list[PlannedMicroBatch]]:
        """``shares_of_lengths`` for units of so many padded tokens and such costs."""
        if self.layout.data == 1:
            parts = [np.arange(len(padded))]
        else:
            parts = [np.asarray(part, dtype=np.int64) for part in balanced_partition(costs, self.layout.data)]
        context = self.layout.context
        sizes = np.full(len(padded), context, np.int64)
        if self.dynamic_context:
            sizes = ranks_needed(padded, self.max_tokens, context)
        counts = self._counts(parts, padded, sizes)
        shares = []
        for part in parts:
            packed: list[tuple[int, Int64Array]] = []
            for size, count in counts.items():
                chosen = part[sizes[part] == size]
                budget = self.max_tokens * size // context
                each = pack_micro_batches(padded[chosen], budget, count, costs[chosen])
                packed += [(size, chosen[np.asarray(rows, dtype=np.int64)]) for rows in each]
            ranks = place([size for size, _ in packed], [float(costs[each].sum()) for _, each in packed], context)
            rows = [np.flatnonzero(np.isin(units, each)) for _, each in packed]
            shares.append([PlannedMicroBatch(*each) for each in zip(rows, ranks, strict=True)])
        return shares

    def _counts(self, parts: list[Int64Array], padded: Int64Array, sizes: Int64Array) -> dict[int, int]:
        """How many micro-batches each data-parallel rank has that so many context-parallel ranks share.

        Equally many on every rank: what the others of a pipeline or of experts wait for.
        """
        context, counts = self.layout.context, {}
        for size in context_sizes(context):
            budget, groups = self.max_tokens * size // context, context // size
            needed = max(len(pack_micro_batches(padded[part[sizes[part] == size]], budget)) for part in parts)
            if needed:
                counts[size] = -(-needed // groups) * groups
        if not counts:
            counts[context] = 1
        if self.layout.virtual_pipeline is not None:
            of_rank = sum(count * size // context for size, count in counts.items())
            counts[size := min(counts)] += -of_rank % self.layout.pipeline * (context // size)
        return counts

    def units(self, batch: TrajectoryBatch) -> Int64Array:
        """int64 [N], 0 … n - 1: what is never cut. Rows of one rollout are one unit where a micro-batch has room.

        A loss that judges responses (a mean over their tokens) then judges rollouts, as the rest of a step does. Of a
        rollout that is too long for it each row is a unit.
        """
        rollouts = batch.rollout_ids
        cut = cut_rollouts(rollouts, self._padded(batch.total_lengths.astype(np.int64)), self.max_tokens)
        begins = np.ones(len(batch), np.bool_)
        begins[1:] = (rollouts[1:] != rollouts[:-1]) | cut[rollouts[1:]]
        units: Int64Array = np.cumsum(begins, dtype=np.int64) - 1
        return units

    def micro_batches(
        self,
        batch: TrajectoryBatch,
        head_on: str = "loss_mask",
        plan: Plan | None = None,
        targets: Int64Array | None = None,
        candidates: npt.NDArray[np.int32] | None = None,
    ) -> list[MicroBatch]:
        """This rank's micro-batches.

        Args:
            batch: the whole mini-batch, the same on every rank.
            head_on: "loss_mask": the head reads what predicts tokens of the loss mask; "response": what predicts any
                response token (a critic's values).
            plan: the batch's, where it is known.
            targets: int64 [T, K], what the head reads each response token for: these are predicted from it, where it
                would otherwise be predicted from the token before. ``head_on`` is then not read.
            candidates: int32 [T, K], the tokens that the head reads in place of each response token.
        """
        plan = plan or self.plan(batch)
        mine = [each for each in plan.shares[self.data_rank] if self.context_rank in each.context_ranks]
        return [self._cut(batch, plan.stream, plan.units, planned, head_on, targets, candidates) for planned in mine]

    def balance_metrics(self, batch: TrajectoryBatch, plan: Plan) -> dict[str, float]:
        """global_seqlen/*: tokens of a data-parallel rank, cut in the batch's order (min, max) and as planned."""
        lengths = batch.total_lengths.astype(np.int64)
        in_order = [int(part.sum()) for part in np.array_split(lengths, self.layout.data)]
        planned = plan.num_tokens
        return {
            "global_seqlen/mean": float(np.mean(in_order)),
            "global_seqlen/min": float(min(in_order)),
            "global_seqlen/max": float(max(in_order)),
            "global_seqlen/minmax_diff": float(max(in_order) - min(in_order)),
            "global_seqlen/balanced_min": float(min(planned)),
            "global_seqlen/balanced_max": float(max(planned)),
        }

    def training_flops(self, architecture: Architecture, batch: TrajectoryBatch, plan: Plan | None = None) -> float:
        """FLOPs of a forward and a backward pass over the batch, over all ranks together; ``plan`` as above."""
        return flops.training_flops(architecture, batch.total_lengths, int(batch.loss_mask.sum()))

    def _check_budget(self, padded: Int64Array, lengths: Sequence[int] | npt.NDArray[Any]) -> None:
        if len(padded) and padded.max() > self.max_tokens:
            row = int(padded.argmax())
            raise InputError(
                f"sequence {row} of the batch has {int(lengths[row])} tokens, more than "
                f"learner.max_tokens_per_micro_batch={self.max_tokens} holds"
            )

    def _padded(self, lengths: Int64Array) -> Int64Array:
        padded: Int64Array = self.layout.padded(lengths)
        return padded

    def _cut(
        self,
        batch: TrajectoryBatch,
        stream: Stream,
        units: Int64Array,
        planned: PlannedMicroBatch,
        head_on: str,
        given: Int64Array | None,
        candidates: npt.NDArray[np.int32] | None,
    ) -> MicroBatch:
        cp, rows = len(planned.context_ranks), planned.rows
        layout, context_rank = replace(self.layout, context=cp), self.context_rank - planned.context_ranks.start
        # Long sequences first: neighbours are of similar length, which is what attention's buckets want.
        rows = rows[np.argsort(-stream.lengths[rows], kind="stable")]
        lengths = stream.lengths[rows] if len(rows) else np.zeros(1, np.int64)
        padded = np.maximum(layout.padded(lengths), layout.sequence_multiple)
        padded[-1] += -int(padded.sum()) % self.stream_multiple(layout)
        boundaries = np.concatenate([[0], np.cumsum(padded)])
        total = int(boundaries[-1])

        # The whole stream, padding as token 0 at the positions that follow the sequence's own.
        owner = np.repeat(np.arange(len(padded)), padded)
        position = np.arange(total) - boundaries[owner]
        ids, token_positions = np.zeros(total, np.int64), np.full(total, -1)
        if len(rows):
            real = position < lengths[owner]
            token_positions[real] = stream.positions(rows)
            ids[real] = stream.ids[token_positions[real]]

        responses = Responses.of(batch, stream, rows)
        slots = responses.slots(batch, head_on if given is None else "response")
        heads = (boundaries[responses.owner] + responses.places)[slots]
        if given is None:
            read = batch.response_ids if candidates is None else candidates
            heads, targets = heads - 1, read[responses.positions[slots]].astype(np.int64)
        else:
            targets = given[responses.positions]

        local = zigzag(padded, cp, context_rank) if cp > 1 else np.arange(total)
        place = np.full(total, -1)
        place[local] = np.arange(len(local))
        places = responses.places[slots]
        predictions = tuple(
            self._prediction(depth, _behind(ids, depth, owner), places, heads, targets, local, place)
            for depth in range(1, self.predictors + 1)
        )
        if cp > 1:
            mine = place[heads] >= 0
            slots, targets, heads = slots[mine], targets[mine], place[heads[mine]]

        buckets: tuple[Any, ...] = ()
        if self.attention_buckets:
            if cp == 1:
                buckets = tuple(self._bucket(padded, a, b) for a, b in self._bucket_ranges(padded))
            else:
                buckets = tuple(
                    self._context_bucket(padded, boundaries, position[local], a, b, cp)
                    for a, b in self._bucket_ranges(padded)
                )
        return MicroBatch(
            rows=rows,
            input_ids=self.tensor(ids[local])[None],
            position_ids=self.tensor(position[local])[None],
            cu_seqlens=self.tensor(boundaries, torch.int32),
            max_seqlen=int(padded.max()),
            head_positions=self.tensor(heads),
            targets=self.tensor(targets),
            slots=self.tensor(slots),
            response_positions=responses.positions,
            sequence_ids=self.tensor(numbered(units[rows])[responses.owner]),
            token_positions=token_positions[local],
            buckets=buckets,
            predictions=predictions,
            context_size=cp,
            context_rank=context_rank,
            part=planned.part,
        )

    def _prediction(
        self,
        depth: int,
        ids: Int64Array,
        places: Int64Array,
        heads: Int64Array,
        targets: Int64Array,
        local: Int64Array,
        place: Int64Array,
    ) -> Prediction:
        """``MicroBatch.predictions`` of the layer ``depth``, from 1 on.

        Args:
            ids: what it gets, in the whole stream.
            places: of the targets in their texts.
            heads: tokens of the whole stream before the targets.
            local, place: tokens of the whole stream that this rank holds; where, or -1.
        """
        told = places > depth  # the texts' first tokens are predicted from nothing
        heads, targets = place[heads[told] - depth], targets[told]
        mine = heads >= 0
        return Prediction(self.tensor(ids[local])[None], self.tensor(heads[mine]), self.tensor(targets[mine]))

    def tensor(self, array: npt.NDArray[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """On the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, dtype)

    def _bucket_ranges(self, lengths: Int64Array) -> list[tuple[int, int]]:
        """Cut sequences into runs so that padded pairs plus calls cost least (dynamic program over the cuts).

        Every run is padded to its longest sequence, so runs of the (nearly) sorted lengths are all that can be best.
        """
        count = len(lengths)
        best = np.zeros(count + 1)
        cut = np.zeros(count + 1, np.int64)
        tallest = np.empty(count, np.float64)
        for end in range(1, count + 1):
            # tallest[i]: longest of lengths[i:end]
            tallest[end - 1] = lengths[end - 1]
            np.maximum(tallest[:end], lengths[end - 1], out=tallest[:end])
            cost = best[:end] + self.pairs_per_call + (end - np.arange(end)) * tallest[:end] ** 2
            cut[end] = int(cost.argmin())
            best[end] = cost[cut[end]]
        ranges = []
        end = count
        while end > 0:
            ranges.append((int(cut[end]), end))
            end = int(cut[end])
        return ranges[::-1]

    def _bucket(self, lengths: Int64Array, a: int, b: int) -> Bucket:
        lengths = lengths[a:b]
        tokens = int(lengths.sum())
        longest = int(lengths.max())
        pad = cells = None
        if (lengths != longest).any():
            owner = np.repeat(np.arange(b - a), lengths)
            cell = owner * longest + ramp(lengths)
            grid = np.zeros((b - a) * longest, np.int64)
            grid[cell] = np.arange(tokens)
            pad = torch.from_numpy(grid).to(self.device)
            cells = torch.from_numpy(cell).to(self.device)
        return Bucket(tokens, b - a, longest, pad, cells)

    def _context_bucket(
        self, padded: Int64Array, boundaries: Int64Array, positions: Int64Array, a: int, b: int, cp: int
    ) -> ContextBucket:
        queries = self._bucket(padded // cp, a, b)
        longest = int(padded[a:b].max())
        share = int(boundaries[-1]) // cp
        first = int(boundaries[a]) // cp
        key_pad = np.full((b - a, longest), first)
        key_cells = np.empty((cp, queries.tokens), np.int64)
        for index in range(a, b):
            chunk = int(padded[index]) // (2 * cp)
            start = int(boundaries[index]) // cp
            for piece in range(2 * cp):
                rank, half = (piece, 0) if piece < cp else (2 * cp - 1 - piece, 1)
                source = rank * share + start + half * chunk
                key_pad[index - a, piece * chunk : (piece + 1) * chunk] = np.arange(source, source + chunk)
                cells = (index - a) * longest + piece * chunk + np.arange(chunk)
                key_cells[rank, start + half * chunk - first :][:chunk] = cells
        grid = np.zeros((b - a) * queries.length, np.int64)
        run = positions[boundaries[a] // cp : boundaries[b] // cp]
        if queries.cells is None:
            grid[:] = run
        else:
            grid[queries.cells.cpu().numpy()] = run
        return ContextBucket(
            queries=queries,
            key_length=longest,
            key_pad=torch.from_numpy(key_pad.reshape(-1)).to(self.device),
            key_cells=torch.from_numpy(key_cells).to(self.device),
            query_positions=torch.from_numpy(grid.reshape(b - a, queries.length)).to(self.device),
        )


def _behind(ids: Int64Array, distance: int, owner: Int64Array) -> Int64Array:
    """The ids ``distance`` behind each of a stream; 0 where that is of another owner."""
    result = np.zeros_like(ids)
    same = owner[distance:] == owner[:-distance]
    result[:-distance] = np.where(same, ids[distance:], 0)
    return result


def zigzag(lengths: Int64Array, context_size: int, context_rank: int) -> Int64Array:
    """Positions, in a packed stream of ``lengths`` (multiples of 2 x CP), that a context-parallel rank holds."""
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    chunks = lengths // (2 * context_size)
    # Per sequence two runs, one after the other: chunk r, then chunk 2 CP - 1 - r.
    firsts = np.stack([starts + context_rank * chunks, starts + (2 * context_size - 1 - context_rank) * chunks], axis=1)
    counts = np.repeat(chunks, 2)
    return np.repeat(firsts.reshape(-1), counts) + ramp(counts)
