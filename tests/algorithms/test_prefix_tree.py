"""The tree of sequences that begin alike, and which of them to compute together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.algorithms import prefix_tree as module
from megatron_retool.algorithms.prefix_tree import (
    LEAST_SHARED_TOKENS,
    PrefixTree,
    common_prefix,
    families,
    prefix_tree,
    side_by_side,
)

# Few tokens, so that sequences share prefixes of all lengths, are equal, and end inside one another.
sequences_strategy = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(np.array), min_size=1, max_size=9)


@settings(deadline=None, max_examples=300)
@given(sequences=sequences_strategy, least=st.integers(1, 5))
def test_every_sequence_is_a_path_of_the_tree(sequences: list[np.ndarray], least: int) -> None:
    tree = prefix_tree(sequences, least)
    check_paths(tree, sequences)
    for node in np.flatnonzero(tree.subtree_ends > tree.ends):
        copies = (tree.parents == node).sum() + (node in tree.last_nodes)
        assert (tree.ends[node] - tree.starts[node]) * (copies - 1) >= least
    for a, b in itertools.combinations(range(len(sequences)), 2):
        if sequences[a].tolist() == sequences[b].tolist():
            assert tree.last_nodes[a] == tree.last_nodes[b]


def check_paths(tree: PrefixTree, sequences: list[np.ndarray]) -> None:
    ids = np.full(tree.num_tokens, -1)
    for number, sequence in enumerate(sequences):
        places = tree.places(number)
        assert (np.diff(places) > 0).all()
        assert (tree.positions[places] == np.arange(len(sequence))).all()
        assert ((ids[places] == -1) | (ids[places] == sequence)).all()
        ids[places] = sequence
    assert (ids >= 0).all(), "no token that no sequence has"
    sources = tree.token_sources
    assert all(
        sequences[source][position] == token
        for source, position, token in zip(sources, tree.positions, ids, strict=True)
    )


@settings(deadline=None, max_examples=100)
@given(groups=st.lists(sequences_strategy, min_size=1, max_size=3), data=st.data())
def test_trees_side_by_side_are_a_tree_of_all_sequences(groups: list[list[np.ndarray]], data: st.DataObject) -> None:
    numbers = data.draw(st.permutations(range(sum(map(len, groups)))))
    rows, sequences = [], [np.zeros(0)] * len(numbers)
    for group in groups:
        mine, numbers = np.array(numbers[: len(group)]), numbers[len(group) :]
        rows.append(mine)
        for number, sequence in zip(mine, group, strict=True):
            sequences[number] = sequence
    trees = [prefix_tree(group, 3) for group in groups]
    tree = side_by_side(trees, rows)
    check_paths(tree, sequences)
    check_what_is_seen(tree, len(sequences))
    assert tree.num_tokens == sum(each.num_tokens for each in trees)


@settings(deadline=None, max_examples=200)
@given(sequences=sequences_strategy)
def test_nothing_that_is_shared_stands_twice(sequences: list[np.ndarray]) -> None:
    tree = prefix_tree(sequences, 1)
    prefixes = {tuple(sequence[: length + 1]) for sequence in sequences for length in range(len(sequence))}
    assert tree.num_tokens == len(prefixes)


@settings(deadline=None, max_examples=200)
@given(sequences=sequences_strategy, least=st.integers(1, 5))
def test_a_token_sees_its_own_past_and_nothing_else(sequences: list[np.ndarray], least: int) -> None:
    """By what attention goes by: keys before it, whose node's subtree it lies in."""
    check_what_is_seen(prefix_tree(sequences, least), len(sequences))


def check_what_is_seen(tree: PrefixTree, count: int) -> None:
    visible_until = np.repeat(tree.subtree_ends, tree.ends - tree.starts)
    at = np.arange(tree.num_tokens)
    seen = (at <= at[:, None]) & (at[:, None] < visible_until)
    assert seen.sum() == tree.num_pairs
    for number in range(count):
        places = tree.places(number)
        for length, token in enumerate(places, 1):
            assert np.flatnonzero(seen[token]).tolist() == places[:length].tolist()


def test_short_common_prefixes_stay_with_each_sequence() -> None:
    short, long = LEAST_SHARED_TOKENS - 1, LEAST_SHARED_TOKENS
    for shared, tokens in ((short, 2 * (short + 5)), (long, long + 2 * 5)):
        sequences = [np.concatenate([np.zeros(shared, int), np.full(5, end)]) for end in (1, 2)]
        assert prefix_tree(sequences).num_tokens == tokens


def test_a_prompt_joins_all_that_begin_with_it_whatever_lies_between() -> None:
    """[0] is the beginning of both others, which lie side by side and share no prompt."""
    sequences = [np.array([0]), np.array([0, 0]), np.array([0, 1])]
    assert [part.tolist() for part in families(sequences, [1, 2, 2], np.arange(3), 9)] == [[0, 1, 2]]
    assert [part.tolist() for part in families(sequences[1:], [2, 2], np.arange(2), 9)] == [[0], [1]]


@settings(deadline=None, max_examples=200)
@given(sequences=sequences_strategy, data=st.data(), budget=st.integers(4, 30))
def test_families(sequences: list[np.ndarray], data: st.DataObject, budget: int) -> None:
    count = len(sequences)
    prompts = [data.draw(st.integers(1, len(sequence))) for sequence in sequences]
    joined = np.sort(np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))))
    joined = np.unique(joined, return_inverse=True)[1]
    parts = families(sequences, prompts, joined, budget)
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert [part[0] for part in parts] == sorted(part[0] for part in parts)
    part_of = {row: number for number, part in enumerate(parts) for row in part}
    for a, b in itertools.combinations(range(count), 2):
        if joined[a] == joined[b]:
            assert part_of[a] == part_of[b]
    for part in parts:
        fits = prefix_tree([sequences[row] for row in part]).num_tokens <= budget
        assert fits or len(set(joined[part])) == 1
    if sum(map(len, sequences)) <= budget:  # nothing had to be cut
        for a, b in itertools.combinations(range(count), 2):
            if common_prefix(sequences[a], sequences[b]) >= min(prompts[a], prompts[b]):
                assert part_of[a] == part_of[b]


def test_groups_of_one_system_prompt_are_families_of_their_own() -> None:
    system = np.arange(100)
    rows = [np.concatenate([system, [200 + group], [300 + row]]) for group in range(3) for row in range(4)]
    parts = families(rows, [101] * 12, np.arange(12), 10_000)
    assert [part.tolist() for part in parts] == [list(range(first, first + 4)) for first in (0, 4, 8)]


def test_a_family_that_fits_costs_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree for every row added would be slower by the group's size."""
    built = []
    monkeypatch.setattr(module, "prefix_tree", lambda rows: built.append(len(rows)) or prefix_tree(rows))
    prompts = [np.full(100, group) for group in range(3)]
    rows = [np.concatenate([prompts[group], np.full(50, 10 + row)]) for group in range(3) for row in range(16)]
    arguments = rows, [100] * 48, np.arange(48)
    assert [len(part) for part in families(*arguments, 900)] == [16] * 3 and built == [16] * 3
    built.clear()
    assert len(families(*arguments, 16 * 150)) == 3 and not built, "so few tokens fit without sharing"
    # Nine fit at a time, three of them without sharing.
    assert [len(part) for part in families(*arguments, 550)] == [9, 7] * 3 and len(built) == 3 * (1 + 7 + 4)
