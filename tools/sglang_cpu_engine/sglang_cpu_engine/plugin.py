"""SGLang plugin for CPU engines: batched attention and prefills, compiled layers, sampling, shared weights, experts.

SGLang's ``torch_native`` backend calls scaled_dot_product_attention once per request and layer; with a hundred small
sequences that loop is most of a decoding step. SGLang finds this plugin through the entry point in ``python_path``,
that is, only in processes which have that directory on their path.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from sglang_cpu_engine import WITHOUT_VARIABLE, batch_invariance, delta_nets, layers, mamba, ungated_experts
from sglang_cpu_engine.compiled import takes
from sglang_cpu_engine.decode_attention import attend

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
_PADDED_LIMIT = 2**20
"""Query-key pairs that padding may add to a prefill whatever its share; beyond it, requests are taken one by one."""

_RUNNING_FOR_ONE_WAITING, _MOST_PASSES_HELD = 8, 8
"""A prefill waits until there is one request for so many that decode, but at most so many passes."""


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    leave_memory_unpinned()
    ungated_experts.register_product()
    # Delta nets ask it where they are; a CUDA build of torch answers torch.cuda, which then looks for a GPU.
    torch.get_device_module = lambda *_: torch.cpu  # type: ignore[assignment]
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # --enable-deterministic-inference is what makes SGLang read sampling seeds, and exchanges kernels. It knows no CPU
    # backend, and its own kernels exist only on GPUs.
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", make_batch_invariant, HookType.REPLACE
    )

    HookRegistry.register(
        "sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank", map_weights, HookType.AFTER
    )
    # Where --enable-return-routed-experts keeps them is registered with CUDA, which needs a CUDA build of torch.
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register", plain_host_memory, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw", hold_prefills, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.layers.sampler.sampling_from_probs_torch", sample, HookType.AROUND)
    for module in ("fused_norm_gate.FusedRMSNormGated", "layernorm_gated.RMSNorm"):
        # Triton kernels, on every device that has no AMX.
        HookRegistry.register(
            f"sglang.kernels.ops.attention.fla.{module}.forward", delta_nets.gated_rms_norm, HookType.REPLACE
        )
    for name, function in (("mamba_chunk_scan_combined", mamba.scan), ("selective_state_update", mamba.scan_next)):
        HookRegistry.register(f"sglang.kernels.ops.mamba.triton_ops.{name}", function, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward", mamba.with_convolutions, HookType.AROUND
    )
    register_layers(without=os.environ.get(WITHOUT_VARIABLE, "").split(","))


def register_layers(without: Collection[str]) -> None:
    """Exchange what layers compute, except operators that another plugin exchanges."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "experts" not in without:
        # What multiplies Qwen2-MoE's shared expert by its gate is a Triton kernel, on every device.
        HookRegistry.register(
            "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
            gate_shared_expert,
            HookType.REPLACE,
        )
        HookRegistry.register(
            "sglang.srt.layers.moe.fused_moe_native.moe_forward_native", ungated_experts.experts, HookType.AROUND
        )
    srt = "sglang.srt.layers."
    for operator, target, hook in (
        ("norm", srt + "layernorm.RMSNorm.forward_native", rms_norm),
        ("activation", srt + "activation.SiluAndMul.forward_native", silu_and_mul),
        ("rotary", srt + "rotary_embedding.base.RotaryEmbedding.forward_native", rotary_embedding),
        ("attention", _BACKEND + "init_forward_metadata", forget_slots),
        ("attention", _BACKEND + "_run_sdpa_forward_decode", decode_attention),
        ("attention", _BACKEND + "_run_sdpa_forward_extend", extend_attention),
    ):
        if operator not in without:
            HookRegistry.register(target, hook, HookType.AROUND)


