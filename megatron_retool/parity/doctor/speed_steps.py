"""How fast this machine copies and learns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from conversion.model import flops
from conversion.model.architecture import Architecture
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.learner.learner import Learner
from megatron_retool.learner.precision import FP8_RECIPES, Acceleration, check_precision
from megatron_retool.learner.transformer_engine import attention_kernel
from megatron_retool.parity.batches import random_batch
from megatron_retool.parity.doctor.model import mini_batch
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.trajectory import TrajectoryBatch

LEAST_HOST_GB_S = 3.0
"""Between host and GPU: less is a link of fewer than four PCIe 4 lanes."""
LEAST_MFU_WITH_TRANSFORMER_ENGINE, LEAST_MFU_WITHOUT = 0.15, 0.03
_STEPS = 5
_ROOMY_BYTES = 40 * 2**30
"""From here on a GPU has room to train a billion parameters; others get a quarter of the layers."""
_GPU_BYTES, _CPU_BYTES = 512 * 2**20, 64 * 2**20


def bandwidth(session: DoctorSession) -> list[StepFigure]:
    """Copies of one large block: within the host, and with a GPU to it, from it and within it."""
    size = _GPU_BYTES if session.gpus else _CPU_BYTES
    host, other = (torch.empty(size, dtype=torch.uint8).fill_(1) for _ in range(2))
    # A copy reads and writes: twice its size passes through memory.
    figures = [StepFigure("host memory", 2 * _rate(lambda: other.copy_(host), size), "GB/s", at_least=1.0)]
    for index in range(session.gpus):
        device = torch.device("cuda", index)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
        first, second = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        copies: list[tuple[str, Callable[[], Any], float, float | None]] = [
            ("host to GPU", lambda: first.copy_(pinned), 1, LEAST_HOST_GB_S),  # noqa: B023 - called in this turn
            ("GPU to host", lambda: pinned.copy_(first), 1, LEAST_HOST_GB_S),  # noqa: B023
            ("GPU memory", lambda: second.copy_(first), 2, 100.0),  # noqa: B023
        ]
        for name, copy, passes, least in copies:
            rate = passes * _rate(copy, size, device)
            figures.append(StepFigure(f"GPU {index}, {name}", rate, "GB/s", at_least=least))
    return figures


def _rate(copy: Callable[[], Any], size: int, device: torch.device | None = None) -> float:
    return size / fastest_seconds(copy, 4, device) / 1e9


def fastest_seconds(
    work: Callable[[], Any], repeats: int, device: torch.device | None, before: Callable[[], Any] = lambda: None
) -> float:
    """Of ``repeats`` calls of ``work`` the quickest, in seconds.

    Args:
        device: the GPU whose work counts too; None: only the host's.
        before: called before each, and not counted.
    """
    seconds = []
    for _ in range(repeats):
        before()
        if device is not None:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device is not None:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def step_time(session: DoctorSession) -> list[StepFigure]:
    """Optimizer steps on random weights, in each number format that the GPU has.

    On a GPU the model has about a billion parameters, on a CPU it is tiny.
    """
    if session.gpus:
        roomy = torch.cuda.get_device_properties(0).total_memory > _ROOMY_BYTES
        sizes = {
            "hidden": 2048,
            "layers": 16 if roomy else 4,
            "heads": 16,
            "groups": 8,
            "ffn": 8192,
            "vocabulary": 32768,
        }
        prompts, responses = np.full(8, 16, np.int32), np.full(8, 4000, np.int32)
        batch = random_batch(np.random.default_rng(0), prompts, responses, sizes["vocabulary"])
        tokens, dtype = 8192, "bfloat16"
    else:
        sizes = {"hidden": 256, "layers": 2, "heads": 4, "groups": 2, "ffn": 512, "vocabulary": 512}
        batch, tokens, dtype = mini_batch(), 2048, "float32"
    architecture = Architecture(
        family="qwen3",
        num_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_query_groups=sizes["groups"],
        head_dim=sizes["hidden"] // sizes["heads"],
        ffn_hidden_size=sizes["ffn"],
        vocab_size=sizes["vocabulary"],
        qk_norm=True,
    )
    acceleration = Acceleration.detect()
    figures = [StepFigure("computed on", acceleration.describe())]
    for recipe in (None, *FP8_RECIPES) if session.gpus else (None,):
        overrides = [f"learner.dtype={dtype}", f"learner.max_tokens_per_micro_batch={tokens}"]
        config = load_config(None, [*overrides, *([f"learner.fp8.recipe={recipe}"] if recipe else [])])
        try:
            check_precision(config.learner, config.learner.optimizer, architecture, acceleration)
        except ConfigError:
            continue
        figures += _timed_steps(config, architecture, acceleration, batch, f"FP8 {recipe}" if recipe else dtype)
    return figures


def _timed_steps(
    config: Config, architecture: Architecture, acceleration: Acceleration, batch: TrajectoryBatch, label: str
) -> list[StepFigure]:
    """The quickest of some steps of a learner that is made for them and closed."""
    if acceleration.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    learner = Learner(config, optimizer=config.learner.optimizer, total_optimizer_steps=100, architecture=architecture)
    try:
        seconds = fastest_seconds(lambda: learner.sft_update(batch), _STEPS if acceleration.cuda else 2, None)
        work = learner.model_flops(batch)
    finally:
        learner.close()
    figures = [
        StepFigure(f"{label}: step", seconds, "s"),
        StepFigure(f"{label}: tokens", float(batch.total_lengths.sum()) / seconds, "tokens/s"),
        StepFigure(f"{label}: model FLOPs", work / seconds / 1e12, "TFLOP/s"),
    ]
    if (peak := flops.peak_flops(acceleration.gpu_name)) is not None:
        least = LEAST_MFU_WITH_TRANSFORMER_ENGINE if acceleration.transformer_engine else LEAST_MFU_WITHOUT
        figures.append(StepFigure(f"{label}: MFU", work / seconds / peak, "of bfloat16's peak", at_least=least))
    if acceleration.cuda:
        figures.append(
            StepFigure(f"{label}: memory, at most allocated", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        )
    if kernel := attention_kernel():
        figures.append(StepFigure(f"{label}: attention", kernel))
    return figures
