"""One optimizer step of the learner: milliseconds, tokens a second, MFU, memory; and the same work by transformers.

    python benchmarks/learner_step.py --shape demo --compare-hf                    # on a CPU
    python benchmarks/learner_step.py --shape qwen2.5-1.5b                         # on a GPU, bf16
    python benchmarks/learner_step.py --shape qwen2.5-1.5b --fp8 blockwise
    torchrun --nproc-per-node 8 benchmarks/learner_step.py --shape qwen2.5-7b --tensor-parallel 2

Weights are random. --log-probs FILE writes the log-probs of the first batch; with a FILE that exists (of the same shape
and seed, in another precision) it prints how far this run's are from them.

--compare-hf measures transformers' forward and backward pass with AdamW on the same sequences in the same process,
alternating with the learner's: right-padded to the longest (what a plain trainer does), and with all sequences of equal
length, where neither has padding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import SHAPES, batch_of, qwen2, random_learner, random_lengths, seconds_of
from megatron_retool.config import Fp8Config, RecomputeConfig
from megatron_retool.trajectory import TrajectoryBatch


class TransformersTrainer:
    """What a plain trainer does with transformers: pad to the longest, cross entropy, backward, clip, AdamW."""

    def __init__(self, shape: dict[str, Any]) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        self.model = Qwen2ForCausalLM(Qwen2Config(**shape | {"attn_implementation": "sdpa"})).float().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, batch: TrajectoryBatch) -> None:
        lengths = torch.from_numpy(batch.total_lengths.astype(np.int64))
        positions = torch.arange(int(lengths.max()))
        mask = positions < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.cat(
            [
                torch.from_numpy(np.concatenate([p, r])).long()
                for p, r in zip(
                    np.split(batch.prompt_ids, np.cumsum(batch.prompt_lengths)[:-1]),
                    np.split(batch.response_ids, np.cumsum(batch.response_lengths)[:-1]),
                    strict=True,
                )
            ]
        )
        logits = self.model(ids, attention_mask=mask.long()).logits[:, :-1]
        targets = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--fp8", choices=("tensorwise", "blockwise", "mxfp8"))
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--mean-length", type=int)
    parser.add_argument("--max-tokens-per-micro-batch", type=int, default=16384)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--recompute", choices=("full", "selective"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compare-hf", action="store_true")
    parser.add_argument("--log-probs", type=Path)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    architecture = qwen2(SHAPES[options.shape])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    learner = random_learner(
        architecture,
        lr=1e-4,
        world_size=world,
        **({"dtype": options.dtype} if options.dtype else {}),
        tensor_model_parallel_size=options.tensor_parallel,
        sequence_parallel=options.tensor_parallel > 1,
        context_parallel_size=options.context_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        max_tokens_per_micro_batch=options.max_tokens_per_micro_batch,
        fp8=Fp8Config(recipe=options.fp8),
        recompute=RecomputeConfig(granularity=options.recompute),
    )
    is_first = torch.distributed.get_rank() == 0
    mean = options.mean_length or (2048 if cuda else 110)
    lengths = random_lengths(options.sequences, mean, min(8 * mean, options.max_tokens_per_micro_batch), seed=0)
    varied = batch_of(lengths, architecture.vocab_size, seed=1)
    equal = batch_of(np.full(options.sequences, int(lengths.mean())), architecture.vocab_size, seed=1)

    if options.log_probs is not None:
        result = learner.log_probs(varied)["log_probs"]
        if is_first and options.log_probs.exists():
            difference = np.abs(result - np.load(options.log_probs))
            print(
                f"log-probs differ from {options.log_probs} by {difference.mean():.2e}, at most {difference.max():.2e}"
            )
        elif is_first:
            with open(options.log_probs, "wb") as file:
                np.save(file, result)

    trainer = TransformersTrainer(SHAPES[options.shape]) if options.compare_hf else None
    for name, batch in (("long-tailed lengths", varied), ("equal lengths", equal)):
        tokens = int(batch.total_lengths.sum())
        times: dict[str, list[float]] = {"learner": [], "transformers": []}
        for repetition in range(options.steps + 2):
            mine = seconds_of(lambda batch=batch: learner.sft_update(batch), learner.device).clock
            theirs = seconds_of(lambda batch=batch: trainer.step(batch), learner.device).clock if trainer else 0.0
            if repetition >= 2:
                times["learner"].append(mine)
                times["transformers"].append(theirs)
        if not is_first:
            continue
        mine = statistics.median(times["learner"])
        line = f"{name}: {tokens} tokens, {1e3 * mine:.1f} ms, {tokens / mine:.0f} tokens/s"
        if trainer:
            theirs = statistics.median(times["transformers"])
            line += f"; transformers {1e3 * theirs:.1f} ms, {tokens / theirs:.0f} tokens/s; ratio {theirs / mine:.2f}"
        if cuda:
            from conversion.model.flops import peak_flops

            peak = peak_flops(learner.acceleration.gpu_name)
            achieved = learner.model_flops(batch) / mine / world
            line += f", {achieved / 1e12:.0f} TFLOP/s a GPU" + (f", MFU {achieved / peak:.1%}" if peak else "")
            line += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(line)
    learner.close()


if __name__ == "__main__":
    main()