def leave_memory_unpinned() -> None:
    """Let SGLang's adapters (LoRA) ask for page-locked memory, as they do on every device: without CUDA there is none.

    torch's constructors then refuse ``pin_memory=True`` and ``Tensor.pin_memory`` raises.
    """

    def unpinned(constructor: Any) -> Any:
        @functools.wraps(constructor)
        def construct(*arguments: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return constructor(*arguments, **kwargs)

        return construct

    for name in ("tensor", "zeros", "empty", "ones", "full", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *arguments, **kwargs: tensor  # type: ignore[method-assign]


def hold_prefills(original: Any, scheduler: Any, *, running_batch: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The next batch of prefills, or none yet: requests whose tools have answered come back one by one.

    On a CPU a forward pass of a small model takes about as long for one new request as for ten, and decoding stands
    still meanwhile. SGLang's own --enable-prefill-delayer needs the overlapping scheduler, which CPUs do not have.
    """
    waiting, running = len(scheduler.waiting_queue), len(running_batch.reqs)
    held = getattr(scheduler, "prefill_passes_held", 0)
    few = 0 < waiting * _RUNNING_FOR_ONE_WAITING < running and scheduler.chunked_req is None
    if few and held < _MOST_PASSES_HELD:
        scheduler.prefill_passes_held = held + 1
        return None, running_batch
    scheduler.prefill_passes_held = 0
    return original(scheduler, running_batch=running_batch, **kwargs)


def make_batch_invariant(*arguments: Any, **kwargs: Any) -> None:
    """In place of the switch that puts Triton kernels under matrix products."""
    batch_invariance.enable()


def plain_host_memory(dims: Any, dtype: torch.dtype, device: str, *arguments: Any, **kwargs: Any) -> torch.Tensor:
    """In place of host memory that a GPU can read: there is none."""
    return torch.empty(dims, dtype=dtype, device=device)


def gate_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """sigmoid(hidden_states . gate_weight) * shared_output into ``output`` [tokens, hidden size], or added to it.

    In float32, as the kernel that it stands for. A row's sum does not depend on its neighbours.
    """
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).sigmoid()
    gated = gate * shared_output.float()
    output.copy_(output.float() + gated if do_add else gated)


def map_weights(payload: Any, *arguments: Any, **kwargs: Any) -> Any:
    """A bucket of weights that the learner sent as the path of its memory, with that memory in the path's place."""
    if isinstance(payload, dict) and isinstance(path := payload.get("flattened_tensor"), str):
        size = max(each.end_idx for each in payload["metadata"])
        payload["flattened_tensor"] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    return payload


def rms_norm(
    original: Any, norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *rest: Any, **kwargs: Any
) -> Any:
    """Of x, or of x + residual, which is then returned too."""
    options = (*rest, *kwargs.values(), norm.variance_size_override, norm.override_orig_dtype)
    plain = not any(option is not None for option in options) and x.shape[-1] == len(norm.weight)
    if not plain or not takes(x, norm.weight, *(() if residual is None else (residual,))):
        return original(norm, x, residual, *rest, **kwargs)
    if residual is None:
        return layers.rms_norm(x, norm.weight, norm.variance_epsilon)
    return layers.add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)


def silu_and_mul(original: Any, activation: Any, x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., 2 * features]"""
    return layers.silu_and_mul(x) if takes(x) else original(activation, x)


def rotary_embedding(
    original: Any,
    rotary: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` and ``key`` [tokens, heads * head size], parts of the rows of one product."""
    plain = not any(option is not None for option in (*rest, *kwargs.values())) and not hasattr(rotary, "sin_cos_cache")
    rows = all(x.dim() == 2 and x.stride(1) == 1 for x in (query, key)) and positions.dim() == 1
    if not plain or not rows or positions.dtype != torch.int64 or not takes(query, key, rotary.cos_sin_cache):
        return original(rotary, positions, query, key, *rest, **kwargs)
    how = (rotary.cos_sin_cache, positions.contiguous(), rotary.head_size, not rotary.is_neox_style)
    return layers.rotate(query, *how), layers.rotate(key, *how)


def sample(
    original: Any, probs: torch.Tensor, sampling_seed: torch.Tensor | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """A token of each row of ``probs`` [requests, vocabulary]; seeded requests have noise of their own."""
    if sampling_seed is not None or not takes(probs):
        return original(probs, sampling_seed, positions)
    return layers.sample(probs)


def forget_slots(original: Any, backend: Any, *arguments: Any, **kwargs: Any) -> Any:
    """A new forward pass begins: its layers will share one table of cache slots, not the last pass's."""
    backend.batch_slots = None
    return original(backend, *arguments, **kwargs)


def decode_attention(
    original: Any, backend: Any, query: torch.Tensor, output: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    """One new token of each request against its cache. ``query`` and ``output`` [requests, heads, head size]."""
    k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = rest
    if encoder_lens is not None or kwargs.get("sliding_window_size") is not None:
        return original(backend, query, output, *rest, **kwargs)
    # Seeded engines need the bits that a prefill of the same tokens gives.
    if not batch_invariance.enabled() and takes(query, k_cache, v_cache):
        place = (req_to_token, req_pool_indices, seq_lens)
        return output.copy_(attend(query, k_cache, v_cache, *place, kwargs.get("scaling")))
    slots, visible = _slots(backend, req_to_token, req_pool_indices, seq_lens)
    requests, heads, head_size = query.shape
    kv_heads = k_cache.shape[1]
    # Query heads that share a KV head become query positions: no KV head is repeated.
    grouped = query.view(requests, kv_heads, heads // kv_heads, head_size)
    if batch_invariance.enabled():
        grouped = pad(grouped, (0, 0, 0, batch_invariance.query_padding(heads // kv_heads)))
    attended = scaled_dot_product_attention(
        grouped,
        _gather(k_cache, slots, query.dtype),
        _gather(v_cache, slots, query.dtype),
        attn_mask=visible[:, None, None, :],
        scale=kwargs.get("scaling"),
    )
    output.copy_(attended[:, :, : heads // kv_heads].reshape(output.shape))
    return output


def extend_attention(
    original: Any, backend: Any, query: torch.Tensor, output: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    """The new tokens of each request (a prompt, or a turn after a cached prefix) against its cache.

    ``query`` and ``output`` [new tokens of all requests, heads, head size].
    """
    k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, prefix_lens, extend_lens, encoder_lens = rest
    requests, longest_new = len(seq_lens), int(extend_lens.max())
    padded_pairs = requests * longest_new * int(seq_lens.max())
    plain = encoder_lens is None and kwargs.get("sliding_window_size") is None and kwargs.get("causal")
    wasteful = padded_pairs > 4 * int((extend_lens * seq_lens).sum()) + _PADDED_LIMIT
    if not plain or (wasteful and not batch_invariance.enabled()):
        return original(backend, query, output, *rest, **kwargs)
    if wasteful and requests > 1:
        first = 0
        for each in range(requests):
            one, new = slice(each, each + 1), slice(first, first + int(extend_lens[each]))
            own = (req_pool_indices[one], seq_lens[one], prefix_lens[one], extend_lens[one], encoder_lens)
            backend.batch_slots = None
            extend_attention(original, backend, query[new], output[new], k_cache, v_cache, req_to_token, *own, **kwargs)
            first = new.stop
        backend.batch_slots = None
        return output
    slots, _ = _slots(backend, req_to_token, req_pool_indices, seq_lens)
    if batch_invariance.enabled():
        longest_new += batch_invariance.query_padding(longest_new)
    heads, head_size = query.shape[1:]
    rows = torch.arange(longest_new)
    is_new = rows[None, :] < extend_lens[:, None]
    # Rows past a request's last new token see its first key, so that no softmax runs over nothing.
    position = prefix_lens[:, None] + torch.where(is_new, rows[None, :], 0)
    visible = torch.arange(slots.shape[1])[None, None, :] <= position[:, :, None]
    padded_query = query.new_zeros(requests, longest_new, heads, head_size)
    padded_query[is_new] = query
    attended = scaled_dot_product_attention(
        padded_query.transpose(1, 2),
        _gather(k_cache, slots, query.dtype),
        _gather(v_cache, slots, query.dtype),
        attn_mask=visible[:, None],
        scale=kwargs.get("scaling"),
        enable_gqa=heads != k_cache.shape[1],
    )
    output.copy_(attended.transpose(1, 2)[is_new])
    return output


def _slots(
    backend: Any, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache slots int64 and validity bool, both [requests, longest]; the same for every layer of a forward pass."""
    if getattr(backend, "batch_slots", None) is None:
        longest = int(seq_lens.max())
        slots = req_to_token[req_pool_indices, :longest].long()
        if batch_invariance.enabled():
            slots = pad(slots, (0, batch_invariance.key_padding(longest)))
        visible = torch.arange(slots.shape[1])[None, :] < seq_lens[:, None]
        # Padding points at slot 0, which SGLang reserves for it; the mask keeps it out of the softmax.
        slots = torch.where(visible, slots, 0)
        backend.batch_slots = (slots, visible)
    return backend.batch_slots


def _gather(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, KV heads, head size] -> [requests, KV heads, longest, head size]."""
    # embedding copies whole rows, which is twice as fast as indexing here.
    rows = embedding(slots, cache.view(cache.shape[0], -1))
    return rows.view(*slots.shape, *cache.shape[1:]).transpose(1, 2).to(dtype)
