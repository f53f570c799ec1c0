"""Packed micro-batches in which a common prefix of several sequences is computed once (``learner.share_prefixes``).

Families of sequences that begin alike (responses of a group, forks of a trajectory, segments of an agent's rollout) go
into one micro-batch as a tree (``algorithms/prefix_tree.py``).  Nothing changes for the loss: each response token
still has a slot of its own, and where several sequences share a token their slots take the one output of the head that
there is, so that its gradient is the sum of theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from conversion.model import flops
from conversion.model.architecture import Architecture
from megatron_retool.algorithms.prefix_tree import PrefixTree, families, prefix_tree, side_by_side
from megatron_retool.learner.attention_pieces import SharedPrefixes
from megatron_retool.learner.micro_batch import Int64Array, MicroBatch
from megatron_retool.learner.packing import Packer, Plan, PlannedMicroBatch
from megatron_retool.learner.stream import Responses, Stream, numbered
from megatron_retool.trajectory import TrajectoryBatch


class SharedPrefixPacker(Packer):
    """A ``Packer`` whose units are families of sequences. Context parallelism would cut a node: it must be 1."""

    def _shares(self, stream: Stream, units: Int64Array) -> list[list[PlannedMicroBatch]]:
        self._check_budget(stream.lengths, stream.lengths)
        # A family larger than a rank's share would leave other ranks with nothing to do.
        share = -(-int(stream.lengths.sum()) // self.layout.data)
        parts = families(stream.sequences, stream.prompt_lengths, units, min(self.max_tokens, share))
        trees = [self._tree(stream, part) for part in parts]
        family = np.empty(len(units), np.int64)
        for number, part in enumerate(parts):
            family[part] = number
        tokens = np.array([tree.num_tokens for tree in trees], np.int64)
        # ``quadratic_cost`` is for n^2 pairs, of which a causal model has half.
        costs = tokens + 2 * self.quadratic_cost * np.array([tree.num_pairs for tree in trees])

        def with_tree(planned: PlannedMicroBatch) -> PlannedMicroBatch:
            rows, numbers = planned.rows, np.unique(family[planned.rows])
            tree = self._joined(stream, rows, [trees[number] for number in numbers], [parts[n] for n in numbers])
            return replace(planned, num_tokens=tree.num_tokens, tree=tree)

        return [[with_tree(planned) for planned in share] for share in self._share_out(family, tokens, costs)]

    def _joined(self, stream: Stream, rows: Int64Array, trees: list[PrefixTree], parts: list[Int64Array]) -> PrefixTree:
        """The tree of a micro-batch's rows, which are some families: as one, where that has fewer tokens (families may
        have a system prompt in common), else theirs side by side, which never have more than was planned."""
        if len(trees) == 1:
            return trees[0]
        whole = self._tree(stream, rows)
        if whole.num_tokens <= sum(tree.num_tokens for tree in trees):
            return whole
        return side_by_side(trees, [np.searchsorted(rows, part) for part in parts])

    def training_flops(self, architecture: Architecture, batch: TrajectoryBatch, plan: Plan | None = None) -> float:
        """FLOPs of a forward and backward pass, with shared prefixes counted once."""
        plan = plan or self.plan(batch)
        trees = [planned.tree for share in plan.shares for planned in share if planned.tree]
        pairs = sum(tree.num_pairs for tree in trees)
        return 3.0 * flops.forward_flops_of(architecture, sum(plan.num_tokens), pairs, float(batch.loss_mask.sum()))

    def _tree(self, stream: Stream, rows: Int64Array) -> PrefixTree:
        return prefix_tree([stream.sequences[row] for row in rows])

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
        assert given is None and candidates is None, "learner.share_prefixes: given targets are refused before"
        rows, tree = planned.rows, planned.tree
        assert tree is not None
        real = tree.num_tokens
        total = max(real, 1)
        total += -total % self.stream_multiple(self.layout)
        lengths, subtree_ends = tree.ends - tree.starts, tree.subtree_ends
        positions = np.concatenate([tree.positions, np.arange(total - real)])
        visible_until = np.concatenate([np.repeat(subtree_ends, lengths), np.full(total - real, total)])
        if total > real:
            lengths = np.append(lengths, total - real)  # padding sees nothing but itself
        token_positions = np.full(total, -1)
        token_positions[:real] = stream.starts[rows][tree.token_sources] + tree.positions
        ids = np.zeros(total, np.int64)
        ids[:real] = stream.ids[token_positions[:real]]

        places = [tree.places(number) for number in range(len(rows))]
        responses = Responses.of(batch, stream, rows)
        starts = np.cumsum(stream.lengths[rows]) - stream.lengths[rows]
        in_stream = np.concatenate([*places, np.zeros(0, np.int64)])
        slots = responses.slots(batch, head_on)
        heads = in_stream[(starts[responses.owner] + responses.places - 1)[slots]]
        targets = batch.response_ids[responses.positions[slots]].astype(np.int64)
        (heads, targets), copies = np.unique(np.stack([heads, targets]), axis=1, return_inverse=True)

        mine = stream.positions(rows)
        computed = token_positions[in_stream]
        elsewhere = np.flatnonzero(mine != computed)
        stems = [
            (int(start), int(end), int(below))
            for start, end, below in zip(tree.starts, tree.ends, tree.subtree_ends, strict=True)
            if below > end
        ]
        return MicroBatch(
            rows=rows,
            input_ids=self.tensor(ids)[None],
            position_ids=self.tensor(positions)[None],
            cu_seqlens=self.tensor(np.array([0, total]), torch.int32),
            max_seqlen=int(positions.max()) + 1,
            head_positions=self.tensor(heads),
            targets=self.tensor(targets),
            slots=self.tensor(slots),
            response_positions=responses.positions,
            sequence_ids=self.tensor(numbered(units[rows])[responses.owner]),
            token_positions=token_positions,
            tree=SharedPrefixes(
                nodes=tuple(self._bucket(lengths, a, b) for a, b in self._bucket_ranges(lengths)),
                stems=tuple(stems),
                visible_until=self.tensor(visible_until, torch.int32),
            ),
            copies=self.tensor(copies.reshape(-1)),
            duplicates=np.stack([mine[elsewhere], computed[elsewhere]]),
        )
