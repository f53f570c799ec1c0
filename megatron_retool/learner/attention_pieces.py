"""How attention computes a packed micro-batch where Transformer Engine's does not: the pieces that the packer cuts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK_TOKENS = 128
"""Tokens of a block of FlexAttention's mask, its default."""


KeyChoice = Tensor | None
"""Which keys each query of a bucket sees: bool [B, L, keys], without keys behind the query; None: all of its past."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length that attention treats as one padded batch [B, L].

    The bucket is a contiguous run of ``tokens`` packed tokens; buckets follow one another in the stream.  ``pad``
    [B * L] names, for every cell, the token of the run in it (any token in padding cells: causality keeps them from
    being seen, and their outputs are dropped); ``cells`` [tokens] holds the cell of each token.  None for both: all
    lengths are equal and the run is the batch.
    """

    tokens: int
    batch: int
    length: int
    pad: torch.Tensor | None
    cells: torch.Tensor | None


@dataclass(frozen=True)
class ContextBucket:
    """A bucket under context parallelism: local queries against keys gathered from all CP ranks.

    ``key_pad`` [B * key_length] names, in natural order, cells of the gathered key stream (CP rank after CP rank), and
    ``key_cells`` [CP, tokens of the bucket on a rank] the cell of [B * key_length] that has each of its tokens;
    ``query_positions`` [B, L] are the queries' positions in their sequences.
    """

    queries: Bucket
    key_length: int
    key_pad: torch.Tensor
    key_cells: torch.Tensor
    query_positions: torch.Tensor


@dataclass(frozen=True)
class SharedPrefixes:
    """What attention needs to know of a micro-batch's tree.

    Attributes:
        nodes: the tokens of each node, nodes of similar length together; see ``Bucket``.
        stems: (start, end, subtree_end) in the stream of every node with something below it.
        visible_until: int32 [t], the end of the subtree that each token's node is the root of.
    """

    nodes: tuple[Bucket, ...]
    stems: tuple[tuple[int, int, int], ...]
    visible_until: Tensor

    @functools.cached_property
    def key_places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where the keys of each token lie: token i sees places[starts[i]], ..., places[starts[i] + counts[i] - 1].

        int64 each; starts and counts [t]. Tokens of a node share what lies above it.
        """
        until = self.visible_until
        bounds = [0, *(torch.nonzero(until.diff()).squeeze(1) + 1).tolist(), until.numel()]
        above: list[tuple[int, int]] = []
        places, starts, counts, length = [], [], [], 0
        for start, end in itertools.pairwise(bounds):
            above = [each for each in above if until[each[0]] > start]
            path = [*above, (start, end)]
            places += [torch.arange(*each) for each in path]
            depth = sum(b - a for a, b in above)
            starts.append(torch.full((end - start,), length))
            counts.append(depth + torch.arange(1, end - start + 1))
            length += depth + end - start
            above = path
        return torch.cat(places), torch.cat(starts), torch.cat(counts)

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """For FlexAttention: what create_block_mask makes of ``sees``, without the bool [t, t] that it makes first."""
        tokens, visible_until = self.visible_until.numel(), self.visible_until

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < visible_until[key])

        count = -(-tokens // BLOCK_TOKENS)
        # No query sees a key that is not there.
        ends = F.pad(visible_until, (0, count * BLOCK_TOKENS - tokens)).view(count, BLOCK_TOKENS)
        first_query = torch.arange(count, device=visible_until.device).unsqueeze(1) * BLOCK_TOKENS
        # Queries of a later block come after all keys of an earlier one, so that its subtrees' ends decide; a block's
        # own keys are seen by those of its queries that follow them.
        earlier = torch.ones(count, count, dtype=torch.bool, device=visible_until.device).tril(-1)
        whole = earlier & (ends.amin(1) >= first_query + BLOCK_TOKENS)
        parts = earlier & (ends.amax(1) > first_query) & ~whole
        parts.fill_diagonal_(True)
        return BlockMask.from_kv_blocks(
            *_ordered(parts),
            *_ordered(whole),
            BLOCK_SIZE=BLOCK_TOKENS,
            mask_mod=sees,
            seq_lengths=(tokens, tokens),
        )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [n, n], by query and key -> int32 [1, 1, n] blocks of keys of a row, [1, 1, n, n] keys, these first."""
    chosen = blocks.to(torch.int32)[None, None]
    columns = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), columns.to(torch.int32)


_MASK_ALIGNMENT = 8
"""Elements that the strides of a GPU's mask have to be a multiple of (preprocess_mask of torch's attention.cpp), which
would copy it otherwise."""


def hidden_keys(visible: Tensor, like: Tensor) -> Tensor:
    """bool [..., queries, keys], which keys a query sees -> 0 or -inf, added to scores, in the dtype of ``like``.

    torch makes this of a bool mask in each call, and keeps one for each layer until the backward pass.
    """
    keys = visible.size(-1)
    wide = torch.zeros((*visible.shape[:-1], keys + -keys % _MASK_ALIGNMENT), dtype=like.dtype, device=like.device)
    return wide[..., :keys].masked_fill_(~visible, -torch.inf)
