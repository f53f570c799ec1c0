"""Spans: what is written is what was given, wherever its pieces begin, and its hash is that of the bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from conversion.files import spans
from conversion.files.checksums import FilePart
from conversion.files.spans import SpanWriter, read_into


@given(pieces=st.lists(st.binary(max_size=300), max_size=8), position=st.integers(0, 50))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_follow_each_other(tmp_path: Path, monkeypatch, pieces: list[bytes], position: int) -> None:
    monkeypatch.setattr(spans, "_WRITE_BACK_BYTES", 200)
    path, whole = tmp_path / "target", b"".join(pieces)
    path.write_bytes(b"." * 3000)
    descriptor = os.open(path, os.O_WRONLY)
    writer = SpanWriter(descriptor, position)
    for piece in pieces:
        writer.write(piece)
    os.close(descriptor)
    assert writer.part == FilePart(len(whole), xxh3_128_hexdigest(whole))
    assert path.read_bytes() == b"." * position + whole + b"." * (3000 - position - len(whole))


def test_a_source_that_ends_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 10)
    out = torch.empty(7, dtype=torch.uint8)
    read_into(out, tmp_path / "short", 3)
    assert bytes(out.tolist()) == b"x" * 7
    with pytest.raises(EOFError, match="short ends at byte 10, before 12"):
        read_into(out, tmp_path / "short", 5)
