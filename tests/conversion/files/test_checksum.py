"""The checksum notices every change that a weight transfer could make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conversion.files import checksum
from conversion.files.checksum import tensor_checksum


@given(count=st.integers(1, 40), data=st.data(), dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
@settings(max_examples=60, deadline=None)
def test_every_bit_counts(count: int, data: st.DataObject, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    before = tensor_checksum(raw.view(dtype))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_checksum(raw.view(dtype)) != before


def test_order_shape_and_dtype_count_and_strides_do_not() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    reference = tensor_checksum(tensor)
    assert len(reference) == 16 and reference == tensor_checksum(tensor.clone())
    assert reference == tensor_checksum(tensor.t().contiguous().t())
    swapped = tensor.clone()
    swapped[[0, 3]] = swapped[[3, 0]]
    for other in (tensor.view(6, 4), tensor.double(), tensor.view(torch.int32), swapped, tensor.flip(0)):
        assert tensor_checksum(other) != reference
    assert tensor_checksum(torch.zeros(0)) != tensor_checksum(torch.zeros(1))
    assert tensor_checksum(torch.tensor(1.0)) != tensor_checksum(torch.tensor([1.0]))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1003)
    whole = tensor_checksum(tensor)
    monkeypatch.setattr(checksum, "_CHUNK_WORDS", 7)
    assert tensor_checksum(tensor) == whole
