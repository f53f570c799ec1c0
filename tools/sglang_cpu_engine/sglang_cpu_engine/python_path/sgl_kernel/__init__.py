"""Stand-in for SGLang's compiled kernel package, which has no CPU build on the package index.

Only what the plain CPU path really calls is here; any other name raises NotImplementedError when it is called.
"""

from typing import Any

import torch

from sglang_cpu_engine import delta_nets

__version__ = "0.4.10"

_UINT32 = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offsets: torch.Tensor,
    end_offsets: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of ``req_to_token`` ([requests, context], int32), in place."""
    position = 0
    rows, starts, ends = req_pool_indices.tolist(), start_offsets.tolist(), end_offsets.tolist()
    for row, start, end in zip(rows, starts, ends, strict=True):
        slots = out_cache_loc[position : position + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        position += end - start


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of (seed low, seed high, position, column) for each row and column.

    Seeded sampling derives its Gumbel noise from it; the result equals the GPU kernel's, so a seed means the same
    on both. ``seed`` uint64 [n], ``positions`` [n], ``columns`` [m]; returns uint32 [n, m].
    """
    # int64 arithmetic wraps modulo 2**64, which keeps the low 32 bits of every product exact.
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _UINT32, (seed >> 32) & _UINT32, positions.to(torch.int64) & _UINT32):
        state = _mix(state, block)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :] & _UINT32)
    state ^= 16
    state ^= state >> 16
    state = (state * 0x85EBCA6B) & _UINT32
    state ^= state >> 13
    state = (state * 0xC2B2AE35) & _UINT32
    state ^= state >> 16
    return state.to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & _UINT32
    block = ((block << 15) | (block >> 17)) & _UINT32
    block = (block * 0x1B873593) & _UINT32
    state = state ^ block
    state = ((state << 13) | (state >> 19)) & _UINT32
    return (state * 5 + 0xE6546B64) & _UINT32


_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
for _signature, _function in {
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)": delta_nets.gates,
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor": (
        delta_nets.delta_rule_of_next
    ),
    "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()": delta_nets.sigmoid_mul,
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int size) -> "
    "(Tensor, Tensor)": delta_nets.heads_normed,
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
    "int size, int heads) -> (Tensor, Tensor, Tensor)": delta_nets.heads_normed_beside_gates,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int key_heads, int value_heads, "
    "int key_size, int value_size) -> (Tensor, Tensor, Tensor, Tensor)": delta_nets.projections_split,
}.items():
    _LIBRARY.define(_signature)
    _LIBRARY.impl(_signature.partition("(")[0], _function, "CPU")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs in sglang-cpu-engine")

    return missing
