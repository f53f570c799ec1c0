"""How attention computes a packed micro-batch where Transformer Engine's does not: the pieces that the packer cuts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


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
    def block_mask(self) -> BlockMask:
        """For FlexAttention."""
        tokens, visible_until = self.visible_until.numel(), self.visible_until

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < visible_until[key])

        return create_block_mask(sees, None, None, tokens, tokens, device=str(visible_until.device))
