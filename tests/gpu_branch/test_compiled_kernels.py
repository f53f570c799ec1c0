"""What torch.compile and Triton make of the learner's functions on a GPU compiles, and fits into a block's memory.

Nothing of it runs: numbers and speed are not seen here.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from megatron_retool.planning.models import MODELS
from tests.gpu_branch import device_compiler
from tests.gpu_branch.device_compiler import SHARED_BYTES, Kernel
from tests.learner.transformer_engine import kernels

AMPERE, ADA, HOPPER, BLACKWELL = SHARED_BYTES
TOKENS = 1000
"""How many a micro-batch has; blocks of 128 do not divide them."""
MEGATRON = "megatron.core."
OUTPUT_GATE = "megatron.core.transformer.attention.Attention._apply_output_gate"
EXPERT_BIAS = "megatron.core.transformer.moe.router.TopKRouter._apply_expert_bias"
FLEX_ATTENTION = "torch.nn.attention.flex_attention.flex_attention"
ACTIVATIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "fusions.fused_bias_swiglu.swiglu": ((TOKENS, 9728),),
    "fusions.fused_bias_swiglu.swiglu_back": ((TOKENS, 4864), (TOKENS, 9728)),
    "fusions.fused_bias_swiglu.weighted_swiglu": ((TOKENS, 1536), (TOKENS, 1)),
    "fusions.fused_bias_swiglu.weighted_swiglu_back": ((TOKENS, 768), (TOKENS, 1536), (TOKENS, 1)),
    "fusions.fused_bias_geglu.quick_gelu": ((TOKENS, 2880),),
    "activations.squared_relu": ((TOKENS, 1856),),
}
"""Shapes of the arguments: Qwen2.5-0.5B's, those of an expert of Qwen3-30B-A3B, of gpt-oss and of Nemotron 3 Nano."""
LEARNED = {"quick_gelu", "squared_relu"}
"""Those of them whose gradient autograd makes."""
COMPILED = {
    *(MEGATRON + name for name in ACTIVATIONS),
    OUTPUT_GATE,
    EXPERT_BIAS,
    FLEX_ATTENTION,
    f"{FLEX_ATTENTION}.<locals>._flex_attention_hop_wrapper",
}
"""Every function that torch.compile gets in a step; ``test_parity`` finds others."""

PERMUTATION = {
    "_row_id_map_pass_1_kernel",
    "_row_id_map_pass_2_kernel",
    "_row_id_map_pass_3_kernel",
    "_permute_kernel",
    "_unpermute_kernel",
    "_make_chunk_sort_map_kernel",
    "_sort_chunks_by_map_kernel",
}
"""Transformer Engine's kernels that bring tokens to their experts and back."""

Compile = Callable[..., list[Kernel]]


@pytest.fixture(scope="module")
def compile_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """``compile_for(capability, function, *args)``: what ``function`` answers in a process that compiles for it."""
    pytest.importorskip("triton", reason="torch's build for CPUs comes without Triton")
    started: dict[tuple[int, int], ProcessPoolExecutor] = {}
    with ExitStack() as until_the_end:

        def run(capability: tuple[int, int], function: Callable[..., list[Kernel]], *args: Any) -> list[Kernel]:
            if capability not in started:
                executor = ProcessPoolExecutor(
                    1,
                    multiprocessing.get_context("spawn"),
                    initializer=device_compiler.install,
                    initargs=(capability, tmp_path_factory.mktemp("triton")),
                )
                started[capability] = until_the_end.enter_context(executor)
            return started[capability].submit(function, *args).result()

        yield run


def _hold(found: list[Kernel], capability: tuple[int, int]) -> set[str]:
    """The names of kernels that a GPU can load."""
    assert all(kernel.code_bytes > 0 for kernel in found)
    assert [kernel for kernel in found if kernel.shared_bytes > SHARED_BYTES[capability]] == []
    return {kernel.name for kernel in found}


