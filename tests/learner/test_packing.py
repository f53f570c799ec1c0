"""Plans and packed micro-batches: every token once, in the right place, little padding, even work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from conversion.model.layout import ParallelLayout
from megatron_retool.algorithms.dynamic_context import context_sizes
from megatron_retool.algorithms.prefix_tree import prefix_tree
from megatron_retool.learner.attention_pieces import SharedPrefixes
from megatron_retool.learner.packing import Packer, zigzag
from megatron_retool.learner.shared_packing import SharedPrefixPacker
from megatron_retool.learner.tree_attention import tree_attention
from megatron_retool.parity.admission.tiny_model import random_batch, with_copies
from megatron_retool.parity.batches import sequences
from megatron_retool.trajectory import TrajectoryBatch


def _layout(data: int = 1, context: int = 1, tensor: int = 1, pipeline: int = 1, virtual: int | None = None):
    return ParallelLayout.of_ranks(
        data * context * tensor * pipeline,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        context=context,
        sequence_parallel=tensor > 1,
    )


def _packer(layout: ParallelLayout, max_tokens: int, data_rank: int = 0, context_rank: int = 0, **options) -> Packer:
    return Packer(layout, max_tokens, data_rank, context_rank, torch.device("cpu"), **options)


class LargestTensor(TorchDispatchMode):
    """``elements`` of the largest tensor that any operation under it gives."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


lengths_strategy = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths_strategy,
    data=st.integers(1, 3),
    context=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
    budget=st.integers(48, 150),
)
def test_every_response_token_is_read_once_from_its_predecessor(
    lengths: list[tuple[int, int]], data: int, context: int, tensor: int, budget: int
) -> None:
    layout = _layout(data=data, context=context, tensor=tensor)
    batch = random_batch(lengths)
    whole = [np.concatenate(pair) for pair in sequences(batch)]
    owner, inside = batch.sequence_ids, _positions(batch)
    seen = np.zeros(batch.num_response_tokens, int)
    for data_rank in range(data):
        shares = [_packer(layout, budget, data_rank, rank).micro_batches(batch) for rank in range(context)]
        for pieces in zip(*shares, strict=True):
            assert len({piece.input_ids.size(1) for piece in pieces}) == 1
            assert pieces[0].input_ids.size(1) % tensor == 0
            for piece in pieces:
                ids, positions = piece.input_ids[0].numpy(), piece.position_ids[0].numpy()
                tokens = piece.response_positions[piece.slots.numpy()]
                heads = piece.head_positions.numpy()
                for token, head, target in zip(tokens, heads, piece.targets.numpy(), strict=True):
                    sequence = whole[owner[token]]
                    place = batch.prompt_lengths[owner[token]] + inside[token]
                    assert positions[head] == place - 1
                    assert ids[head] == sequence[place - 1]
                    assert target == sequence[place]
                np.add.at(seen, tokens, 1)
                # Whole responses on every context-parallel rank, whatever it read of them.
                assert sorted(set(owner[piece.response_positions])) == sorted(piece.rows)
                np.testing.assert_array_equal(piece.rows[piece.sequence_ids], owner[piece.response_positions])
    np.testing.assert_array_equal(seen, batch.loss_mask)


def _positions(batch: TrajectoryBatch) -> np.ndarray:
    return np.concatenate([np.arange(length) for length in batch.response_lengths])


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths_strategy,
    data=st.integers(1, 3),
    context=st.sampled_from([2, 3, 4, 6]),
    pipeline=st.sampled_from([1, 4]),
    budget=st.integers(60, 150),
)
def test_as_many_ranks_share_a_micro_batch_as_its_longest_sequence_needs(
    lengths: list[tuple[int, int]], data: int, context: int, pipeline: int, budget: int
) -> None:
    layout = _layout(data=data, context=context, pipeline=pipeline, virtual=2 if pipeline > 1 else None)
    batch = random_batch(lengths)
    packers = [
        [_packer(layout, budget, data_rank, rank, dynamic_context=True) for rank in range(context)]
        for data_rank in range(data)
    ]
    seen, counts = np.zeros(batch.num_response_tokens, int), set()
    for share, of_data_rank in zip(packers[0][0].plan(batch).shares, packers, strict=True):
        pieces = [packer.micro_batches(batch) for packer in of_data_rank]
        counts |= {len(own) for own in pieces}
        before = [0] * context
        for planned in share:
            size, total = len(planned.context_ranks), layout.padded(batch.total_lengths[planned.rows])
            assert size in context_sizes(context) and planned.context_ranks.start % size == 0
            assert total.sum() <= budget * size // context
            smaller = [other for other in context_sizes(context) if other < size]
            assert not len(total) or not smaller or total.max() > budget * smaller[0] // context
            (place,) = {before[rank] for rank in planned.context_ranks}  # the same one of each rank that shares it
            for rank in planned.context_ranks:
                piece = pieces[rank][place]
                np.testing.assert_array_equal(np.sort(piece.rows), planned.rows)
                assert (piece.context_size, piece.context_rank) == (size, rank - planned.context_ranks.start)
                np.add.at(seen, piece.response_positions[piece.slots.numpy()], 1)
                before[rank] += 1
    assert len(counts) == 1 and counts.pop() % pipeline == 0
    np.testing.assert_array_equal(seen, batch.loss_mask)


