"""MXFP4, in which gpt-oss's experts are published: what the four bits stand for.

Thirty-two neighbours in a row share a power of two (OCP Microscaling Formats specification 1.0, section 5.3): an e8m0
byte s means 2^(s - 127).  Each of them is an e2m1 number: sign, two bits of exponent, one of mantissa.  Two lie in a
byte, the first one in its lower half.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Elements with one scale."""
BLOCK_BYTES = BLOCK // 2
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""How the names of the two tensors end that stand for one."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_NOT_A_NUMBER = 255


def unpack_e2m1(packed: Tensor) -> Tensor:
    """bfloat16 [..., 2 n] of uint8 [..., n]: the numbers that the halves of the bytes stand for; exact."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    # Both numbers of a byte are looked up as one of 32 bits, which takes a tenth of the time.
    result = pairs.view(torch.int32).flatten().index_select(0, packed.flatten().int())
    return result.view(torch.bfloat16).view(*packed.shape[:-1], -1)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., 32 n] of uint8 blocks [..., n, 16] and scales [..., n]; exact, but where 2^(s - 127) leaves
    bfloat16's range."""
    exponents = scales.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(unpack_e2m1(blocks), exponents).flatten(-2)


def power_of_two(scales: Tensor) -> Tensor:
    """float32 2^(s - 127) of e8m0 bytes s; NaN of 255, as the specification has it."""
    powers = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - _BIAS)
    return torch.where(scales == _NOT_A_NUMBER, torch.nan, powers)
