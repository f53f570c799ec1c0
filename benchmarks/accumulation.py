"""What a caller's accumulate and apply take beside Learner.update of the same tokens, and what a change of runs adds.

    python benchmarks/accumulation.py                              # the demo's shape
    python benchmarks/accumulation.py --shape small --rank 32 --mean-length 400

One process with three learners of the same adapters, in turns: an update with the policy loss; accumulate (PPO) and
apply of the same tokens; and the same of two runs in alternation, so that each has to be brought back from host memory.
It prints medians, and the ratio to the update within a turn, in seconds of the clock or (on a CPU) of the process. With
--bar it fails where the first ratio is above.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import (
    SHAPES,
    add_batch_arguments,
    in_turns,
    kind_of_seconds,
    learner_settings,
    long_tailed_batch,
    print_ratios,
    qwen2,
    random_learner,
)
from megatron_retool.config import LoraConfig
from megatron_retool.learner.adapter_runs import AdapterRuns
from megatron_retool.target_sequences import OptimizerStep, TargetSequence, TokenLoss
from megatron_retool.trajectory import TrajectoryBatch

STEP = OptimizerStep(1e-4, grad_clip_norm=1.0)
LOSS = TokenLoss("ppo")


def with_columns(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch as an update needs it."""
    rng, count = np.random.default_rng(2), batch.num_response_tokens
    old = -np.abs(rng.normal(6, 1, count))
    return batch.with_columns(old_log_probs=old, advantages=rng.normal(0, 1, count), loss_weights=batch.loss_mask)


def as_sequences(batch: TrajectoryBatch) -> list[TargetSequence]:
    """The same tokens with their next ones as targets; prompts have one token each."""
    ends = np.cumsum(batch.response_lengths)[:-1]
    names = {"rollout_log_probs": "old_log_probs", "advantages": "advantages"}
    columns = {name: np.split(batch.columns[own], ends) for name, own in names.items()}
    sequences = []
    for number, (first, response) in enumerate(zip(batch.prompt_ids, np.split(batch.response_ids, ends), strict=True)):
        ids = np.concatenate([[first], response]).astype(np.int64)
        own = {name: parts[number] for name, parts in columns.items()}
        sequences.append(TargetSequence(ids[:-1], ids[1:], own))
    return sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--bar", type=float)
    add_batch_arguments(parser)
    options = parser.parse_args()

    architecture, settings = qwen2(SHAPES[options.shape]), learner_settings(options)
    lora = LoraConfig(rank=options.rank)
    updating, accumulating, *pair = (random_learner(architecture, lr=1e-4, lora=lora, **settings) for _ in range(3))
    runs = AdapterRuns(pair[0])
    for name in ("one", "two"):
        runs.create_run(name, rank=options.rank, alpha=32.0, seed=0)
    turn = itertools.cycle(("one", "two"))
    batch = with_columns(long_tailed_batch(options, architecture.vocab_size))
    sequences = as_sequences(batch)

    def accumulate_and_apply() -> None:
        accumulating.accumulate(sequences, LOSS)
        accumulating.apply(STEP)

    def of_two_runs() -> None:
        run = next(turn)
        runs.accumulate(run, sequences, LOSS)
        runs.apply(run, STEP)

    device = updating.device
    print(f"{options.shape}, rank {options.rank}, {int(batch.total_lengths.sum())} tokens, {kind_of_seconds(device)}")
    sides = {
        "update": lambda: updating.update(batch),
        "accumulate and apply": accumulate_and_apply,
        "accumulate and apply of two runs in turns": of_two_runs,
    }
    times = in_turns(sides, options.steps, 2, device)
    seconds = {name: [each.of(device) for each in result] for name, result in times.items()}
    ratios = print_ratios(seconds)
    updating.close()
    if options.bar is not None and ratios["accumulate and apply"] > options.bar:
        raise SystemExit(f"ratio {ratios['accumulate and apply']:.2f} is above --bar {options.bar}")


if __name__ == "__main__":
    main()
