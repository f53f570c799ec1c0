"""Makes a CPU engine's numbers independent of its batches: a request gets the same bits whatever runs beside it.

Seeded sampling by itself does not repeat a run. Which requests share a forward pass depends on when they arrive, and a
matrix product of three rows adds up in another order than one of two hundred: the last bits of a logit change, and
sooner or later a token. SGLang's --enable-deterministic-inference exchanges GPU kernels for this; these are the CPU's.

- A matrix product is taken in blocks of ROWS rows, the last one filled with zeros, so that every row goes through the
  same kernel.
- Attention sees queries and keys padded to whole tiles of PyTorch's kernel: what a longer neighbour adds are tiles that
  are masked as a whole and leave sums as they are. So a prefix gives the same bits, computed or found in the cache.

Both hold only for one thread, which is what a CPU engine has (OMP_NUM_THREADS of its environment).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

ROWS = 16
KEY_TILE = 512
"""Keys that PyTorch's CPU attention takes at once."""

_library: torch.library.Library | None = None


def enable() -> None:
    """Exchange the matrix products of this process.

    Raises:
        RuntimeError: it computes with several threads, which share a product out by its number of rows.
    """
    global _library
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            f"a CPU engine with --enable-deterministic-inference computes with one thread, and this one has "
            f"{torch.get_num_threads()}: set OMP_NUM_THREADS=1 (--threads 1)"
        )
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("aten::mm", _mm, "CPU")
        _library.impl("aten::addmm", _addmm, "CPU")


def enabled() -> bool:
    """Whether the operators are replaced."""
    return _library is not None


def key_padding(longest: int) -> int:
    """Keys that fill up the last tile."""
    return -longest % KEY_TILE


def query_padding(length: int) -> int:
    """Queries that fill up the last tile; PyTorch's tiles have 32, from 192 queries on 64, and 256 from 768 on."""
    tile = 32 if length < 192 else 64 if length < 768 else 256
    return -length % tile


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left`` [M, K] @ ``right`` [K, N]."""
    rows = left.shape[0]
    missing = -rows % ROWS
    filled = pad(left, (0, 0, 0, missing)) if missing else left
    product = left.new_empty(rows + missing, right.shape[1])
    for block, out in zip(filled.split(ROWS), product.split(ROWS), strict=True):
        torch.mm(block, right, out=out)
    return product[:rows]


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = _mm(left, right)
    if alpha != 1:
        product = product * alpha
    return product + (bias if beta == 1 else bias * beta)
