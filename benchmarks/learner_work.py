"""What benchmarks of the learner have in common: shapes, random batches, a learner, and times taken in turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from conversion.model.architecture import Architecture
from megatron_retool.config import AlgorithmConfig, Config, LearnerConfig, OptimizerConfig, RecomputeConfig
from megatron_retool.learner.learner import Learner
from megatron_retool.parity.batches import random_batch
from megatron_retool.trajectory import TrajectoryBatch

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
    },
}


def qwen2(shape: Mapping[str, Any]) -> Architecture:
    return Architecture.from_hf_config({"model_type": "qwen2", "max_position_embeddings": 32768, **shape})


def random_learner(
    architecture: Architecture, *, lr: float, algorithm: AlgorithmConfig | None = None, **settings: Any
) -> Learner:
    """Random weights; ``settings`` of the learner's section, whose dtype is otherwise what the device is good at."""
    settings = {"dtype": "bfloat16" if torch.cuda.is_available() else "float32", **settings}
    config = Config(learner=LearnerConfig(**settings), algorithm=algorithm or AlgorithmConfig())
    optimizer = OptimizerConfig(lr=lr)
    return Learner(config, optimizer=optimizer, total_optimizer_steps=10_000, architecture=architecture)


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """--sequences, --mean-length, --max-tokens-per-micro-batch, --recompute, --steps."""
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean-length", type=int, default=110)
    parser.add_argument("--max-tokens-per-micro-batch", type=int, default=16384)
    parser.add_argument("--recompute", choices=("full", "selective"))
    parser.add_argument("--steps", type=int, default=12)


def learner_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say of the learner's section."""
    return {
        "max_tokens_per_micro_batch": options.max_tokens_per_micro_batch,
        "recompute": RecomputeConfig(granularity=options.recompute),
    }


def long_tailed_batch(options: argparse.Namespace, vocabulary: int) -> TrajectoryBatch:
    lengths = random_lengths(options.sequences, options.mean_length, 8 * options.mean_length, seed=0)
    return batch_of(lengths, vocabulary, seed=1)


def batch_of(lengths: np.ndarray, vocabulary: int, seed: int) -> TrajectoryBatch:
    """Sequences of which all tokens but the first are trained on."""
    prompts = np.ones(len(lengths), np.int32)
    return random_batch(np.random.default_rng(seed), prompts, (lengths - 1).astype(np.int32), vocabulary)


def random_lengths(count: int, mean: int, longest: int, seed: int) -> np.ndarray:
    """Log-normal around ``mean`` with a long tail."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(mean) - 0.08, 0.4, count), 2, longest).astype(np.int64)


def print_ratios(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Print each side's median, and return its ratio to the first side's."""
    first = next(iter(seconds.values()))
    ratios = {name: median_ratio(result, first) for name, result in seconds.items()}
    for name, result in seconds.items():
        print(f"{name}: {statistics.median(result):.4f} s, ratio {ratios[name]:.2f}")
    return ratios


class Seconds(NamedTuple):
    """Of the clock, and of the process's CPU time."""

    clock: float
    process: float

    def of(self, device: torch.device) -> float:
        """Of the process on a CPU, which other work on the machine does not lengthen; else of the clock."""
        return self.process if device.type == "cpu" else self.clock


def kind_of_seconds(device: torch.device) -> str:
    """What ``Seconds.of`` gives."""
    return "CPU time" if device.type == "cpu" else "wall time"


def seconds_of(step: Callable[[], object], device: torch.device) -> Seconds:
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock, process = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Seconds(time.perf_counter() - clock, time.process_time() - process)


def in_turns(
    sides: Mapping[str, Callable[[], object]], steps: int, warm_up: int, device: torch.device
) -> dict[str, list[Seconds]]:
    """``steps`` times of each side, one after the other; first one then the other first: the machine's speed drifts."""
    times: dict[str, list[Seconds]] = {name: [] for name in sides}
    for repetition in range(steps + warm_up):
        for name in list(sides)[:: 1 if repetition % 2 else -1]:
            result = seconds_of(sides[name], device)
            if repetition >= warm_up:
                times[name].append(result)
    return times


def median_ratio(times: list[float], base: list[float]) -> float:
    """Of the ratios within each turn."""
    return statistics.median(mine / other for mine, other in zip(times, base, strict=True))