def test_short_sequences_are_shared_out_over_context_parallel_ranks() -> None:
    batch = random_batch([(4, 30), (4, 30), (4, 30), (4, 30), (9, 90)])
    packer = _packer(_layout(context=4), 160, dynamic_context=True)
    sizes = [len(planned.context_ranks) for planned in packer.plan(batch).shares[0]]
    assert sizes == [4, 1, 1, 1, 1]
    shared = _packer(_layout(context=4), 160).plan(batch).shares[0]
    assert [len(planned.context_ranks) for planned in shared] == [4, 4]


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_strategy, context=st.sampled_from([1, 2, 4]), pairs=st.sampled_from([1.0, 300.0, 1e9]))
def test_attention_buckets_hold_every_token_where_they_say(
    lengths: list[tuple[int, int]], context: int, pairs: float
) -> None:
    batch = random_batch(lengths)
    packers = [_packer(_layout(context=context), 1000, 0, rank, pairs_per_call=pairs) for rank in range(context)]
    pieces = [packer.micro_batches(batch)[0] for packer in packers]
    gathered = torch.cat([piece.input_ids[0] for piece in pieces])
    for piece in pieces:
        first = 0
        for bucket in piece.buckets:
            queries = bucket.queries if context > 1 else bucket
            run = piece.input_ids[0, first : first + queries.tokens]
            grid = run if queries.pad is None else run[queries.pad]
            cells = grid if queries.cells is None else grid[queries.cells]
            assert torch.equal(cells, run)
            if context > 1:
                # Keys lie in natural order: the query at a position finds its own token among them there.
                keys = gathered[bucket.key_pad].view(queries.batch, bucket.key_length)
                found = keys.gather(1, bucket.query_positions).reshape(-1)
                assert torch.equal(found if queries.cells is None else found[queries.cells], run)
                # And every rank's tokens of the bucket are found in the keys again.
                runs = gathered.view(context, -1)[:, first : first + queries.tokens]
                assert torch.equal(keys.flatten()[bucket.key_cells], runs)
            first += queries.tokens
        assert first == piece.input_ids.size(1)


@settings(deadline=None, max_examples=30)
@given(
    lengths=lengths_strategy,
    context=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 4]),
    multiple=st.sampled_from([16, 128]),
)
def test_every_ranks_own_tokens_are_a_multiple_of_what_fp8_kernels_take(
    lengths: list[tuple[int, int]], context: int, tensor: int, multiple: int
) -> None:
    # Transformer Engine quantises a layer's input where sequence parallelism leaves it: one part of TP.
    packer = _packer(_layout(context=context, tensor=tensor), 4096, token_multiple=multiple)
    for piece in packer.micro_batches(random_batch(lengths)):
        own, rest = divmod(piece.input_ids.size(1), tensor)
        assert rest == 0 and own % multiple == 0
        assert own * tensor * context == piece.cu_seqlens[-1]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from([2, 3, 4]))
def test_zigzag_shares_have_equal_causal_work(chunks: list[int], context: int) -> None:
    lengths = np.array(chunks) * 2 * context
    shares = [zigzag(lengths, context, rank) for rank in range(context)]
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(lengths.sum()))
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    pairs = [(share - starts[share] + 1).sum() for share in shares]
    # Chunk r and chunk 2 CP - 1 - r together see the same number of keys for every r.
    assert len(set(pairs)) == 1


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    data=st.integers(1, 6),
    pipeline=st.sampled_from([1, 4]),
)
def test_plans(lengths: list[int], data: int, pipeline: int) -> None:
    layout = _layout(data=data, pipeline=pipeline, virtual=2 if pipeline > 1 else None)
    plan = [[each.rows for each in share] for share in _packer(layout, 60).shares_of_lengths(lengths)]
    assert len(plan) == data
    counts = {len(share) for share in plan}
    assert len(counts) == 1 and counts.pop() % pipeline == 0
    rows = np.concatenate([rows for share in plan for rows in share])
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(lengths)))
    assert all(np.array(lengths)[rows].sum() <= 60 for share in plan for rows in share if len(rows))


