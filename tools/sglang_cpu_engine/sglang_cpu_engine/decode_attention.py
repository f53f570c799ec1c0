"""Attention of one new token of each request to its cache, read where it lies.

torch's attention takes keys and values that lie side by side: every layer of every step would copy the whole cache of
all requests. Here compiled code walks over a request's slots, in one thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numba
import numpy as np
import torch

from sglang_cpu_engine import compiled


def attend(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """float32 [requests, heads, head size of values].

    Args:
        query: float32 [requests, heads, head size].
        k_cache, v_cache: float32 [slots, KV heads, head size].
        req_to_token: int32 [rows, longest context], slots in the order of a request's tokens.
        req_pool_indices: int64 [requests], a request's row.
        seq_lens: int64 [requests], its tokens, the new one included.
        scaling: of the scores; None: 1 / sqrt(head size).
    """
    output = query.new_empty(*query.shape[:2], v_cache.shape[2])
    operands = (query.contiguous(), k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, output)
    _compiled()(*(x.numpy() for x in operands), np.float32(scaling or 1 / math.sqrt(query.shape[2])))
    return output


@functools.cache
def _compiled() -> Callable[..., None]:
    return compiled.kept(numba.njit, _attend)


def _attend(query, keys, values, table, rows, lengths, output, scale):  # type: ignore[no-untyped-def]
    heads, kv_heads = query.shape[1], keys.shape[1]
    shared = heads // kv_heads
    scores = np.empty((shared, table.shape[1]), np.float32)
    for request in range(len(lengths)):
        length = lengths[request]
        slots = table[rows[request]]
        for kv_head in range(kv_heads):
            for position in range(length):
                key = keys[slots[position], kv_head]
                for each in range(shared):
                    score = np.float32(0)
                    for feature in range(len(key)):
                        score += query[request, kv_head * shared + each, feature] * key[feature]
                    scores[each, position] = score * scale
            for each in range(shared):
                largest, total = scores[each, :length].max(), np.float32(0)
                for position in range(length):
                    weight = compiled.exp(scores[each, position] - largest)
                    scores[each, position] = weight
                    total += weight
                for position in range(length):
                    scores[each, position] /= total
            output[request, kv_head * shared : (kv_head + 1) * shared] = 0
            for position in range(length):
                value = values[slots[position], kv_head]
                for each in range(shared):
                    weight = scores[each, position]
                    for feature in range(len(value)):
                        output[request, kv_head * shared + each, feature] += weight * value[feature]