# --- FlexAttention over common prefixes -------------------------------------------------------------------------------


def _attention(dtype: torch.dtype, heads: int, groups: int, head_dim: int) -> list[Kernel]:
    from megatron_retool.learner import tree_attention
    from megatron_retool.learner.attention_pieces import SharedPrefixes

    tree = SharedPrefixes((), (), torch.full((TOKENS,), TOKENS, dtype=torch.int32))
    query, key, value = (
        torch.randn(TOKENS, count, head_dim, dtype=dtype, requires_grad=True) for count in (heads, groups, groups)
    )
    return device_compiler.kernels_of(tree_attention.in_one_kernel, query, key, value, tree, 0.1)


def _head_shapes() -> list[Any]:
    """(heads, groups, head_dim) of one published model for each head_dim with the most heads of a group that it comes
    with, and of some others."""
    found: dict[tuple[int, int], Any] = {}
    quick = {(64, 7), (128, 1), (128, 8), (256, 4)}
    for model in MODELS.values():
        architecture = Architecture.from_hf_config(model)
        heads, groups, head_dim = architecture.num_attention_heads, architecture.num_query_groups, architecture.head_dim
        kind = head_dim, heads // groups
        if architecture.latent is None and kind not in found:
            found[kind] = pytest.param(
                (heads, groups, head_dim),
                marks=pytest.mark.slow if kind in quick else pytest.mark.rare,
                id=f"{kind[1]} of {head_dim}",
            )
    assert quick <= found.keys()
    most = {(size, max(count for other, count in found if other == size)) for size, _ in found}
    return [shape for kind, shape in found.items() if kind in quick | most]


def _hold_attention(found: list[Kernel], capability: tuple[int, int]) -> None:
    forward, backward = (
        {name for name in _hold(found, capability) if ("flex_attention_backward" in name) is behind}
        for behind in (False, True)
    )
    assert forward and backward


@pytest.mark.parametrize("shape", _head_shapes())
def test_attention_over_common_prefixes(shape: tuple[int, int, int], compile_for: Compile) -> None:
    _hold_attention(compile_for(HOPPER, _attention, torch.bfloat16, *shape), HOPPER)


@pytest.mark.rare
@pytest.mark.parametrize("capability", [AMPERE, ADA, BLACKWELL])
def test_attention_of_other_gpus(capability: tuple[int, int], compile_for: Compile) -> None:
    _hold_attention(compile_for(capability, _attention, torch.bfloat16, 16, 2, 128), capability)


@pytest.mark.rare
def test_attention_in_float32(compile_for: Compile) -> None:
    _hold_attention(compile_for(HOPPER, _attention, torch.float32, 16, 2, 128), HOPPER)


# --- functions that Megatron-Core gives to torch.compile --------------------------------------------------------------


def _as_on_a_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The learner on a host without a GPU has turned Megatron-Core's torch.compile off."""
    return torch.compile(inspect.unwrap(function))


def _activation(name: str, dtype: torch.dtype) -> list[Kernel]:
    module, _, own_name = name.rpartition(".")
    function = _as_on_a_gpu(getattr(importlib.import_module(MEGATRON + module), own_name))
    learned = own_name in LEARNED
    arguments = [
        torch.randn(shape, dtype=torch.float32 if shape[1] == 1 else dtype, requires_grad=learned)
        for shape in ACTIVATIONS[name]
    ]
    with torch.set_grad_enabled(learned):
        return device_compiler.kernels_of(function, *arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, dtype: torch.dtype, compile_for: Compile) -> None:
    assert _hold(compile_for(HOPPER, _activation, name, dtype), HOPPER)


def _expert_bias() -> list[Kernel]:
    from megatron.core.transformer.moe.router import TopKRouter

    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(128))
    chosen = torch.rand(TOKENS, 128) < 1 / 16
    return device_compiler.kernels_of(
        _as_on_a_gpu(TopKRouter._apply_expert_bias), router, chosen, torch.zeros(TOKENS, 1, dtype=torch.bool)
    )


