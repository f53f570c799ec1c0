"""Checksums in COMPLETE: every flipped bit is found, wherever it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from conversion.files import checksums
from conversion.files.checksums import (
    COMPLETE_NAME,
    DamagedError,
    FilePart,
    FileRecord,
    file_record,
    find_faults,
    has_checksums,
    read_marker,
    verified_meanwhile,
    verify_files,
    write_marker,
)
from conversion.files.directory import new_directory
from tests.conversion.conftest import flip


def make(directory: Path) -> Path:
    """A checkpoint's shape: files, a folder of files, and a directory with a marker of its own."""
    (directory / "learner" / "hf").mkdir(parents=True)
    for name, size in (("learner/__0_0.distcp", 40_000), ("learner/hf/config.json", 300), ("state.json", 200)):
        (directory / name).write_bytes(random.Random(name).randbytes(size))
    (directory / "empty").touch()
    write_marker(directory / "learner")
    write_marker(directory)
    return directory


def test_every_flipped_bit_of_every_file_is_found(tmp_path: Path) -> None:
    directory = make(tmp_path / "global_step_2")
    generator = random.Random(0)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) == 5 and find_faults(directory) == []
    for path in files:
        before = path.read_bytes()
        for _ in range(60):
            flip(path, generator)
            assert [fault.path for fault in find_faults(directory)] == [path]
            path.write_bytes(before)
    assert find_faults(directory) == []


def test_any_bytes_of_the_marker_that_change_are_found(tmp_path: Path) -> None:
    directory = make(tmp_path / "export")
    marker = directory / COMPLETE_NAME
    before = marker.read_bytes()
    for position in range(len(before)):
        for value in (0, ord("\n"), ord(" "), before[position] ^ 1):
            if value != before[position]:
                marker.write_bytes(before[:position] + bytes([value]) + before[position + 1 :])
                assert [fault.path for fault in find_faults(directory)] == [marker], (position, value)
    for length in range(1, len(before)):
        marker.write_bytes(before[:length])
        assert [fault.path for fault in find_faults(directory)] == [marker] or length < 8, length


def test_what_is_said_of_each_damage(tmp_path: Path) -> None:
    directory = make(tmp_path / "export")
    data = directory / "learner" / "__0_0.distcp"
    before = data.read_bytes()
    for change, reason in (
        (before[:-1], "has 39999 bytes, and 40000 were written: it is cut short"),
        (before + b"x", "has 40001 bytes, and 40000 were written: something was added to it"),
        (b"x" + before[1:], "is damaged: its 40000 bytes are not those that were written"),
    ):
        data.write_bytes(change)
        with pytest.raises(DamagedError) as error:
            verify_files(directory)
        assert f"{data} {reason}. Make {directory} again" in str(error.value)
        assert f"megatron-retool check --renew {directory}" in str(error.value)
    data.unlink()
    assert str(find_faults(directory, contents=False)[0]) == f"{data} is missing"
    verify_files(directory, nested=False)
    # Renewed: the file that is gone is no part of it any more.
    write_marker(directory / "learner")
    write_marker(directory)
    verify_files(directory)


def test_a_model_s_directory_alone_is_held_against_the_checkpoint_s_marker(tmp_path: Path) -> None:
    directory = make(tmp_path / "global_step_2")
    (directory / "learner" / COMPLETE_NAME).write_text("")
    with pytest.raises(DamagedError, match=r"learner/COMPLETE has 0 bytes"):
        verify_files(directory / "learner")


def test_the_checkpoint_before_is_offered(tmp_path: Path) -> None:
    first, second, third = (make(tmp_path / f"global_step_{step}") for step in (2, 9, 10))
    (third / "learner" / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(DamagedError, match=f"trainer.resume_mode=resume_path trainer.resume_from_path={second}"):
        verify_files(third / "learner")
    (second / "state.json").unlink()
    with pytest.raises(DamagedError, match=f"trainer.resume_from_path={first}"):
        verify_files(third)
    (first / "state.json").unlink()
    with pytest.raises(DamagedError, match="there is none before it"):
        verify_files(first)


def test_the_work_is_shared_without_gap_or_overlap(tmp_path: Path) -> None:
    directory = make(tmp_path / "export")
    read: list[list[int]] = []
    for part in range(3):
        sizes: list[int] = []
        find_faults(directory, part=part, parts=3, on_bytes=sizes.append)
        read.append(sizes)
    whole: list[int] = []
    find_faults(directory, on_bytes=whole.append)
    assert sorted(size for sizes in read for size in sizes) == sorted(whole) and len(whole) == 5
    assert max(map(sum, read)) == 40_000


@pytest.mark.parametrize("content", ["", "\n", "done at noon\n"])
def test_markers_of_earlier_versions_are_accepted(tmp_path: Path, content: str) -> None:
    directory = make(tmp_path / "export")
    (directory / COMPLETE_NAME).write_text(content)
    (directory / "state.json").write_text("other")
    verify_files(directory)
    assert not has_checksums(directory)
    verify_files(tmp_path)  # none at all, as of what came from the hub


def test_a_file_in_parts_has_a_hash_for_each(tmp_path: Path) -> None:
    parts = tuple(FilePart(len(data), xxh3_128_hexdigest(data)) for data in (b"first", b"second"))
    (tmp_path / "a b").write_bytes(b"firstsecond")
    write_marker(tmp_path, {"a b": FileRecord(parts)})
    assert read_marker(tmp_path) == {"a b": FileRecord(parts)} and find_faults(tmp_path) == []
    for damaged in (b"Firstsecond", b"firstsecone"):
        (tmp_path / "a b").write_bytes(damaged)
        assert [str(fault) for fault in find_faults(tmp_path)] == [
            f"{tmp_path / 'a b'} is damaged: its 11 bytes are not those that were written"
        ]
    (tmp_path / "a b").write_bytes(b"firstsecond!")
    assert "11 were written" in str(find_faults(tmp_path)[0])


def test_damage_is_told_while_the_source_is_read_and_before_what_was_made_counts(tmp_path: Path, monkeypatch) -> None:
    directory = make(tmp_path / "export")
    monkeypatch.setattr(checksums, "_LARGE_BYTES", 1000)
    data = directory / "learner" / "__0_0.distcp"
    data.write_bytes(b"x" + data.read_bytes()[1:])
    with pytest.raises(DamagedError, match="is damaged"), verified_meanwhile(directory) as check:
        check(True)
    with pytest.raises(DamagedError, match="is damaged"), verified_meanwhile(directory):
        raise ValueError("what came of the damage")
    with pytest.raises(KeyError), verified_meanwhile(directory):
        raise KeyError
    with verified_meanwhile(directory, lambda path: path != data) as check:
        check(True)
    data.write_bytes(b"short")
    with pytest.raises(DamagedError, match="cut short"), verified_meanwhile(directory, lambda path: path != data):
        raise AssertionError("sizes come first")


def test_a_new_directory_has_them(tmp_path: Path) -> None:
    records: dict[str, FileRecord] = {}
    with new_directory(tmp_path / "made", records=records) as temporary:
        (temporary / "a").write_text("a")
        records["a"] = file_record(temporary / "a")
        (temporary / "b").write_text("b")
    assert has_checksums(tmp_path / "made") and find_faults(tmp_path / "made") == []
    (tmp_path / "made" / "c").write_text("came later")
    verify_files(tmp_path / "made")
