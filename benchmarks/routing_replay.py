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
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import (
    add_batch_arguments,
    in_turns,
    kind_of_seconds,
    learner_settings,
    long_tailed_batch,
    median_ratio,
    random_learner,
)
from conversion.model.architecture import Architecture
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
    architecture = Architecture.from_hf_config(shape)
    return random_learner(architecture, lr=1e-6, routing_replay="old_log_probs", **learner_settings(options))


def step_of(learner: Learner, batch: TrajectoryBatch) -> None:
    """Old log-probs, then one update that starts from them."""
    result = learner.log_probs(batch)
    if "routed_experts" in result:
        column = RoutedExperts.end_to_end(result["routed_experts"], batch.total_lengths)
        batch = dataclasses.replace(batch, routed_experts=column)
    learner.update(batch.with_columns(old_log_probs=result["log_probs"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--expert-hidden", type=int, default=192)
    add_batch_arguments(parser)
    options = parser.parse_args()

    learner = learner_of(options)
    replay = learner.routing_replay
    assert replay is not None
    batch = long_tailed_batch(options, learner.architecture.vocab_size)
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
    taken = in_turns(sides, options.steps, 2, learner.device)
    times = {name: [seconds.of(learner.device) for seconds in result] for name, result in taken.items()}
    tokens, kind = int(batch.total_lengths.sum()), kind_of_seconds(learner.device)
    print(f"{tokens} tokens, {options.layers} layers, {options.experts} experts, {kind} of old log-probs and an update")
    print(f"without replay: {1e3 * statistics.median(times['without']):.1f} ms")
    for name in ("replayed", "recorded"):
        ratio = median_ratio(times[name], times["without"])
        print(f"{name}: {1e3 * statistics.median(times[name]):.1f} ms; ratio {ratio:.3f}")
    learner.close()


if __name__ == "__main__":
    main()
