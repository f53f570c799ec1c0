"""Targets of conversions: nothing that a conversion did not write is ever deleted, and leftovers of killed ones are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conversion import fp8_export
from conversion.files.directory import check_target, new_directory
from conversion.hf_to_mcore import convert
from conversion.mcore_to_hf import export

HOLD = """
import sys, time
from pathlib import Path
from conversion.files.directory import new_directory
with new_directory(Path(sys.argv[1]), overwrite=True) as temporary:
    (temporary / "weights").write_bytes(bytes(1000))
    print("writing", flush=True)
    time.sleep(600)
"""


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def make(directory: Path, **files: str) -> Path:
    with new_directory(directory) as temporary:
        for name, text in files.items():
            (temporary / name).write_text(text)
    return directory


@pytest.mark.parametrize("target", [".", "mcore/inside", "mcore/hf", "..", "link", "link/inside", "link/hf"])
def test_a_target_that_overlaps_the_source_is_refused(model_directory, tmp_path: Path, target: str) -> None:
    source, above = tmp_path / "above", tmp_path / "above" / "mcore"
    convert(model_directory("llama"), above, workers=1)
    (source / "COMPLETE").touch()
    (tmp_path / "link").symlink_to(above)
    place = {".": above, "..": source, "link": tmp_path / "link"}.get(target, tmp_path / target)
    if target.startswith("mcore"):
        place = source / target
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r"is read: choose another directory|is a symbolic link"):
        export(above, place, workers=1, overwrite=True)
    assert contents(tmp_path) == before


def test_every_converter_refuses_its_own_source(model_directory, tmp_path: Path, capsys) -> None:
    hf_dir, mcore_dir = tmp_path / "hf", tmp_path / "mcore"
    convert(model_directory("llama"), mcore_dir, workers=1)
    export(mcore_dir, hf_dir, workers=1)
    before = contents(tmp_path)
    for target in (hf_dir, hf_dir / "below"):
        with pytest.raises(FileExistsError, match="is read"):
            convert(hf_dir, target, workers=1, overwrite=True)
        with pytest.raises(FileExistsError, match="is read"):
            export(mcore_dir, target, hf_config_dir=hf_dir, workers=1, overwrite=True)
        with pytest.raises(FileExistsError, match="is read"):
            check_target(target, [hf_dir], overwrite=True)
    samples = tmp_path / "samples.txt"
    samples.write_text("w1 w2\n")
    arguments = ["--hf-dir", str(hf_dir), "--target", str(hf_dir), "--scheme", "per-tensor", "--overwrite"]
    assert fp8_export.main([*arguments, "--calibration", str(samples)]) == 1
    assert "is read" in capsys.readouterr().err
    samples.unlink()
    assert contents(tmp_path) == before


def test_a_source_whose_files_are_links_into_the_target(tmp_path: Path) -> None:
    target, source = make(tmp_path / "target", weights="1"), tmp_path / "source"
    source.mkdir()
    (source / "weights").symlink_to(target / "weights")
    with pytest.raises(FileExistsError, match="holds files of"):
        check_target(target, [source], overwrite=True)


def test_only_what_a_conversion_completed_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    check_target(target)
    (target / "thesis.tex").write_text("years")
    for overwrite, message in ((False, "exists and is not empty"), (True, "has no COMPLETE marker")):
        with pytest.raises(FileExistsError, match=message):
            make_again(target, overwrite)
    (target / "COMPLETE").touch()
    make_again(target, True)
    assert not (target / "thesis.tex").exists()
    for name in ("global_step_3", "global_step_3/learner"):
        checkpoint = tmp_path / name
        (tmp_path / "global_step_3" / "learner").mkdir(parents=True, exist_ok=True)
        (checkpoint / "COMPLETE").touch()
        with pytest.raises(FileExistsError, match="is a checkpoint of training"):
            make_again(checkpoint, True)
    with pytest.raises(FileExistsError, match="is a file"):
        make_again(target / "COMPLETE", True)


def make_again(target: Path, overwrite: bool) -> None:
    with new_directory(target, overwrite=overwrite):
        pass


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_is_refused_by_name(tmp_path: Path, there: bool) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    if there:
        make(real)
    link.symlink_to(real)
    with pytest.raises(FileExistsError, match=f"link is a symbolic link to {real}"):
        make_again(link, True)
    assert link.is_symlink() and real.exists() == there


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    target = make(tmp_path / "target", weights="old")
    others = tmp_path / ".target.mine.incomplete"
    others.mkdir()
    processes = [subprocess.Popen([sys.executable, "-c", HOLD, target], stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    assert len(list(tmp_path.glob(".target.????????.incomplete"))) == 2
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    make_again(target, True)
    assert len(list(tmp_path.glob(".target.????????.incomplete"))) == 1, "the other one still runs"
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    make_again(target, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, "target"]


def test_what_a_killed_conversion_moved_away_is_put_back(tmp_path: Path) -> None:
    target = make(tmp_path / "target", weights="old")
    os.rename(target, tmp_path / ".target.abcdefgh.incomplete.replaced")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        make_again(target, False)
    assert (target / "weights").read_text() == "old"
