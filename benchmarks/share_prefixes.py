"""What computing common prefixes once saves: log-probs and an update with learner.share_prefixes and without.

    python benchmarks/share_prefixes.py            # prompts and responses of 2,048 tokens, 16 to a group
    python benchmarks/share_prefixes.py --case arpo  # prompt, 4 stems and 8 leaves of 1,024 tokens each

Both sides are one learner with the same weights and batch, in turns; log-probs and gradient norm must agree. Medians
of CPU time (of wall time on a GPU) over --steps pairs after one to warm up, next to what the FLOPs say, for this model
and for one of 7 billion parameters. Without sharing each sequence is computed whole, packed as ever.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.routing_replay import seconds_of
from conversion.model.architecture import Architecture
from megatron_retool.config import Config, LearnerConfig, OptimizerConfig
from megatron_retool.learner.learner import Learner
from megatron_retool.learner.packing import Packer
from megatron_retool.learner.shared_packing import SharedPrefixPacker
from megatron_retool.trajectory import TrajectoryBatch

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def batch_of(case: str, tokens: int, groups: int, vocab_size: int) -> TrajectoryBatch:
    """Groups of a prompt and 16 responses, or of a prompt, 4 stems and 2 leaves on each."""
    rng = np.random.default_rng(0)

    def part() -> np.ndarray:
        return rng.integers(0, vocab_size, tokens).astype(np.int32)

    prompts, responses = [], []
    for _ in range(groups):
        prompt = part()
        stems = [part() for _ in range(4)] if case == "arpo" else [np.zeros(0, np.int32)]
        leaves = 2 if case == "arpo" else 16
        for stem in stems:
            for _ in range(leaves):
                prompts.append(prompt)
                responses.append(np.concatenate([stem, part()]))
    count, total = len(prompts), sum(map(len, responses))
    batch = TrajectoryBatch(
        prompt_ids=np.concatenate(prompts),
        prompt_lengths=np.array([len(ids) for ids in prompts], np.int32),
        response_ids=np.concatenate(responses),
        response_lengths=np.array([len(ids) for ids in responses], np.int32),
        loss_mask=np.ones(total, np.bool_),
        rollout_log_probs=np.zeros(total, np.float32),
        turn_ids=np.zeros(total, np.int16),
        weight_versions=np.zeros(total, np.int32),
        group_ids=np.repeat(np.arange(groups, dtype=np.int32), count // groups),
        indices=np.tile(np.arange(count // groups, dtype=np.int32), groups),
        rewards=np.zeros(count, np.float32),
    )
    return batch.with_columns(advantages=rng.normal(size=total), loss_weights=np.full(total, 1 / total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("grpo", "arpo"), default="grpo")
    parser.add_argument("--tokens", type=int, help="of a prompt, a response, a stem, a leaf")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    tokens = options.tokens or (1024 if options.case == "arpo" else 2048)

    shape = QWEN_7B | {
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": max(options.hidden // 256, 1),
        "intermediate_size": 3 * options.hidden,
        "vocab_size": options.vocab,
    }
    architecture = Architecture.from_hf_config(shape)
    batch = batch_of(options.case, tokens, options.groups, options.vocab)
    config = Config(
        learner=LearnerConfig(max_tokens_per_micro_batch=32768, share_prefixes=True, dtype="float32", threads=2)
    )
    learner = Learner(
        config, optimizer=OptimizerConfig(lr=1e-9), total_optimizer_steps=10_000, architecture=architecture
    )
    sharing = learner.packer
    assert isinstance(sharing, SharedPrefixPacker)
    plain = Packer(
        learner.layout,
        sharing.max_tokens,
        0,
        0,
        learner.device,
        quadratic_cost=sharing.quadratic_cost,
        pairs_per_call=sharing.pairs_per_call,
    )
    packers = {"shared": sharing, "plain": plain}
    answers: dict[str, tuple[np.ndarray, float]] = {}

    def step(name: str) -> None:
        learner.packer = packers[name]
        old = learner.log_probs(batch)["log_probs"]
        metrics = learner.update(batch.with_columns(old_log_probs=old))
        answers[name] = (old, metrics["actor/grad_norm"])

    times: dict[str, list[float]] = {name: [] for name in packers}
    for repetition in range(options.steps + 1):
        for name in list(packers)[:: 1 if repetition % 2 else -1]:
            seconds = seconds_of(lambda name=name: step(name), learner.device)
            if repetition:
                times[name].append(seconds)
    difference = float(np.abs(answers["shared"][0] - answers["plain"][0]).max())
    norms = answers["shared"][1] / answers["plain"][1] - 1
    kind = "CPU time" if learner.device.type == "cpu" else "wall time"
    large = Architecture.from_hf_config(QWEN_7B)
    of_flops = [
        sharing.training_flops(each, batch) / plain.training_flops(each, batch) for each in (architecture, large)
    ]
    print(f"{len(batch)} sequences, {plain.num_tokens(batch)[0]} tokens, {sharing.num_tokens(batch)[0]} with sharing")
    print(f"log-probs differ by at most {difference:.1e}, gradient norms by {norms:.1e}")
    for name in packers:
        print(f"{name}: {statistics.median(times[name]):.2f} s ({kind})")
    ratio = statistics.median(a / b for a, b in zip(times["shared"], times["plain"], strict=True))
    print(f"ratio {ratio:.2f}; of FLOPs {of_flops[0]:.2f}, of a 7B model's {of_flops[1]:.2f}")
    learner.close()


if __name__ == "__main__":
    main()
