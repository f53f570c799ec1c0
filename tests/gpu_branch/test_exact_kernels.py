"""The kernels of learner.match_engine=exact compile for GPUs, in sizes of published models. None of them runs here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu_branch import device_compiler
from tests.gpu_branch.device_compiler import SHARED_BYTES, Kernel

AMPERE, ADA, HOPPER, BLACKWELL = SHARED_BYTES


LATENT = (128, 1, 576, 512)
"""DeepSeek-V3's heads, over latents of 512 features and 64 that rotate."""
SHAPES = ((14, 2, 64, 64), (32, 4, 128, 128), (16, 4, 256, 256), LATENT)
"""Heads, groups, features of keys, and of values."""


def _kernels(dtype: torch.dtype, heads: int, groups: int, size: int, width: int) -> list[Kernel]:
    from megatron_retool.exact import gpu_kernels as gpu

    rows, hidden, inner, experts = 100, 896, 4864, 128

    def launch() -> None:
        x, wide = torch.empty(rows, hidden, dtype=dtype), torch.empty(rows, 2 * inner, dtype=dtype)
        gpu.products(x, torch.empty(inner, hidden, dtype=dtype), torch.empty(rows, inner))
        gpu.normalized(x, torch.empty(hidden, dtype=dtype), 1e-6, torch.empty(rows, hidden))
        gpu.gated(wide, torch.empty(rows, inner))
        gpu.gelu_gated(wide, torch.empty(rows, inner))
        query = torch.empty(rows, heads, size, dtype=dtype)
        keys = torch.empty(1000, groups, size, dtype=dtype)
        turned = (size - width) or size
        angles = torch.empty(rows, turned // 2)
        gpu.rotated(query[..., :turned].contiguous(), angles, angles, torch.empty(rows, heads, turned))
        counts = torch.arange(rows) + 1
        places = torch.arange(1000, dtype=torch.int32), torch.zeros_like(counts), counts
        gpu.attended(query, keys, keys, *places, 0.1, torch.empty(rows, heads, width))
        logits, chosen = torch.empty(rows, experts), torch.zeros(rows, experts, dtype=torch.bool)
        for over_all in (True, False):
            gpu.gates_of(logits, chosen, over_all, torch.empty(rows, experts))
        gpu.shares_of(logits, chosen, torch.empty(rows, experts))
        gpu.sigmoids(logits, torch.empty(rows, experts))
        logits = torch.empty(rows, 151936)
        gpu.log_normalizers(logits, torch.empty(rows, 2))
        gpu.exponentials(logits, torch.empty_like(logits))

    return device_compiler.kernels_of(launch)


def _kernels_with_states(dtype: torch.dtype) -> list[Kernel]:
    """In the sizes of Qwen3-Next's delta nets and Granite 4's state spaces."""
    from megatron_retool.exact import gpu_kernels as gpu

    tokens, features, key_heads, heads, size = 100, 8192, 16, 32, 128

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def launch() -> None:
        gpu.convolved(
            empty(1, features, tokens + 3), empty(features, 4), empty(features), torch.empty(1, features, tokens)
        )
        of_heads, numbers = empty(heads), torch.empty(tokens, heads)
        gpu.rates(empty(tokens, heads), empty(tokens, heads), of_heads, of_heads, numbers, numbers)
        texts, value, out = (
            (torch.tensor([0]), torch.tensor([0, tokens])),
            empty(tokens, heads, size),
            torch.empty(tokens, heads, size),
        )
        vectors, states = empty(tokens, key_heads, size), torch.empty(heads * size, size)
        gpu.delta_rule(vectors, vectors, value, numbers, numbers, 1e-6, states, *texts, out)
        vectors = torch.empty(tokens, 1, size)
        gpu.state_space(
            value, empty(tokens, heads), torch.empty(heads), of_heads, of_heads, vectors, vectors, states, *texts, out
        )

    return device_compiler.kernels_of(launch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (HOPPER, torch.bfloat16),
        (HOPPER, torch.float32),
        *(pytest.param(each, torch.bfloat16, marks=pytest.mark.rare) for each in (AMPERE, ADA, BLACKWELL)),
    ],
    ids=str,
)
def test_kernels_fit_into_a_block(capability: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="torch's build for CPUs comes without Triton")
    spawn = multiprocessing.get_context("spawn")
    start: Callable[..., None] = device_compiler.compile_launches
    with ProcessPoolExecutor(1, spawn, initializer=start, initargs=(capability, tmp_path)) as process:
        found = process.submit(_kernels_with_states, dtype).result()
        for shape in SHAPES:
            found += process.submit(_kernels, dtype, *shape).result()
    assert len({kernel.name for kernel in found}) == 15
    assert all(kernel.code_bytes > 0 for kernel in found)
    assert [kernel for kernel in found if kernel.shared_bytes > SHARED_BYTES[capability]] == []
    if capability != BLACKWELL:  # whose instructions have other names
        products = [kernel for kernel in found if kernel.name in ("_products", "_attended")]
        on_matrix_units = dtype == torch.bfloat16
        assert all(any("mma" in each for each in kernel.arithmetic) is on_matrix_units for kernel in products)
