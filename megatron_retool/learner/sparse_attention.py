"""DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): an indexer chooses each query's keys.

Attention uses the indexer's choice and nothing else of it, so no gradient reaches the indexer.  Training leaves its
weights as they are.  Megatron-Core's own module needs Transformer Engine's layers.  Here the choice is a mask for
``PackedAttention``, which computes every pair of query and key and then drops the pairs that are not chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conversion.model.attention_config import IndexerSizes
from megatron_retool.learner.attention import LocalPackedSequences, PackedAttention, rotate, to_grid
from megatron_retool.learner.attention_pieces import Bucket, ContextBucket, KeyChoice

NORM_EPS = 1e-6
"""Of the norm of the indexer's keys, whatever config.json says: in DeepSeek's code, transformers and SGLang."""
SCORES_AT_ONCE = 2**26
"""Most float32 scores, of all heads of the indexer, that exist at one time: 256 MiB."""


class Indexer(torch.nn.Module):
    """Queries, keys and weights of heads, by which keys are chosen. Every tensor-parallel rank has it whole.

    Parameters have Megatron-Core's names and take no gradient.

    Args:
        query_rank: size of the queries' latent.
    """

    def __init__(self, config: TransformerConfig, sizes: IndexerSizes, query_rank: int) -> None:
        super().__init__()
        self.sizes = sizes
        options: dict[str, Any] = {"bias": False, "dtype": config.params_dtype}
        self.linear_wq_b = torch.nn.Linear(query_rank, sizes.query_size, **options)
        self.linear_wk = torch.nn.Linear(config.hidden_size, sizes.head_dim, **options)
        self.k_norm = torch.nn.LayerNorm(sizes.head_dim, eps=NORM_EPS, dtype=config.params_dtype)
        self.linear_weights_proj = torch.nn.Linear(config.hidden_size, sizes.heads, **options)
        self.requires_grad_(False)

    def forward(self, hidden_states: Tensor, query_latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, 1, h] and [t, 1, query rank] -> queries [t, heads, d] and keys [t, 1, d], which positions have not
        rotated yet, and weights [t, heads]."""
        query = self.linear_wq_b(query_latent).squeeze(1).unflatten(-1, (self.sizes.heads, -1))
        key = self.k_norm(self.linear_wk(hidden_states))
        return query, key, self.linear_weights_proj(hidden_states).squeeze(1)


class SparseAttention(PackedAttention):
    """Core attention whose queries see the keys with the ``index_topk`` largest scores of their past.

    Args:
        sizes: of the indexer.
        query_rank: size of the queries' latent.
        rotated: features of each of the indexer's heads that positions rotate.
        chooses: whether the layer has an indexer; otherwise it sees the keys that the layer before it sees.
        is_shared: whether the next layer sees the same keys.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        sizes: IndexerSizes,
        query_rank: int,
        rotated: int,
        chooses: bool,
        is_shared: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.sizes, self.rotated = sizes, rotated
        self.layer_number, self.is_shared = layer_number, is_shared
        self.indexer = Indexer(config, sizes, query_rank) if chooses else None

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden_states: Tensor,
        query_latent: Tensor,
        packed_seq_params: LocalPackedSequences,
    ) -> Tensor:
        """As ``PackedAttention``; the indexer reads ``hidden_states`` and ``query_latent``, of t / TP tokens with
        sequence parallelism."""
        packed = packed_seq_params
        assert packed.tree is None, "shared prefixes are refused before"
        if self.indexer is None:
            chosen = packed.key_choices[self.layer_number - 1]
        else:
            chosen = self._choose(self.indexer, hidden_states, query_latent, packed)
        if self.is_shared:
            packed.key_choices[self.layer_number] = chosen
        return super().forward(query, key, value, packed_seq_params=packed, chosen=chosen)

    @torch.no_grad()
    def _choose(
        self, indexer: Indexer, hidden_states: Tensor, query_latent: Tensor, packed: LocalPackedSequences
    ) -> tuple[KeyChoice, ...]:
        """The choice in each bucket. Tensor-parallel ranks compute the same one, of all tokens."""
        if all(_longest(bucket) <= self.sizes.index_topk for bucket in packed.buckets):
            return (None,) * len(packed.buckets)
        parts: tuple[Tensor, ...] = indexer(hidden_states, query_latent)
        if self.config.sequence_parallel:
            parts = tuple(gather_from_sequence_parallel_region(part.contiguous()) for part in parts)
        query, key, weights = parts
        assert packed.cos is not None and packed.sin is not None
        query, key = (rotate(self._in_halves(x), packed.cos, packed.sin).float() for x in (query, key))
        query = query * self.sizes.head_dim**-0.5
        weights = weights.float() * self.sizes.heads**-0.5
        if packed.cp_group is not None:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=packed.cp_group)
        first, key = 0, key.squeeze(1)
        choices: list[KeyChoice] = []
        for bucket in packed.buckets:
            queries = bucket.queries if isinstance(bucket, ContextBucket) else bucket
            own = slice(first, first := first + queries.tokens)
            if _longest(bucket) <= self.sizes.index_topk:
                choices.append(None)
                continue
            if isinstance(bucket, ContextBucket):
                keys = key.index_select(0, bucket.key_pad).unflatten(0, (-1, bucket.key_length))
                positions = bucket.query_positions
            else:
                keys = to_grid(key[own], bucket)
                positions = torch.arange(bucket.length, device=key.device).unsqueeze(0)
            choices.append(
                largest(
                    to_grid(query[own], queries), keys, to_grid(weights[own], queries), positions, self.sizes.index_topk
                )
            )
        return tuple(choices)

    def _in_halves(self, x: Tensor) -> Tensor:
        """The first features, which positions rotate, with those of a pair as far apart as ``rotate`` wants them."""
        if not self.sizes.interleaved:
            return x
        turned, plain = x.split([self.rotated, x.size(-1) - self.rotated], -1)
        return torch.cat([turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), plain], -1)


def largest(query: Tensor, key: Tensor, weights: Tensor, positions: Tensor, top_k: int) -> Tensor:
    """Which keys have the ``top_k`` largest scores among those that a query sees (equation 1 of the paper).

    Of equal scores those of earlier keys count as larger, so that the choice does not depend on the layout.

    Args:
        query, weights: float32 [B, L, heads, d] and [B, L, heads].
        key: float32 [B, K, d], at positions 0, 1, … of the same texts.
        positions: int64 [B or 1, L], of the queries.

    Returns:
        bool [B, L, K], without keys behind the query.
    """
    at_once = max(1, SCORES_AT_ONCE // (key.size(0) * key.size(1) * query.size(2)))
    numbers = torch.arange(key.size(1), device=key.device)
    chosen = []
    for q, w, place in zip(*(x.split(at_once, 1) for x in (query, weights, positions)), strict=True):
        scores = torch.einsum("blhd,bkd->blhk", q, key).relu_()
        scores = torch.matmul(w.unsqueeze(-2), scores).squeeze(-2)
        visible = numbers <= place.unsqueeze(-1)
        scores.masked_fill_(~visible, float("-inf"))
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        larger, equal = scores > least, scores == least
        room = top_k - larger.sum(-1, keepdim=True)
        chosen.append((larger | equal & (equal.cumsum(-1) <= room)) & visible)
    return torch.cat(chosen, 1)


def _longest(bucket: Bucket | ContextBucket) -> int:
    """Tokens of the bucket's longest text, with its padding."""
    return bucket.key_length if isinstance(bucket, ContextBucket) else bucket.length
