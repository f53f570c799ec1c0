"""The tree of sequences that begin alike, and which of them to compute together."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.algorithms.prefix_tree import LEAST_SHARED_TOKENS, common_prefix, families, prefix_tree

# Few tokens, so that sequences share prefixes of all lengths, are equal, and end inside one another.
sequences_strategy = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(np.array), min_size=1, max_size=9)


@settings(deadline=None, max_examples=300)
@given(sequences=sequences_strategy, least=st.integers(1, 5))
def test_every_sequence_is_a_path_of_the_tree(sequences: list[np.ndarray], least: int) -> None:
    tree = prefix_tree(sequences, least)
    ids = np.full(tree.num_tokens, -1)
    for number, sequence in enumerate(sequences):
        places = tree.places(number)
        assert (np.diff(places) > 0).all()
        assert (tree.positions[places] == np.arange(len(sequence))).all()
        assert ((ids[places] == -1) | (ids[places] == sequence)).all()
        ids[places] = sequence
        assert (sequences[tree.token_sources[places[0]]][: tree.ends[0] - tree.starts[0]] >= 0).all()
    assert (ids >= 0).all(), "no token that no sequence has"
    sources = tree.token_sources
    assert all(
        sequences[source][position] == token
        for source, position, token in zip(sources, tree.positions, ids, strict=True)
    )
    inner = tree.subtree_ends > tree.ends
    assert (tree.ends - tree.starts)[inner].min(initial=least) >= least


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
    tree = prefix_tree(sequences, least)
    visible_until = np.repeat(tree.subtree_ends, tree.ends - tree.starts)
    at = np.arange(tree.num_tokens)
    seen = (at <= at[:, None]) & (at[:, None] < visible_until)
    assert seen.sum() == tree.num_pairs
    for number in range(len(sequences)):
        places = tree.places(number)
        for length, token in enumerate(places, 1):
            assert np.flatnonzero(seen[token]).tolist() == places[:length].tolist()


def test_short_common_prefixes_stay_with_each_sequence() -> None:
    short, long = LEAST_SHARED_TOKENS - 1, LEAST_SHARED_TOKENS
    for shared, tokens in ((short, 2 * (short + 5)), (long, long + 2 * 5)):
        sequences = [np.concatenate([np.zeros(shared, int), np.full(5, end)]) for end in (1, 2)]
        assert prefix_tree(sequences).num_tokens == tokens


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
