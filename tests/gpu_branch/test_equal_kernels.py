"""Whether SGLang's batch-invariant kernels and Megatron-Core's compute the same on a GPU: their instructions compared.

Both packages carry kernels of one origin. The same floating-point instructions in the same order, for the same shapes,
give the same bits on the same GPU.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_retool.doctor import equality_steps
from megatron_retool.doctor.kernel_steps import Comparison
from sglang_rollout.engine.process import torchvision_directory
from tests.gpu_branch import device_compiler
from tests.gpu_branch.device_compiler import Kernel
from tests.gpu_branch.fake_device import HOPPER


def _start(triton_cache: Path) -> None:
    device_compiler.install(HOPPER, triton_cache)
    os.environ["SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM"] = "0"
    sys.path.insert(0, str(torchvision_directory()))
    from megatron.core.transformer.custom_layers import batch_invariant_kernels as learner
    from sglang.srt.batch_invariant_ops import batch_invariant_ops as engine

    # Both divide a product among as many blocks as the GPU has multiprocessors.
    units = torch.cuda.get_device_properties().multi_processor_count
    learner.get_compute_units = lambda: units
    engine.get_device_core_count = lambda *_: units


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """``both(function, *args)``: what it answers in a process that compiles for a GPU."""
    pytest.importorskip("sglang")
    pytest.importorskip("triton", reason="torch's build for CPUs comes without Triton")
    spawn = multiprocessing.get_context("spawn")
    cache = tmp_path_factory.mktemp("triton")
    with ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(cache,)) as process:
        yield lambda function, *args: process.submit(function, *args).result()


def _sides() -> tuple[Any, Any]:
    from megatron.core.transformer.custom_layers import batch_invariant_kernels as learner
    from sglang.srt.batch_invariant_ops import batch_invariant_ops as engine

    return engine, learner


def _products(dtype: torch.dtype, rows: int, size: int, columns: int) -> list[list[Kernel]]:
    x, weight = torch.randn(rows, size, dtype=dtype), torch.randn(columns, size, dtype=dtype).t()
    return [device_compiler.kernels_of(side.matmul_persistent, x, weight) for side in _sides()]


def _log_softmax(rows: int, vocabulary: int) -> list[list[Kernel]]:
    logits = torch.randn(rows, vocabulary)
    return [device_compiler.kernels_of(side.log_softmax, logits) for side in _sides()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(100, 896, 1152), (1, 4864, 896)])
def test_matrix_products_are_the_same(
    dtype: torch.dtype, shape: tuple[int, int, int], both: Callable[..., Any]
) -> None:
    (engine,), (learner,) = both(_products, dtype, *shape)
    assert engine.arithmetic == learner.arithmetic
    assert any("mma" in each for each in engine.arithmetic)


def test_log_softmax_is_the_same(both: Callable[..., Any]) -> None:
    (engine,), (learner,) = both(_log_softmax, 10, 151936)
    # The largest of a row is the same whatever is compared first.
    found = [[each for each in side.arithmetic if not each.startswith("max")] for side in (engine, learner)]
    assert found[0] == found[1] and any(each.startswith("ex2") for each in found[0])


def _doctors_pairs() -> dict[str, bool]:
    from sglang.kernels.ops.attention.flash_attention_v3 import flash_attn_with_kvcache

    given = {
        "q",
        "k_cache",
        "v_cache",
        "page_table",
        "cache_seqlens",
        "cu_seqlens_q",
        "max_seqlen_q",
        "causal",
        "num_splits",
    }
    assert given <= inspect.signature(flash_attn_with_kvcache).parameters.keys()
    return {pair.name: pair.same for pair in equality_steps.operator_pairs(Comparison("cpu"))}


def test_the_doctor_demands_zero_of_these(both: Callable[..., Any]) -> None:
    assert [name for name, same in both(_doctors_pairs).items() if same] == ["matrix product", "log-softmax"]
