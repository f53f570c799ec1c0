"""Sequences that begin alike, as a tree in which every common prefix stands once.

Responses of a group share their prompt, forks of a trajectory its stem, segments of an agent's rollout their context.
In depth-first order a node's tokens are followed by those of all nodes below it, so that a causal model may compute
the whole tree as one stream: a token sees the tokens of its own node before it, and all of every node whose subtree it
lies in.

Plain arithmetic on token ids: no tensor, no communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

LEAST_SHARED_TOKENS = 16
"""Common prefixes that spare fewer tokens stay with each sequence: one more call of attention costs more than their
arithmetic."""


@dataclass(frozen=True)
class PrefixTree:
    """Nodes in depth-first order; m nodes, t tokens, of S sequences.

    Attributes:
        starts, ends: int64 [m], each node's own tokens in the stream.
        subtree_ends: int64 [m], where the last node below it ends; ``ends`` of a leaf.
        depths: int64 [m], the position in its sequences of a node's first token.
        sources: int64 [m], a sequence that goes through the node.
        last_nodes: int64 [S], where each sequence ends.
        parents: int64 [m], -1: none.
    """

    starts: Int64Array
    ends: Int64Array
    subtree_ends: Int64Array
    depths: Int64Array
    sources: Int64Array
    last_nodes: Int64Array
    parents: Int64Array

    @property
    def num_tokens(self) -> int:
        """t"""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def positions(self) -> Int64Array:
        """int64 [t], of each token in its sequences."""
        lengths = self.ends - self.starts
        return np.arange(self.num_tokens) + np.repeat(self.depths - self.starts, lengths)

    @property
    def token_sources(self) -> Int64Array:
        """int64 [t], a sequence that each token belongs to."""
        return np.repeat(self.sources, self.ends - self.starts)

    @property
    def num_pairs(self) -> float:
        """Query-key pairs of causal attention, a token with itself included."""
        own = (self.ends - self.starts).astype(np.float64)
        return float((own * (own + 1) / 2 + own * self.depths).sum())

    def places(self, sequence: int) -> Int64Array:
        """int64 [length]: where in the stream the tokens of a sequence stand."""
        parts = []
        node = int(self.last_nodes[sequence])
        while node >= 0:
            parts.append(np.arange(self.starts[node], self.ends[node]))
            node = int(self.parents[node])
        return np.concatenate(parts[::-1])


@dataclass
class _Node:
    start: int
    """First token, as a position in the sequences."""
    end: int
    source: int
    children: list[_Node] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    """That end here."""


def prefix_tree(sequences: Sequence[npt.NDArray[Any]], least_shared: int = LEAST_SHARED_TOKENS) -> PrefixTree:
    """The tree of S sequences of token ids, none of them empty.

    Sorted, sequences with a common prefix are neighbours, and the tree grows along its right edge (O(t + S log S)
    comparisons).  Invariants: ``places`` of a sequence names its own tokens, in order; equal sequences end in one node;
    a node with something below it spares at least ``least_shared`` tokens that would otherwise stand in each of what
    is below it and ends in it; siblings are in descending order of their own length, so that attention finds similar
    ones together.
    """
    order = lexicographic_order(sequences)
    root = _Node(0, 0, -1)
    edge = [root]
    before: npt.NDArray[Any] | None = None
    for row in order:
        ids = sequences[row]
        common = 0 if before is None else common_prefix(before, ids)
        before = ids
        while edge[-1].start >= common and len(edge) > 1:
            edge.pop()
        top = edge[-1]
        if common < top.end:
            # The lower part of the node becomes its child, and the new sequence another.
            lower = _Node(common, top.end, top.source, top.children, top.sequences)
            top.end, top.children, top.sequences = common, [lower], []
        if common < len(ids):
            leaf = _Node(common, len(ids), row)
            top.children.append(leaf)
            edge.append(leaf)
        edge[-1].sequences.append(row)
    return _flatten(root, len(sequences), least_shared)


def _flatten(root: _Node, count: int, least_shared: int) -> PrefixTree:
    result: list[tuple[_Node, int]] = []
    last = np.zeros(count, np.int64)

    def give_short_ones_to_their_children(node: _Node) -> list[_Node]:
        kept = []
        waiting = node.children[::-1]
        while waiting:
            child = waiting.pop()
            copies = len(child.children) + bool(child.sequences)
            if child.children and (child.end - child.start) * (copies - 1) < least_shared:
                for below in child.children:
                    below.start = child.start
                waiting.extend(child.children[::-1])
                if child.sequences:
                    waiting.append(_Node(child.start, child.end, child.sequences[0], [], child.sequences))
            else:
                kept.append(child)
        return sorted(kept, key=lambda child: (child.start - child.end, child.source))

    stack = [(child, -1) for child in give_short_ones_to_their_children(root)[::-1]]
    while stack:
        node, parent = stack.pop()
        number = len(result)
        result.append((node, parent))
        last[node.sequences] = number
        stack.extend((child, number) for child in give_short_ones_to_their_children(node)[::-1])
    depths = np.array([node.start for node, _ in result], np.int64)
    lengths = np.array([node.end for node, _ in result], np.int64) - depths
    ends = np.cumsum(lengths)
    parents = np.array([parent for _, parent in result], np.int64)
    subtree_ends = ends.copy()
    for number in range(len(result) - 1, -1, -1):
        parent = parents[number]
        if parent >= 0:
            subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[number])
    sources = np.array([node.source for node, _ in result], np.int64)
    return PrefixTree(ends - lengths, ends, subtree_ends, depths, sources, last, parents)


def side_by_side(trees: Sequence[PrefixTree], rows: Sequence[npt.NDArray[np.int64]]) -> PrefixTree:
    """Several trees as one, one after the other, without sharing anything.

    Args:
        trees: not empty.
        rows: for each tree, which numbers its sequences have in the whole.
    """
    first_tokens = np.cumsum([tree.num_tokens for tree in trees]) - [tree.num_tokens for tree in trees]
    first_nodes = np.cumsum([len(tree.starts) for tree in trees]) - [len(tree.starts) for tree in trees]
    last_nodes = np.empty(sum(map(len, rows)), np.int64)
    for tree, numbers, node in zip(trees, rows, first_nodes, strict=True):
        last_nodes[numbers] = tree.last_nodes + node
    moved = list(zip(trees, first_tokens, strict=True))
    return PrefixTree(
        starts=np.concatenate([tree.starts + tokens for tree, tokens in moved]),
        ends=np.concatenate([tree.ends + tokens for tree, tokens in moved]),
        subtree_ends=np.concatenate([tree.subtree_ends + tokens for tree, tokens in moved]),
        depths=np.concatenate([tree.depths for tree in trees]),
        sources=np.concatenate([numbers[tree.sources] for tree, numbers in zip(trees, rows, strict=True)]),
        last_nodes=last_nodes,
        parents=np.concatenate(
            [np.where(tree.parents < 0, -1, tree.parents + node) for tree, node in zip(trees, first_nodes, strict=True)]
        ),
    )


def lexicographic_order(sequences: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Sequence numbers by token ids; of equal ones the first comes first, a prefix before what continues it."""
    # Big-endian bytes of whole numbers that are not negative compare as the numbers do.
    keys = [np.asarray(ids).astype(">u4").tobytes() for ids in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def common_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Tokens that two sequences have in common at their beginning."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter


def families(
    sequences: Sequence[npt.NDArray[Any]],
    prompt_lengths: Sequence[int] | npt.NDArray[Any],
    joined: Int64Array,
    max_tokens: int,
) -> list[Int64Array]:
    """Which sequences to compute together: whole families where they fit, else parts of them that do.

    Sequences are of one family where what they share covers the prompt of one of them; so are those that ``joined``
    says belong together, whatever they share.

    Invariants: each sequence is in exactly one part; those of one number of ``joined`` are in the same; the tree of a
    part has at most ``max_tokens`` tokens, unless one number of ``joined`` alone has more; the answer depends on the
    arguments alone.

    Args:
        sequences: [S], token ids of prompt and response.
        prompt_lengths: [S].
        joined: int64 [S], 0 … J - 1: what is never cut.
        max_tokens: that a part may have.

    Returns:
        Sequence numbers of each part, ascending; parts in the order of their first sequence.
    """
    order = lexicographic_order(sequences)
    family = _Sets(int(joined.max()) + 1 if len(joined) else 0)
    shared = [common_prefix(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
    for place, row in enumerate(order):
        # Those that begin with its prompt lie side by side, before it and after it, whatever their own prompts are.
        for neighbours in (range(place, len(shared)), range(place - 1, -1, -1)):
            for first in neighbours:
                if shared[first] < prompt_lengths[row]:
                    break
                family.join(int(joined[order[first]]), int(joined[order[first + 1]]))
    members: dict[int, dict[int, list[int]]] = {}
    for row in order:
        unit = int(joined[row])
        members.setdefault(family.of(unit), {}).setdefault(unit, []).append(row)
    parts: list[Int64Array] = []
    for units in members.values():
        parts += _cut_family(sequences, list(units.values()), max_tokens)
    return sorted(parts, key=lambda part: int(part[0]))


def _cut_family(sequences: Sequence[npt.NDArray[Any]], units: list[list[int]], max_tokens: int) -> Iterator[Int64Array]:
    """Rows of a family's parts: the whole where it fits, else as many of its units as do, in their order."""

    def fits(rows: list[int]) -> bool:
        # A tree costs a walk over all tokens, and has no more of them than its sequences.
        result = [sequences[row] for row in rows]
        return sum(map(len, result)) <= max_tokens or prefix_tree(result).num_tokens <= max_tokens

    whole = [row for rows in units for row in rows]
    if len(units) == 1 or fits(whole):
        yield np.sort(np.array(whole, np.int64))
        return
    part: list[int] = []
    for rows in units:
        if part and not fits(part + rows):
            yield np.sort(np.array(part, np.int64))
            part = []
        part = part + rows
    yield np.sort(np.array(part, np.int64))


class _Sets:
    """Disjoint sets of 0 … n - 1."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def of(self, item: int) -> int:
        while self._parents[item] != item:
            self._parents[item] = self._parents[self._parents[item]]
            item = self._parents[item]
        return item

    def join(self, a: int, b: int) -> None:
        self._parents[self.of(b)] = self.of(a)
