"""SGLang plugin for CPU engines: attention over the whole batch at once.

SGLang's ``torch_native`` backend calls scaled_dot_product_attention once per request and layer; with a hundred small
sequences that loop is most of a decoding step. SGLang finds this plugin through the entry point beside this file,
that is, only in processes which have this directory on their path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
    HookRegistry.register(backend + "_run_sdpa_forward_decode", decode_attention, HookType.AROUND)
    HookRegistry.register(backend + "_run_sdpa_forward_extend", extend_attention, HookType.AROUND)


def decode_attention(
    original: Any, backend: Any, query: torch.Tensor, output: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    """One new token of each request against its cache. ``query`` and ``output`` [requests, heads, head size]."""
    k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = rest
    if encoder_lens is not None or kwargs.get("sliding_window_size") is not None:
        return original(backend, query, output, *rest, **kwargs)
    longest = int(seq_lens.max())
    positions = torch.arange(longest)
    mask = positions[None, :] < seq_lens[:, None]
    # Padding points at slot 0, which SGLang reserves for it; the mask keeps it out of the softmax.
    slots = torch.where(mask, req_to_token[req_pool_indices, :longest].long(), 0)
    requests, heads, head_size = query.shape
    kv_heads = k_cache.shape[1]
    # Query heads that share a KV head become query positions: no KV head is repeated.
    grouped = query.view(requests, kv_heads, heads // kv_heads, head_size)
    keys = k_cache[slots].transpose(1, 2).to(query.dtype)
    values = v_cache[slots].transpose(1, 2).to(query.dtype)
    attended = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask[:, None, None, :], scale=kwargs.get("scaling")
    )
    output.copy_(attended.reshape(output.shape))
    return output


def extend_attention(
    original: Any, backend: Any, query: torch.Tensor, output: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    """The new tokens of each request (a prompt, or a turn after a cached prefix) against its cache.

    ``query`` and ``output`` [new tokens of all requests, heads, head size].
    """
    k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, prefix_lens, extend_lens, encoder_lens = rest
    longest, longest_new = int(seq_lens.max()), int(extend_lens.max())
    padded = len(seq_lens) * longest_new * longest
    exact = int((extend_lens * seq_lens).sum())
    plain = encoder_lens is None and kwargs.get("sliding_window_size") is None and kwargs.get("causal")
    if not plain or padded > 4 * exact + 2**20:
        return original(backend, query, output, *rest, **kwargs)
    requests, heads, head_size = len(seq_lens), query.shape[1], query.shape[2]
    kv_heads = k_cache.shape[1]
    positions, new = torch.arange(longest), torch.arange(longest_new)
    is_new = new[None, :] < extend_lens[:, None]
    # Rows past a request's last new token see its first key, so that no softmax runs over nothing.
    visible = positions[None, None, :] <= (prefix_lens[:, None] + new[None, :])[:, :, None]
    slots = torch.where(positions[None, :] < seq_lens[:, None], req_to_token[req_pool_indices, :longest].long(), 0)
    padded_query = query.new_zeros(requests, longest_new, heads, head_size)
    padded_query[is_new] = query
    repeat = heads // kv_heads
    keys = k_cache[slots].to(query.dtype).transpose(1, 2).repeat_interleave(repeat, dim=1)
    values = v_cache[slots].to(query.dtype).transpose(1, 2).repeat_interleave(repeat, dim=1)
    attended = scaled_dot_product_attention(
        padded_query.transpose(1, 2), keys, values, attn_mask=visible[:, None], scale=kwargs.get("scaling")
    )
    output.copy_(attended.transpose(1, 2)[is_new])
    return output
