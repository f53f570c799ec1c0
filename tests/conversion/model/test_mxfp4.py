"""MXFP4, bit for bit against transformers."""

from __future__ import annotations

import pytest
import torch

from conversion.model.mxfp4 import dequantize_mxfp4


@pytest.mark.parametrize("seed", range(3))
def test_it_is_transformers(seed: int) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (3, 70, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(256, (3, 70, 2), dtype=torch.uint8, generator=generator)
    scales.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)  # every scale there is
    expected = convert_moe_packed_tensors(blocks, scales)
    found = dequantize_mxfp4(blocks, scales).transpose(1, 2).contiguous()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_values() -> None:
    block = torch.zeros(1, 16, dtype=torch.uint8)
    block[0, :3] = torch.tensor([0x21, 0x7F, 0x98])  # 1, 2; -6, 6; -0, -0.5
    found = dequantize_mxfp4(block, torch.tensor([128], dtype=torch.uint8))
    assert found[:6].tolist() == [1.0, 2.0, -12.0, 12.0, 0.0, -1.0] and not found[6:].any()
