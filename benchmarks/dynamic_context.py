"""What sharing short micro-batches among fewer ranks saves: an update with dynamic context parallelism and without.

    python benchmarks/dynamic_context.py                     # CP 2, mean length 200, longest 1,600
    python benchmarks/dynamic_context.py --context 4 --mean-length 100

Both sides are one learner on CP processes with the same weights and batch, in turns; log-probs and gradient norm must
agree. Medians over --steps pairs after one to warm up: of a rank's CPU time, the largest, and of the clock. On gloo the
exchange of keys and values is a copy in memory, so that this shows what attention in pieces costs more than what a
network would: ``megatron-retool plan`` predicts that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import SHAPES, batch_of, in_turns, median_ratio, qwen2, random_learner, random_lengths
from megatron_retool.learner.learner import Learner
from megatron_retool.parity.ranks import run_ranks

SIDES = {"dynamic": True, "static": False}


def measure(options: argparse.Namespace) -> dict[str, object]:
    """What every rank finds; the answer of rank 0 has the largest times of all."""
    learner = random_learner(
        qwen2(SHAPES[options.shape]),
        lr=1e-9,
        world_size=options.context,
        context_parallel_size=options.context,
        dynamic_context_parallel=True,
        max_tokens_per_micro_batch=8 * options.mean_length,
    )
    lengths = random_lengths(options.sequences, options.mean_length, 8 * options.mean_length, seed=0)
    lengths[0] = 8 * options.mean_length  # what context parallelism is there for
    batch = batch_of(lengths, learner.architecture.vocab_size, seed=1)
    total = batch.num_response_tokens
    weights = np.full(total, 1 / total)
    batch = batch.with_columns(advantages=np.random.default_rng(2).normal(size=total), loss_weights=weights)
    answers: dict[str, tuple[np.ndarray, float]] = {}

    def step(learner: Learner, side: str) -> None:
        learner.packer.dynamic_context = SIDES[side]
        old = learner.log_probs(batch)["log_probs"]
        answers[side] = old, learner.update(batch.with_columns(old_log_probs=old))["actor/grad_norm"]

    sides = {side: (lambda side=side: step(learner, side)) for side in SIDES}
    taken = in_turns(sides, options.steps, 1, learner.device)
    times = torch.tensor([[tuple(seconds) for seconds in taken[side]] for side in SIDES], dtype=torch.float64)
    torch.distributed.all_reduce(times, op=torch.distributed.ReduceOp.MAX)
    learner.close()
    (mine, norm), (other, other_norm) = (answers[side] for side in SIDES)
    return {
        "tokens": int(lengths.sum()),
        "times": {side: result.tolist() for side, result in zip(SIDES, times, strict=True)},
        "log_probs": float(np.abs(mine - other).max()),
        "norm": norm / other_norm - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean-length", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = run_ranks(measure, options.context, Path(directory), options, start_method="spawn")
    print(f"{options.sequences} sequences, {result['tokens']} tokens, CP {options.context}")
    print(f"log-probs differ by at most {result['log_probs']:.1e}, gradient norms by {result['norm']:.1e}")
    for kind, of in (("clock", 0), ("CPU time", 1)):
        times = {side: [pair[of] for pair in pairs] for side, pairs in result["times"].items()}
        medians = ", ".join(f"{side} {statistics.median(seconds):.2f} s" for side, seconds in times.items())
        print(f"{kind}: {medians}; ratio {median_ratio(times['dynamic'], times['static']):.2f}")


if __name__ == "__main__":
    main()
