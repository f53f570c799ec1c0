"""What a step sends of its routed experts to the learner's ranks, against batches that carry their rows with them.

    python benchmarks/routed_experts_transport.py [--responses 64] [--tokens 16384] [--layers 48] [--experts 8]
                                                  [--mini-batches 4] [--full]

A step sends its responses for the old log-probs, for the reference's, and once more in mini-batches, to two Ray actors
that read their half of the rows. Counted is what the driver puts into the object store. The baseline pickles each batch
with the rows of its own responses, and no others. ``--full``: 512 responses, 3.2 GB of rows; it needs 12 GB of memory.

Then the rows of one response between engine and rollout, in JSON: as SGLang's int32 in base64, and as bytes in base64.
"""

from __future__ import annotations

import argparse
import base64
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import ray

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_retool.cluster.routed_rows import RowStore, StoredExperts, with_rows
from megatron_retool.cluster.runtime import ray_runtime
from megatron_retool.config import load_config
from megatron_retool.routed_experts import ExpertArray, RoutedExperts
from megatron_retool.scratch import scratch_directory
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch

RANKS = 2
EXPERTS = 128
"""Experts that a layer has."""


class Reader:
    """A rank that reads the rows of every second sequence."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def read(self, batch: TrajectoryBatch) -> int:
        """The sum of its rows."""
        column = with_rows(batch).routed_experts
        assert column is not None
        places = list(zip(column.starts, batch.total_lengths, strict=True))[self.rank :: RANKS]
        return sum(int(column.rows[start : start + length].sum()) for start, length in places)


def make_batch(responses: int, tokens: int, layers: int, experts: int) -> TrajectoryBatch:
    blank = Trajectory(
        np.zeros(tokens // 16),
        np.zeros(tokens - tokens // 16),
        *(np.zeros(tokens - tokens // 16) for _ in range(4)),
        group_id=0,
        index=0,
        finish_reason=FinishReason.STOP,
    )
    batch = TrajectoryBatch.from_trajectories([blank] * responses)
    rows = np.empty((responses * tokens, layers, experts), np.uint8)
    random = np.random.default_rng(0)
    for start in range(0, len(rows), tokens):
        rows[start : start + tokens] = random.integers(0, EXPERTS, (tokens, layers, experts), np.uint8)
    return replace(batch, routed_experts=RoutedExperts(rows, np.arange(responses, dtype=np.int64) * tokens))


def batches_of_a_step(batch: TrajectoryBatch, mini_batches: int) -> Iterator[TrajectoryBatch]:
    yield batch
    yield batch
    for rows in np.array_split(np.random.default_rng(1).permutation(len(batch)), mini_batches):
        yield batch.select(np.sort(rows))


def with_own_rows(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch with a column of its responses alone."""
    column = batch.routed_experts
    assert column is not None
    if len(column.rows) == batch.total_lengths.sum():
        return batch
    places = zip(column.starts, batch.total_lengths, strict=True)
    parts: list[Any] = [column.rows[start : start + length] for start, length in places]
    return replace(batch, routed_experts=RoutedExperts.of_sequences(parts, batch.total_lengths))


class CountedPuts:
    """For the length of the block ``ray.put`` counts the bytes of what it is given: pickles, and arrays beside them."""

    def __init__(self) -> None:
        self.bytes = 0
        self._put = ray.put

    def __enter__(self) -> CountedPuts:
        ray.put = self
        return self

    def __exit__(self, *_: object) -> None:
        ray.put = self._put

    def __call__(self, value: Any) -> Any:
        column = getattr(value, "routed_experts", None)
        without = (
            replace(value, routed_experts=replace(column, reference=None))
            if isinstance(column, StoredExperts)
            else value
        )
        arrays: list[pickle.PickleBuffer] = []
        text = pickle.dumps(without, protocol=5, buffer_callback=arrays.append)
        self.bytes += len(text) + sum(array.raw().nbytes for array in arrays)
        return self._put(value)


def run_step(
    batch: TrajectoryBatch, mini_batches: int, ranks: list[Any], packed: Callable[[TrajectoryBatch], TrajectoryBatch]
) -> tuple[int, float, list[int]]:
    """Bytes put, seconds, and what the ranks answered."""
    answers = []
    began = time.perf_counter()
    with CountedPuts() as counted:
        for sent in batches_of_a_step(batch, mini_batches):
            reference = ray.put(packed(sent))
            answers.append(sum(ray.get([rank.read.remote(reference) for rank in ranks])))
            del reference
    return counted.bytes, time.perf_counter() - began, answers


def shortest(work: Callable[[], Any], rounds: int = 5) -> tuple[Any, float]:
    """What it gives, and the seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - began)
    return result, min(times)


def compare_json(rows: ExpertArray) -> None:
    print(f"one response of {len(rows)} tokens in JSON ({rows.nbytes / 1e6:.1f} MB of rows):")
    kinds: tuple[tuple[str, type[Any]], ...] = (("int32 in base64", np.int32), ("uint8 in base64", np.uint8))
    for name, dtype in kinds:
        # The engine holds int32.
        held: npt.NDArray[Any] = rows.astype(np.int32)

        def encode(held: npt.NDArray[Any] = held, dtype: type[Any] = dtype) -> bytes:
            data = np.ascontiguousarray(held.astype(dtype, copy=False)).tobytes()
            return orjson.dumps({"routed_experts": base64.b64encode(data).decode()})

        text, encoding = shortest(encode)

        def decode(text: bytes = text, dtype: type[Any] = dtype) -> npt.NDArray[np.uint8]:
            data = base64.b64decode(orjson.loads(text)["routed_experts"])
            return np.frombuffer(data, dtype).reshape(rows.shape).astype(np.uint8, copy=False)

        result, decoding = shortest(decode)
        assert np.array_equal(result, rows)
        print(f"  {name}: {len(text) / 1e6:.1f} MB, encoded in {encoding:.3f} s, decoded in {decoding:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384, help="of prompt and response together")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=8, help="that a token goes through in a layer")
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--full", action="store_true", help="512 responses")
    arguments = parser.parse_args()
    responses = 512 if arguments.full else arguments.responses
    batch = make_batch(responses, arguments.tokens, arguments.layers, arguments.experts)
    column = batch.routed_experts
    assert column is not None
    print(f"{responses} responses: {column.rows.nbytes / 1e9:.2f} GB of rows, {arguments.mini_batches} mini-batches")
    with ExitStack() as stack:
        stack.enter_context(scratch_directory())
        stack.enter_context(ray_runtime(load_config(None, []).cluster))
        ranks: list[Any] = [ray.remote(Reader).remote(rank) for rank in range(RANKS)]
        ray.get([rank.read.remote(with_own_rows(batch.select([0]))) for rank in ranks])  # they have started
        plain, plain_seconds, expected = run_step(batch, arguments.mini_batches, ranks, with_own_rows)
        store = RowStore()
        ours, seconds, result = run_step(batch, arguments.mini_batches, ranks, store.without_rows)
        assert result == expected
        store.release()
    print(f"each batch with its rows: {plain / 1e9:.2f} GB put, {plain_seconds:.1f} s")
    print(f"rows once: {ours / 1e9:.2f} GB put, {seconds:.1f} s; {plain / ours:.2f} times less")
    compare_json(column.rows[: arguments.tokens])


if __name__ == "__main__":
    main()
