"""``megatron-retool check``: a sound run, and every kind of damage to one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from conversion.files.directory import new_directory
from conversion.files.dist_checkpoint import ChunkWriter, write_metadata
from conversion.model.weight_map import CheckpointPlace
from megatron_retool.commands.command_line import parse
from megatron_retool.config import ConfigError
from megatron_retool.data.files import write_parquet
from megatron_retool.runs.checkpoints import checkpoint_workspace, publish_checkpoint, seal_checkpoint
from tests.conversion.conftest import flip


def learner_state(directory: Path) -> None:
    with new_directory(directory) as temporary:
        with ChunkWriter(temporary, "__0_0.distcp") as writer:
            writer.write(CheckpointPlace("weight", (), ()), (40, 8), (0, 0), torch.arange(320.0).view(40, 8))
        write_metadata(temporary, writer.chunks, {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with one of each: checkpoints, export, rollouts, metrics."""
    directory = tmp_path / "runs" / "r"
    for step in (1, 3):
        workspace = checkpoint_workspace(directory, step)
        learner_state(workspace / "learner")
        seal_checkpoint(workspace, {"trainer_state.json": {"step": step}})
        publish_checkpoint(workspace, step)
    with new_directory(directory / "export") as temporary:
        save_file({"weight": torch.arange(64.0)}, temporary / "model.safetensors")
        (temporary / "config.json").write_text("{}")
    (directory / "rollouts").mkdir()
    for step in (1, 2, 3):
        rows = {"text": [f"answer {n} of step {step}" for n in range(50)], "reward": [n / 7 for n in range(50)]}
        write_parquet(directory / "rollouts" / f"step_{step:06d}.parquet", pa.table(rows))
    rows_of_metrics = [json.dumps({"step": step, "loss": 0.5}) for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("\n".join(rows_of_metrics) + "\n")
    return directory


def checked(*arguments: object, width: int = 80) -> tuple[int, str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    run, options = parse(["check", *(str(argument) for argument in arguments)])
    code = run(options, console)
    return code, console.export_text()


def test_a_sound_run(run: Path) -> None:
    code, text = checked(run)
    assert code == 0, text
    for word in ("checkpoints/global_step_1", "checkpoints/global_step_3", "export", "rollouts/*.parquet", "3 rows"):
        assert word in text
    assert text.count("│ sound") == 5 and all(len(line) <= 80 for line in text.splitlines())


def test_a_flipped_bit_in_each_file_is_named(run: Path) -> None:
    generator = random.Random(0)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "metrics.jsonl"]
    assert {path.suffix for path in files} >= {".distcp", ".safetensors", ".parquet", ".json", ".pt", ""}
    for path in files:
        before = path.read_bytes()
        if path.suffix == ".parquet":
            # The end of a page of values: pages have checksums, what lies around them has not.
            column = pq.read_metadata(path).row_group(0).column(0)
            first = column.dictionary_page_offset or column.data_page_offset
            position = first + column.total_compressed_size - generator.randrange(9, 30)
            path.write_bytes(before[:position] + bytes([before[position] ^ 4]) + before[position + 1 :])
        else:
            flip(path, generator)
        code, text = checked(run, width=400)
        assert code == 1 and str(path) in text and text.count("1 fault") == 1, text
        path.write_bytes(before)
    assert checked(run)[0] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-5], "the last row is cut off"),
        (lambda text: text + text.splitlines()[2] + "\n", "line 4 is of step 3 again, after step 3"),
        (lambda text: text.replace('"step": 2', '"stop": 2'), "line 2 is no row of a step"),
        (lambda text: "".join(text.splitlines(keepends=True)[::2]), "rows between are missing"),
    ],
)
def test_rows_of_metrics(run: Path, change, said: str) -> None:
    path = run / "metrics.jsonl"
    path.write_text(change(path.read_text()))
    code, text = checked(run, width=400)
    assert code == 1 and f"{path}: " in text and said in text


def test_single_directories(run: Path) -> None:
    for directory in (run / "export", run / "checkpoints" / "global_step_3", run / "checkpoints/global_step_3/learner"):
        code, text = checked(directory)
        assert code == 0 and text.count("│ sound") == 1
    assert checked(run / "export", run / "checkpoints")[0] == 0
    with pytest.raises(ConfigError, match="is no directory: give a run"):
        checked(run / "nothing")
    (run / "empty").mkdir()
    assert checked(run / "empty")[0] == 1


def test_directories_without_checksums_are_looked_at(run: Path) -> None:
    checkpoint = run / "checkpoints" / "global_step_3"
    for marker in (checkpoint / "COMPLETE", checkpoint / "learner" / "COMPLETE", run / "export" / "COMPLETE"):
        marker.write_text("")
    code, text = checked(run)
    assert code == 0 and text.count("headers; it") == 2
    for path in (checkpoint / "learner" / "__0_0.distcp", run / "export" / "model.safetensors"):
        path.write_bytes(path.read_bytes()[:-40])
    (checkpoint.parent / "global_step_5").mkdir()
    code, text = checked(run, width=400)
    assert code == 1 and text.count("cut short") == 2 and "incomplete" in text


def test_renewing_after_a_change_on_purpose(run: Path) -> None:
    weights = run / "export" / "model.safetensors"
    save_file({"weight": torch.zeros(64)}, weights)
    code, text = checked(run / "export", width=400)
    assert code == 1 and f"{weights} is damaged" in text
    assert checked("--renew", run / "export")[0] == 0 and checked(run / "export")[0] == 0
    checkpoint = run / "checkpoints" / "global_step_1"
    (checkpoint / "learner" / "common.pt").write_text("other")
    with pytest.raises(ValueError, match="is a part of .*global_step_1: renew that"):
        checked("--renew", checkpoint / "learner")
    assert checked("--renew", checkpoint)[0] == 0 and checked(run)[0] == 0
    with pytest.raises(ValueError, match="nothing was renewed"):
        checked("--renew", run)
