"""The column routed_experts: its rows are checked, it follows selections, and it comes back from files as it was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool import trajectory as trajectory_module
from megatron_retool.routed_experts import (
    ExpertArray,
    RoutedExperts,
    check_rows,
    from_stored,
    is_missing,
    missing_rows,
    row_groups,
    stored_type,
    to_stored,
)
from megatron_retool.trajectory import Trajectory, TrajectoryBatch, read_trajectories, write_trajectories
from run_files.parquet_files import UnreadableFile
from tests.test_trajectory import make_trajectory


def make_rows(tokens: int, layers: int = 2, k: int = 3, dtype: type = np.uint8, seed: int = 0) -> ExpertArray:
    """Rows of experts, some of them missing."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, np.iinfo(dtype).max, (tokens, layers, k)).astype(dtype)
    rows[rng.random(tokens) < 0.2] = np.iinfo(dtype).max
    return rows


def with_rows(prompt: int, response: int, index: int, dtype: type | None, k: int = 3) -> Trajectory:
    trajectory = make_trajectory(prompt, response, index, seed=index)
    rows = None if dtype is None else make_rows(prompt + response, k=k, dtype=dtype, seed=index)
    return replace(trajectory, routed_experts=rows)


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    dtype = draw(st.sampled_from([np.uint8, np.int16]))
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.booleans()), min_size=1, max_size=6))
    return [with_rows(p, r, i, dtype if known else None) for i, (p, r, known) in enumerate(shapes)]


def columns_of(batch: TrajectoryBatch) -> list[ExpertArray]:
    """Each sequence's rows, as whoever reads a batch finds them."""
    column = batch.routed_experts
    assert column is not None
    return [
        column.rows[start : start + length] for start, length in zip(column.starts, batch.total_lengths, strict=True)
    ]


def assert_same(found: ExpertArray | None, expected: ExpertArray | None) -> None:
    if expected is None:
        assert found is None
    else:
        assert found is not None and found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=50, deadline=None)
@given(trajectories(), st.data())
def test_a_selection_has_the_rows_of_the_selected(made, data):
    chosen = data.draw(st.lists(st.integers(0, len(made) - 1), max_size=8))
    again = data.draw(st.lists(st.integers(0, len(chosen) - 1), max_size=8)) if chosen else []
    batch = TrajectoryBatch.from_trajectories(made)
    if all(trajectory.routed_experts is None for trajectory in made):
        assert batch.routed_experts is None and batch.select(chosen).routed_experts is None
        return
    like = next(t.routed_experts for t in made if t.routed_experts is not None)
    selected = batch.select(chosen).select(again)
    selected = selected.with_columns(entropy=np.zeros(selected.num_response_tokens))
    assert selected.routed_experts.rows is batch.routed_experts.rows
    for row, found in zip(again, columns_of(selected), strict=True):
        expected = made[chosen[row]].routed_experts
        if expected is None:
            expected = missing_rows(len(found), like)
            assert is_missing(found).all()
        assert_same(found, expected)


@settings(max_examples=50, deadline=None)
@given(trajectories())
def test_files_give_the_rows_back_bit_for_bit(tmp_path_factory, made):
    path = tmp_path_factory.getbasetemp() / "routed_experts.parquet"
    write_trajectories(made, path)
    for again, trajectory in zip(read_trajectories(path), made, strict=True):
        assert_same(again.routed_experts, trajectory.routed_experts)
    assert all(t.routed_experts is None for t in read_trajectories(path, routed_experts=False))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([np.uint8, np.int16]), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_chunks_are_stored_as_one(dtype, lengths):
    chunks = [make_rows(length, dtype=dtype, seed=seed) for seed, length in enumerate(lengths)]
    assert_same(from_stored(pa.scalar(to_stored(chunks), stored_type())), np.concatenate(chunks))


def test_no_chunks_and_chunks_of_two_kinds():
    assert to_stored([]) is None and from_stored(pa.scalar(None, stored_type())) is None
    with pytest.raises(ValueError, match=r"changes within a sequence: uint8 \(1, 2, 3\), int16 \(1, 2, 3\)"):
        to_stored([make_rows(1), make_rows(1, dtype=np.int16)])


def test_a_file_of_many_rows_is_written_by_pieces(tmp_path, monkeypatch):
    made = [with_rows(2, 3, index, np.uint8 if index % 3 else None) for index in range(7)]
    # 53 bytes each without routed experts, 83 with them.
    monkeypatch.setattr(trajectory_module, "TOKEN_GROUP_BYTES", 300)
    write_trajectories(made, tmp_path / "step.parquet", texts=[(f"p{n}", f"r{n}") for n in range(7)])
    file = pq.ParquetFile(tmp_path / "step.parquet")
    groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert groups == [4, 3] and file.read()["response"].to_pylist() == [f"r{n}" for n in range(7)]
    for again, trajectory in zip(read_trajectories(tmp_path / "step.parquet"), made, strict=True):
        assert_same(again.routed_experts, trajectory.routed_experts)


@given(st.lists(st.integers(0, 100), max_size=8))
def test_row_groups_cover_all_in_order_and_keep_the_limit(sizes):
    parts = [list(range(len(sizes)))[part] for part in row_groups(sizes, 100)]
    assert [row for part in parts for row in part] == list(range(len(sizes)))
    assert all(sum(sizes[row] for row in part) <= 100 for part in parts)


