"""metrics.jsonl with damage: what readers leave out, and what a resume keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.metrics_file import drop_rows_from, read_metrics
from run_files.metrics import read_metrics_and_problems

DAMAGE = {
    "cut": b'{"step": 3, "v',
    "zeros": b"\0" * 20,
    "no_utf8": b'{"step": 3, "v": "\xff"}',
    "null": b"null",
    "list": b"[3]",
    "no_step": b'{"v": 3}',
    "step_as_text": b'{"step": "3"}',
    "blank": b"",
    "nested": b"[" * 100_000,
    "many_digits": b'{"step": ' + b"9" * 10_000 + b"}",
}


def written(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_costs_no_other_row(tmp_path: Path, damage: bytes) -> None:
    rows = [json.dumps({"step": step}).encode() for step in range(11)]
    rows[3] = damage
    path = written(tmp_path / "metrics.jsonl", rows)
    said = drop_rows_from(path, 9)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert len(said) == 1 and f"{path}, line 4" in said[0]
    assert damage in path.read_bytes().split(b"\n")


def test_rows_out_of_order_are_told_by_their_step(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", [b'{"step": %d}' % step for step in (0, 1, 2, 5, 2, 3, 6, 4)])
    drop_rows_from(path, 5)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 2, 3, 4]


def test_a_last_row_without_a_line_break_stays_and_half_of_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}')
    assert drop_rows_from(path, 5) == []
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    assert len(drop_rows_from(path, 5)) == 1
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'


def test_zeros_before_a_row_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", [b'{"step": 0}', b'\0\0{"step": 1}'])
    assert read_metrics_and_problems(path) == ([{"step": 0}, {"step": 1}], [])


def test_a_table_keeps_its_sound_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"step,v\n0,1.0\n1,\xff\n2,1.0\n3,1.0\n")
    with MetricLogger(tmp_path, ["csv"], first_step=3) as log:
        log.log(3, {"v": 2.0, "w": 1.0})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,v,w", "0,1.0,", "2,1.0,", "3,2.0,1.0"]