def test_fillers_keep_ranks_in_step() -> None:
    """Two sequences for three ranks: the third gets a micro-batch without tokens to learn from."""
    batch = random_batch([(4, 6), (3, 5)])
    fillers = [_packer(_layout(data=3), 64, rank).micro_batches(batch) for rank in range(3)]
    assert [len(share) for share in fillers] == [1, 1, 1]
    empty = [share[0] for share in fillers if len(share[0].rows) == 0]
    assert len(empty) == 1
    assert empty[0].input_ids.numel() > 0
    assert len(empty[0].slots) == len(empty[0].response_positions) == 0


def test_a_sequence_over_the_budget_is_named() -> None:
    batch = random_batch([(4, 6), (30, 50)])
    with pytest.raises(ValueError, match=r"sequence 1 .* 80 tokens.*max_tokens_per_micro_batch=64"):
        _packer(_layout(), 64).micro_batches(batch)


def _long_tail(count: int, seed: int) -> np.ndarray:
    """Response lengths as in the reference runs: mean about 3.5k, a long tail, 16k at most."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(2700), 0.75, count), 200, 16384).astype(int)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_have_even_cost_and_little_is_padding(seed: int) -> None:
    """512 responses over 8 data-parallel ranks: the slowest within 5 % of the mean, at most 2 % padding."""
    lengths = _long_tail(512, seed)
    assert 2700 < lengths.mean() < 4500
    quadratic = 1e-5
    packer = _packer(_layout(data=8, context=2, tensor=4), 65536, quadratic_cost=quadratic)
    plan = [[each.rows for each in share] for share in packer.shares_of_lengths(lengths)]
    cost = lengths + quadratic * lengths.astype(float) ** 2
    per_rank = np.array([sum(cost[rows].sum() for rows in share) for share in plan])
    assert per_rank.max() <= 1.05 * per_rank.mean()
    # Per sequence up to 2 CP - 1 tokens, per micro-batch up to 2 CP x TP - 1.
    padded = packer._padded(lengths).sum() + sum(len(share) for share in plan) * (4 * 4 - 1)
    assert padded <= 1.02 * lengths.sum()


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.integers(1, 3),
    tensor=st.sampled_from([1, 2]),
    budget=st.integers(64, 150),
    seed=st.integers(0, 5),
)
def test_shared_prefixes_leave_every_response_token_its_context(
    prompts: list[int], data: int, tensor: int, budget: int, seed: int
) -> None:
    """By what attention goes by: a token sees those before it whose node's subtree it lies in."""
    rng = np.random.default_rng(seed)
    lengths = [(prompt, int(rng.integers(1, 40))) for prompt in prompts for _ in range(4)]
    # The second and the third response of a group begin like its first, the fourth like the third.
    copies = [
        (4 * group + row, 4 * group + other, int(rng.integers(prompt, prompt + 1 + min(lengths[4 * group + row][1],
         lengths[4 * group + other][1]))))
        for group, prompt in enumerate(prompts)
        for row, other in ((1, 0), (2, 0), (3, 2))
    ]  # fmt: skip
    batch = with_copies(random_batch(lengths, seed), copies)
    whole = [np.concatenate(pair) for pair in sequences(batch)]
    owner, inside = batch.sequence_ids, _positions(batch)
    seen = np.zeros(batch.num_response_tokens, int)
    computed = 0
    for data_rank in range(data):
        layout = _layout(data=data, tensor=tensor)
        packer = SharedPrefixPacker(layout, budget, data_rank, 0, torch.device("cpu"))
        for piece in packer.micro_batches(batch):
            ids = piece.input_ids[0].numpy()
            assert len(ids) % tensor == 0 and len(ids) <= budget + tensor
            assert piece.tree is not None and piece.copies is not None and piece.duplicates is not None
            visible_until = piece.tree.visible_until.numpy()
            at = np.arange(len(ids))
            tokens = piece.response_positions[piece.slots.numpy()]
            places = piece.copies.numpy()
            for token, head, target in zip(
                tokens, piece.head_positions.numpy()[places], piece.targets.numpy()[places], strict=True
            ):
                context = ids[(at <= head) & (head < visible_until)]
                row, end = owner[token], batch.prompt_lengths[owner[token]] + inside[token]
                np.testing.assert_array_equal(context, whole[row][:end])
                assert target == whole[row][end]
            np.add.at(seen, tokens, 1)
            computed += int((piece.token_positions >= 0).sum())
            stream = np.concatenate(whole)
            real = piece.token_positions >= 0
            np.testing.assert_array_equal(stream[piece.token_positions[real]], ids[real])
            others, instead = piece.duplicates
            np.testing.assert_array_equal(stream[others], stream[instead])
            computed += len(others)
    np.testing.assert_array_equal(seen, batch.loss_mask)
    assert computed == batch.total_lengths.sum()