def _output_gate(dtype: torch.dtype) -> list[Kernel]:
    from megatron.core.transformer.attention import Attention

    attended, gate = (torch.randn(TOKENS, 1, 4096, dtype=dtype, requires_grad=True) for _ in range(2))
    return device_compiler.kernels_of(_as_on_a_gpu(Attention._apply_output_gate), None, attended, gate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attentions_gate(dtype: torch.dtype, compile_for: Compile) -> None:
    assert _hold(compile_for(HOPPER, _output_gate, dtype), HOPPER)


def test_tokens_per_expert(compile_for: Compile) -> None:
    assert _hold(compile_for(HOPPER, _expert_bias), HOPPER)


# --- Transformer Engine's kernels in Triton ---------------------------------------------------------------------------


def _start_with_engine(triton_cache: Path) -> None:
    kernels.install(kernels.FOLDER)
    device_compiler.compile_launches(HOPPER, triton_cache)
    Tensor.is_cuda = property(lambda tensor: True)  # which its checks ask for


def _sort_tokens(experts: int, hidden: int, padded_for_fp8: bool) -> list[Kernel]:
    """To their experts, to the ranks that have these, and back."""
    from transformer_engine.pytorch import permutation

    def there_and_back(tokens: Tensor, probs: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        count = TOKENS * 8
        per_expert = torch.full((experts,), count // experts, dtype=torch.int32)
        if padded_for_fp8:
            rows, own, row_ids, pad_offsets, _ = permutation.moe_permute_and_pad_with_probs(
                tokens, probs, chosen, per_expert, 16
            )
        else:
            rows, own, row_ids = permutation.moe_permute_with_probs(tokens, probs, chosen, count)
            pad_offsets = None
        order = torch.arange(experts, dtype=torch.int32)
        sorted_rows, sorted_own = permutation.moe_sort_chunks_by_index_with_probs(rows, own, per_expert, order)
        sorted_rows = permutation.moe_sort_chunks_by_index(sorted_rows, per_expert, order)
        merged = permutation.moe_unpermute(sorted_rows, row_ids, restore_shape=tokens.shape, pad_offsets=pad_offsets)
        return merged, sorted_own

    tokens = torch.randn(TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(TOKENS, experts, requires_grad=True)
    chosen = torch.ones(TOKENS, experts, dtype=torch.int32)
    return device_compiler.kernels_of(there_and_back, tokens, probs, chosen)


def _received_tokens(experts: int) -> list[Kernel]:
    """Which local experts the tokens are for that DeepEP brought (``learner.moe_token_dispatcher_type=flex``)."""
    from megatron.core.fusions.fused_indices_converter import fused_indices_to_multihot

    chosen = torch.zeros(TOKENS, 8, dtype=torch.int64)
    probs = torch.rand(TOKENS, 8, requires_grad=True)
    return device_compiler.kernels_of(fused_indices_to_multihot, chosen, probs, experts)


@pytest.mark.slow
def test_experts_tokens(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="torch's build for CPUs comes without Triton")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_start_with_engine, initargs=(tmp_path,)) as process:
        for padded_for_fp8 in (False, True):
            found = process.submit(_sort_tokens, 128, 2048, padded_for_fp8).result()
            assert _hold(found, HOPPER) == PERMUTATION
        found = process.submit(_received_tokens, 16).result()
        assert _hold(found, HOPPER) == {"_indices_to_multihot_kernel", "_multihot_to_indices_kernel"}


@pytest.mark.slow
def test_kernel_that_no_gpu_could_load() -> None:
    with pytest.raises(AssertionError, match="too large"):
        _hold([Kernel("too large", code_bytes=1, shared_bytes=SHARED_BYTES[HOPPER] + 1)], HOPPER)
