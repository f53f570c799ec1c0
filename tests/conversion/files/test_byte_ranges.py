"""Byte ranges arrive in order and whole, in the kernel or around it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conversion.files import byte_ranges
from conversion.files.byte_ranges import ByteRange, RangeCopier


def copied(ranges: list[ByteRange], target: Path, position: int) -> bytes:
    with open(target, "wb") as stream, RangeCopier() as copier:
        end = copier.copy(ranges, stream.fileno(), position)
    data = target.read_bytes()
    assert end == len(data) or not ranges
    return data[position:]


@pytest.mark.parametrize("in_kernel", [True, False])
@given(
    cuts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=8),
    position=st.integers(0, 100),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranges_end_to_end(tmp_path: Path, monkeypatch, in_kernel: bool, cuts, position: int) -> None:
    if not in_kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
        monkeypatch.setattr(byte_ranges, "_BLOCK", 700)
    sources = []
    for number in range(2):
        path = tmp_path / str(number)
        path.write_bytes(os.urandom(10_000))
        sources.append(path)
    ranges = [ByteRange(sources[source], offset, length) for source, offset, length in cuts]
    expected = b"".join(sources[source].read_bytes()[offset : offset + length] for source, offset, length in cuts)
    assert copied(ranges, tmp_path / "target", position) == expected


def refuse(*arguments: object) -> int:
    raise OSError(errno.EXDEV, "not between these file systems")


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_source_that_ends_early_is_named(tmp_path: Path, monkeypatch, in_kernel: bool) -> None:
    if not in_kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    (tmp_path / "short").write_bytes(b"x" * 10)
    with pytest.raises(OSError, match="short ends at byte 10, before 12"):
        copied([ByteRange(tmp_path / "short", 5, 7)], tmp_path / "target", 0)


def test_a_full_disk_is_no_reason_to_try_another_way(tmp_path: Path, monkeypatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    (tmp_path / "source").write_bytes(b"x")
    with pytest.raises(OSError, match="No space left"):
        copied([ByteRange(tmp_path / "source", 0, 1)], tmp_path / "target", 0)
