"""What adapters (learner.lora) cost and save the learner, alternating with all weights trained.

    python benchmarks/adapters.py                              # the demo's shape
    python benchmarks/adapters.py --shape small --rank 32 --mean-length 400

One process with two learners: an update of one batch, log-probs of it, and an export of all weights, which is what a
weight sync sends. It prints the medians and their ratio within a pair, in seconds of the clock and (on a CPU) of the
process; and the bytes that each learner keeps from step to step, counted from its tensors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import (
    SHAPES,
    add_batch_arguments,
    in_turns,
    kind_of_seconds,
    learner_settings,
    long_tailed_batch,
    median_ratio,
    qwen2,
    random_learner,
)
from megatron_retool.config import LoraConfig
from megatron_retool.learner.learner import Learner


def export(learner: Learner) -> None:
    for _bucket in learner.export_weights():
        pass


def state_bytes(learner: Learner) -> int:
    """Of weights, gradients and the optimizer's state, each storage once."""
    tensors: list[Any] = []
    for chunk in learner.model_chunks:
        tensors += list(chunk.module.parameters())
        tensors += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for part in learner.optimizer.chained_optimizers:
        for parameter, state in part.optimizer.state.items():
            tensors += [parameter, *(value for value in state.values() if torch.is_tensor(value))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--rank", type=int, default=16)
    add_batch_arguments(parser)
    options = parser.parse_args()

    architecture, settings = qwen2(SHAPES[options.shape]), learner_settings(options)
    learners = {
        "adapters": random_learner(architecture, lr=1e-3, lora=LoraConfig(rank=options.rank), **settings),
        "all weights": random_learner(architecture, lr=1e-4, **settings),
    }
    device = learners["adapters"].device
    batch = long_tailed_batch(options, architecture.vocab_size)
    print(f"{options.shape}, rank {options.rank}, {int(batch.total_lengths.sum())} tokens, {kind_of_seconds(device)}")
    works = {
        "update": lambda learner: learner.sft_update(batch),
        "log-probs": lambda learner: learner.log_probs(batch),
        "export of all weights": export,
    }
    for name, work in works.items():
        sides = {side: (lambda work=work, learner=learner: work(learner)) for side, learner in learners.items()}
        times = in_turns(sides, options.steps, 2, device)
        seconds = {side: [each.of(device) for each in result] for side, result in times.items()}
        mine, theirs = (statistics.median(result) for result in seconds.values())
        ratio = median_ratio(seconds["adapters"], seconds["all weights"])
        print(f"{name}: adapters {mine:.4f} s, all weights {theirs:.4f} s, ratio {ratio:.2f}")
    kept = {side: state_bytes(learner) for side, learner in learners.items()}
    print(
        f"weights, gradients and optimizer: adapters {kept['adapters'] / 2**20:.1f} MiB, all weights "
        f"{kept['all weights'] / 2**20:.1f} MiB, ratio {kept['adapters'] / kept['all weights']:.2f}"
    )
    learners["adapters"].close()


if __name__ == "__main__":
    main()
