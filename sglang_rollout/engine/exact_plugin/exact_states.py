"""Layers that keep states in place of a cache, in the arithmetic of the learner: what ``exact_operators`` puts in the
place of SGLang's functions for gated delta nets and Mamba-2."""

from __future__ import annotations

from typing import Any

import torch

from megatron_retool.exact import operators


def on_a_gpu() -> dict[str, tuple[tuple[str, Any], ...]]:
    """SGLang's kernels for states, and what fuses others with them, by operator, and what stands for each.

    On a CPU ``sglang_cpu_engine`` puts the same functions in their places, or in those of SGLang's for a CPU.
    """
    from sglang_cpu_engine import delta_nets, mamba

    srt, ops = "sglang.srt.layers.attention.", "sglang.kernels.ops."
    convolutions = tuple(
        (f"{module}.causal_conv1d_{name}", function)
        for module in (srt + "mamba.causal_conv1d", ops + "mamba.causal_conv1d_triton")
        for name, function in (("fn", delta_nets.convolve_prefill), ("update", delta_nets.convolve_next))
    )
    return {
        "delta_net": (
            *convolutions,
            (ops + "attention.linear.fused_gdn_gating.fused_gdn_gating", delta_nets.gates),
            (ops + "attention.fla.chunk.chunk_gated_delta_rule", delta_nets.delta_rule),
            (srt + "linear.kernels.gdn_triton.TritonGDNKernel.packed_decode", delta_rule_of_packed),
            (ops + "attention.fla.fused_norm_gate.FusedRMSNormGated.forward", delta_nets.gated_rms_norm),
            (ops + "attention.fla.layernorm_gated.RMSNorm.forward", delta_nets.gated_rms_norm),
        ),
        "mamba": (
            *convolutions,
            (ops + "mamba.triton_ops.mamba_chunk_scan_combined", mamba.scan),
            (ops + "mamba.triton_ops.selective_state_update", mamba.scan_next),
        ),
    }


def convolved(known: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str | None) -> torch.Tensor:
    """As ``sglang_cpu_engine.delta_nets.convolved``."""
    assert activation in ("silu", "swish"), "the learner's convolution has silu behind it"
    return operators.convolve(known, weight, bias)


def gated_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """As ``sglang_cpu_engine.delta_nets.gated_norm``."""
    assert activation == "silu", "the learner's norm is multiplied by silu of its gate"
    return operators.gated_rms_norm(x, weight, eps, gate)


def state_space(
    value: torch.Tensor,
    steps: torch.Tensor,
    rates: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    skip: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """As ``sglang_cpu_engine.mamba.walked``."""
    return operators.state_space(
        value, steps, rates, skip, bias, write, read, states, torch.arange(len(states), device=states.device), starts
    )


def norm_of_gated(norm: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Of one group's features."""
    assert norm.n_groups == 1, "the learner's norm is exact for one group"
    return operators.norm_of_gated(x, norm.weight, norm.variance_epsilon, gate)


def delta_rule_of_packed(
    kernel: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,  # noqa: N803  the name is SGLang's
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    num_v_heads: int,
    head_v_dim: int,
    **_: Any,
) -> torch.Tensor:
    """One new token of each request, ``mixed_qkv`` [requests, features]: [1, requests, value heads, value size]."""
    from sglang_cpu_engine import delta_nets

    rows, values = len(mixed_qkv), num_v_heads * head_v_dim
    query, key, value = mixed_qkv.split([(mixed_qkv.size(-1) - values) // 2] * 2 + [values], -1)
    query, key = (x.reshape(1, rows, -1, ssm_states.size(-1)) for x in (query, key))
    starts = torch.arange(rows + 1, device=mixed_qkv.device)
    operands = A_log, dt_bias, query, key, value.reshape(1, rows, num_v_heads, head_v_dim), a, b
    return delta_nets.delta_rule_of_next(*operands, ssm_states, cache_indices, starts)
