"""What replaying routed experts costs the learner: old log-probs and an update with and without, alternating.

    python benchmarks/routing_replay.py  # the shape of configs/demo_moe_cpu.yaml
    python benchmarks/routing_replay.py --recompute full --layers 8 --experts 32 --experts-per-token 4

The replayed experts are those that the learner would choose, so that both sides give each expert the same tokens; one
row in fifty is missing. "recorded" is learner.routing_replay=old_log_probs: the first pass records, the update replays.
One process; --steps pairs of steps after two to warm up, medians of each and of the ratio within a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_step import batch_of, random_lengths
from conversion.model.architecture import Architecture
from megatron_retool.config import Config, LearnerConfig, OptimizerConfig, RecomputeConfig
from megatron_retool.learner.learner import Learner
from megatron_retool.routed_experts import RoutedExperts, missing_expert
from megatron_retool.trajectory import TrajectoryBatch


def learner_of(options: argparse.Namespace) -> Learner:
    shape = {
        "model_type": "qwen3_moe",
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": options.hidden // 4,
        "intermediate_size": 3 * options.hidden,
        "moe_intermediate_size": options.expert_hidden,
        "num_experts": options.experts,
        "num_experts_per_tok": options.experts_per_token,
        "norm_topk_prob": True,
        "vocab_size": 512,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    cuda = torch.cuda.is_available()
    learner = LearnerConfig(
        dtype="bfloat16" if cuda else "float32",
        max_tokens_per_micro_batch=options.max_tokens_per_micro_batch,
        recompute=RecomputeConfig(granularity=options.recompute),
        routing_replay="old_log_probs",
    )
    return Learner(
        Config(learner=learner),
        optimizer=OptimizerConfig(lr=1e-6),
        total_optimizer_steps=10_000,
        architecture=Architecture.from_hf_config(shape),
    )


def step_of(learner: Learner, batch: TrajectoryBatch) -> None:
    """Old log-probs, then one update that starts from them."""
    found = learner.log_probs(batch)
    if "routed_experts" in found:
        column = RoutedExperts.end_to_end(found["routed_experts"], batch.total_lengths)
        batch = dataclasses.replace(batch, routed_experts=column)
    learner.update(batch.with_columns(old_log_probs=found["log_probs"]))


def seconds_of(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.process_time() if device.type == "cpu" else time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.process_time() if device.type == "cpu" else time.perf_counter()) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--expert-hidden", type=int, default=192)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean-length", type=int, default=110)
    parser.add_argument("--max-tokens-per-micro-batch", type=int, default=16384)
    parser.add_argument("--recompute", choices=("full", "selective"))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    learner = learner_of(options)
    replay = learner.routing_replay
    assert replay is not None
    lengths = random_lengths(options.sequences, options.mean_length, 8 * options.mean_length, seed=0)
    batch = batch_of(lengths, learner.architecture.vocab_size, seed=1)
    rng = np.random.default_rng(0)
    batch = batch.with_columns(
        advantages=rng.normal(size=batch.num_response_tokens),
        loss_weights=batch.loss_mask / batch.loss_mask.sum(),
    )
    rows = learner.log_probs(batch)["routed_experts"]
    rows[rng.random(len(rows)) < 0.02] = missing_expert(rows.dtype)
    replayed = dataclasses.replace(batch, routed_experts=RoutedExperts.end_to_end(rows, batch.total_lengths))

    def without() -> None:
        learner.routing_replay = None
        step_of(learner, batch)
        learner.routing_replay = replay

    def with_rows() -> None:
        replay.mode = "rollout"
        step_of(learner, replayed)

    def recorded() -> None:
        replay.mode = "old_log_probs"
        step_of(learner, batch)

    sides = {"without": without, "replayed": with_rows, "recorded": recorded}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(options.steps + 2):
        # In turns, and first one then the other first: the machine's speed drifts.
        for name in list(sides)[:: 1 if repetition % 2 else -1]:
            seconds = seconds_of(sides[name], learner.device)
            if repetition >= 2:
                times[name].append(seconds)
    base = statistics.median(times["without"])
    tokens = int(batch.total_lengths.sum())
    kind = "CPU time" if learner.device.type == "cpu" else "wall time"
    print(f"{tokens} tokens, {options.layers} layers, {options.experts} experts, {kind} of old log-probs and an update")
    print(f"without replay: {1e3 * base:.1f} ms")
    for name in ("replayed", "recorded"):
        ratio = statistics.median(mine / plain for mine, plain in zip(times[name], times["without"], strict=True))
        print(f"{name}: {1e3 * statistics.median(times[name]):.1f} ms; ratio {ratio:.3f}")
    learner.close()


if __name__ == "__main__":
    main()
