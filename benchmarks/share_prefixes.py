"""What computing common prefixes once saves: log-probs and an update with learner.share_prefixes and without.

    python benchmarks/share_prefixes.py            # prompts and responses of 2,048 tokens, 16 to a group
    python benchmarks/share_prefixes.py --case arpo  # prompt, 4 stems and 8 leaves of 1,024 tokens each
    python benchmarks/share_prefixes.py --tokens 256 --vocab 1024  # an eighth of all lengths; for a laptop
    python benchmarks/share_prefixes.py --flops-only

Both sides are one learner with the same weights and batch, in turns; log-probs and gradient norm must agree. Medians
of CPU time (of wall time on a GPU) over --steps pairs after one to warm up, next to what the FLOPs say, for this model
and for one of 7 billion parameters with full lengths. A group in a micro-batch that does not hold it is cut, and each
part computes the prompt: the FLOPs are also given for other sizes. Without sharing each sequence is computed whole,
packed as ever. Attention reads a shared prompt once for each response all the same, and the head every response token:
with a vocabulary that is large for the model's size, less is saved than in a large model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import SHAPES, in_turns, kind_of_seconds, median_ratio, qwen2, random_learner
from conversion.model import flops
from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.learner.packing import Packer
from megatron_retool.learner.shared_packing import SharedPrefixPacker
from megatron_retool.parity.admission.tiny_model import with_copies
from megatron_retool.parity.batches import random_batch
from megatron_retool.trajectory import TrajectoryBatch

TOKENS = {"grpo": 2048, "arpo": 1024}
ROOM = 32768
"""Tokens of a micro-batch, where prompts and responses have ``TOKENS``."""


def batch_of(case: str, tokens: int, groups: int, vocab_size: int) -> TrajectoryBatch:
    """Groups of a prompt and 16 responses, or of a prompt, 4 stems and 2 leaves on each."""
    size, parts = (8, 2) if case == "arpo" else (16, 1)
    count = groups * size
    copies = [(row, row - row % size, tokens) for row in range(count) if row % size]
    if case == "arpo":
        copies += [(row, row - 1, 2 * tokens) for row in range(1, count, 2)]
    rng = np.random.default_rng(0)
    prompts, responses = np.full(count, tokens, np.int32), np.full(count, parts * tokens, np.int32)
    batch = with_copies(random_batch(rng, prompts, responses, vocab_size), copies)
    total = batch.num_response_tokens
    return batch.with_columns(advantages=rng.normal(size=total), loss_weights=np.full(total, 1 / total))


def share_of_flops(architecture: Architecture, batch: TrajectoryBatch, room: int) -> float:
    """Of a forward and backward pass with sharing to one without, in micro-batches of ``room`` tokens on one rank."""
    place = ParallelLayout.of_ranks(1), room, 0, 0, torch.device("cpu")
    cost = flops.quadratic_cost(architecture)
    shared, plain = (
        packer(*place, quadratic_cost=cost).training_flops(architecture, batch)
        for packer in (SharedPrefixPacker, Packer)
    )
    return shared / plain


def print_large_models_flops(case: str) -> None:
    large = qwen2(SHAPES["qwen2.5-7b"])
    batch = batch_of(case, TOKENS[case], 1, large.vocab_size)
    shares = {room: share_of_flops(large, batch, room) for room in (2 * ROOM, ROOM, ROOM // 2, ROOM // 4)}
    result = ", ".join(f"{share:.2f} in micro-batches of {room:,} tokens" for room, share in shares.items())
    print(f"FLOPs of a 7B model at {TOKENS[case]:,} tokens: {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(TOKENS), default="grpo")
    parser.add_argument("--tokens", type=int, help="of a prompt, a response, a stem, a leaf")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--flops-only", action="store_true", help="no learner, arithmetic alone")
    options = parser.parse_args()
    if options.flops_only:
        print_large_models_flops(options.case)
        return
    tokens = options.tokens or TOKENS[options.case]
    room = ROOM * tokens // TOKENS[options.case]

    shape = {
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": max(options.hidden // 256, 1),
        "intermediate_size": 3 * options.hidden,
        "vocab_size": options.vocab,
        "tie_word_embeddings": False,
    }
    batch = batch_of(options.case, tokens, options.groups, options.vocab)
    learner = random_learner(
        qwen2(shape), lr=1e-9, max_tokens_per_micro_batch=room, share_prefixes=True, dtype="float32", threads=2
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
    answers: dict[str, tuple[np.ndarray, float]] = {}

    def step(name: str, packer: Packer) -> None:
        learner.packer = packer
        old = learner.log_probs(batch)["log_probs"]
        metrics = learner.update(batch.with_columns(old_log_probs=old))
        answers[name] = (old, metrics["actor/grad_norm"])

    sides = {"shared": lambda: step("shared", sharing), "plain": lambda: step("plain", plain)}
    taken = in_turns(sides, options.steps, 1, learner.device)
    times = {name: [seconds.of(learner.device) for seconds in result] for name, result in taken.items()}
    difference = float(np.abs(answers["shared"][0] - answers["plain"][0]).max())
    norms = answers["shared"][1] / answers["plain"][1] - 1
    whole, computed = (sum(packer.plan(batch).num_tokens) for packer in (plain, sharing))
    print(f"{len(batch)} sequences, {whole} tokens, {computed} with sharing, in micro-batches of {room}")
    print(f"log-probs differ by at most {difference:.1e}, gradient norms by {norms:.1e}")
    for name, result in times.items():
        print(f"{name}: {statistics.median(result):.2f} s ({kind_of_seconds(learner.device)})")
    of_flops = share_of_flops(learner.architecture, batch, room)
    print(f"ratio {median_ratio(times['shared'], times['plain']):.2f}; of FLOPs {of_flops:.2f}")
    print_large_models_flops(options.case)
    learner.close()


if __name__ == "__main__":
    main()