def test_a_long_column_is_small_and_fast_in_a_file(tmp_path):
    """16k tokens of 48 layers, top 8 of 128 experts whose shares differ, half of the sequence missing."""
    tokens, layers, k = 16_384, 48, 8
    rng = np.random.default_rng(0)
    favourites = rng.dirichlet(np.full(128, 0.5), layers)
    rows = np.stack([rng.choice(128, (tokens, k), p=shares).astype(np.uint8) for shares in favourites], 1)
    rows[tokens // 2 :] = 255
    trajectory = replace(make_trajectory(1, tokens - 1), routed_experts=rows)
    start = time.perf_counter()
    write_trajectories([trajectory], tmp_path / "step.parquet")
    (again,) = read_trajectories(tmp_path / "step.parquet")
    assert time.perf_counter() - start < 20
    assert_same(again.routed_experts, rows)
    write_trajectories([make_trajectory(1, tokens - 1)], tmp_path / "without.parquet")
    bytes_of_column = (tmp_path / "step.parquet").stat().st_size - (tmp_path / "without.parquet").stat().st_size
    assert bytes_of_column < 0.85 * rows.nbytes / 2


def test_files_without_the_column_are_read(tmp_path):
    path = tmp_path / "old.parquet"
    write_trajectories([make_trajectory(2, 3)], path)
    pq.write_table(pq.read_table(path).drop_columns("routed_experts"), path)
    (old,) = read_trajectories(path)
    assert old.routed_experts is None and len(old.response_ids) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float64"}, "routed_experts has the type float64, 2 layers and 3 experts"),
        ({"dtype": None}, "routed_experts has the type None"),
        ({"layers": 0}, "the type uint8, 0 layers"),
        ({"layers": -2, "k": -3}, "the type uint8, -2 layers"),
        ({"k": None}, "2 layers and None experts"),
        ({"data": None}, "routed_experts has the type uint8"),
        ({"data": b"12345"}, "routed_experts has 5 bytes for 2 layers and 3 experts a token, uint8"),
        ({"dtype": "int16", "layers": 1}, "trajectory 1/0: routed_experts names expert -256"),
        ({"data": b"\xff" * 23 + b"1"}, "trajectory 1/0: a row of routed_experts is known in part"),
        ({"data": b"123456"}, "trajectory 1/0: routed_experts has 1 rows for 4 tokens"),
    ],
)
def test_damaged_rows_are_named(tmp_path, change, said):
    path = tmp_path / "step.parquet"
    rows = np.zeros((4, 2, 3), np.uint8)
    rows[1] = 255
    write_trajectories([replace(make_trajectory(1, 3, index), routed_experts=rows) for index in range(3)], path)
    table = pq.read_table(path)
    values = table["routed_experts"].to_pylist()
    values[2] |= change
    place = table.column_names.index("routed_experts")
    pq.write_table(table.set_column(place, "routed_experts", pa.array(values, stored_type())), path)
    with pytest.raises(UnreadableFile, match=f"step.parquet, row 2: cannot be read: .*({said})"):
        read_trajectories(path)


def test_a_column_of_another_kind_is_named(tmp_path):
    path = tmp_path / "step.parquet"
    write_trajectories([make_trajectory(1, 3)], path)
    table = pq.read_table(path).drop_columns("routed_experts")
    pq.write_table(table.append_column("routed_experts", pa.array([7])), path)
    with pytest.raises(UnreadableFile, match=r"step.parquet: cannot be read: .*struct"):
        read_trajectories(path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (np.zeros((4, 2, 3), np.int32), "routed_experts is int32"),
        (np.zeros((4, 6), np.uint8), r"routed_experts is uint8 \(4, 6\), not uint8 or int16 \[tokens, layers, k\]"),
        (np.zeros((3, 2, 3), np.uint8), "has 3 rows for 4 tokens"),
        (np.array([[[0, 255]]] * 4, np.uint8), "a row of routed_experts is known in part"),
        (np.array([[[0], [32767]]] * 4, np.int16), "a row of routed_experts is known in part"),
        (np.array([[[0], [-2]]] * 4, np.int16), "routed_experts names expert -2"),
    ],
)
def test_rows_that_are_none_are_refused(rows, said):
    with pytest.raises(ValueError, match=f"trajectory 0/1: .*{said}"):
        replace(make_trajectory(1, 3, 1), routed_experts=rows)
    with pytest.raises(ValueError, match=f"here: .*{said}"):
        check_rows(rows, 4, "here")


def test_rows_of_several_kinds_are_no_batch():
    made: Sequence[Trajectory] = [with_rows(1, 2, 0, np.uint8), with_rows(1, 2, 1, None), with_rows(1, 2, 2, np.int16)]
    with pytest.raises(ValueError, match=r"sequence 2 has routed_experts of int16 \(2, 3\), sequence 0 of uint8"):
        TrajectoryBatch.from_trajectories(made)
    with pytest.raises(ValueError, match=r"sequence 1 has routed_experts of uint8 \(2, 4\)"):
        RoutedExperts.of_sequences([make_rows(3), make_rows(3, k=4)], np.array([3, 3]))