@pytest.mark.parametrize(
    ("lengths", "copy"),
    [([(30, 9), (30, 20), (25, 3)], (1, 0, 33)), ([(300, 151), (300, 200), (140, 63)], (1, 0, 333))],
    ids=["one_block", "blocks_and_an_odd_rest"],
)
def test_what_flex_attention_is_told_is_what_the_tree_is(
    lengths: list[tuple[int, int]], copy: tuple[int, int, int]
) -> None:
    """On a GPU, in place of the pieces that a CPU computes; its own backward pass exists there alone."""
    batch = with_copies(random_batch(lengths), [copy])
    packer = SharedPrefixPacker(_layout(), 1200, 0, 0, torch.device("cpu"))
    (piece,) = packer.micro_batches(batch)
    tree = piece.tree
    assert tree is not None and len(tree.stems) == 1
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(piece.input_ids.size(1), heads, 8, generator=generator) for heads in (4, 2, 2))
    whole = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    found = flex_attention(*whole, block_mask=tree.block_mask, scale=0.3, enable_gqa=True)
    expected = tree_attention(query, key, value, tree, 0.3)
    torch.testing.assert_close(found.squeeze(0).transpose(0, 1), expected)


@settings(deadline=None, max_examples=15)
@given(
    prompts=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    longest=st.sampled_from([3, 90, 300]),
    tensor=st.sampled_from([1, 2]),
    seed=st.integers(0, 5),
)
def test_blocks_of_the_mask_are_those_of_the_dense_mask(
    prompts: list[int], longest: int, tensor: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    batch = random_batch([(prompt, int(rng.integers(1, longest))) for prompt in prompts for _ in range(3)], seed)
    batch = with_copies(batch, [(3 * group + 1, 3 * group, prompt) for group, prompt in enumerate(prompts)])
    packer = SharedPrefixPacker(_layout(tensor=tensor), 4000, 0, 0, torch.device("cpu"))
    for piece in packer.micro_batches(batch):
        assert piece.tree is not None
        found = piece.tree.block_mask
        tokens = piece.tree.visible_until.numel()
        dense = create_block_mask(found.mask_mod, None, None, tokens, tokens, device="cpu")
        assert found.seq_lengths == dense.seq_lengths and found.BLOCK_SIZE == dense.BLOCK_SIZE
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
                     "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):  # fmt: skip
            assert torch.equal(getattr(found, name), getattr(dense, name)), name


def test_a_mask_needs_no_memory_for_pairs_of_tokens() -> None:
    tokens = 36864
    tree = SharedPrefixes((), (), torch.full((tokens,), tokens, dtype=torch.int32))
    largest = LargestTensor()
    with largest:
        mask = tree.block_mask
    assert int(mask.kv_num_blocks.sum()) == 288  # the diagonal; the rest is seen whole
    assert 288**2 <= largest.elements <= 289**2


def test_families_that_would_need_more_together_stand_side_by_side() -> None:
    """Eight tokens that all five share are worth a node of their own, which makes those below it too short for one."""
    start = np.arange(8)
    rows = [
        np.concatenate([start, np.full(15, 20 + stem), np.full(5, 30 + leaf)]) for stem in (0, 1) for leaf in (0, 1)
    ]
    rows.append(np.concatenate([start, np.full(6, 40)]))
    prompts, count = np.array([23, 8, 23, 23, 10]), len(rows)
    batch = random_batch([(int(prompt), len(row) - int(prompt)) for prompt, row in zip(prompts, rows, strict=True)])
    batch.prompt_ids = np.concatenate([row[:prompt] for prompt, row in zip(prompts, rows, strict=True)])
    batch.response_ids = np.concatenate([row[prompt:] for prompt, row in zip(prompts, rows, strict=True)])
    apart = sum(prefix_tree(family).num_tokens for family in (rows[:4], rows[4:]))
    assert prefix_tree(rows).num_tokens > apart
    packer = SharedPrefixPacker(_layout(), apart, 0, 0, torch.device("cpu"))
    (piece,) = packer.micro_batches(batch)
    assert len(piece.rows) == count and piece.input_ids.size(1) == apart
