"""Runs whose files are damaged: what reports refuse, what they leave out and say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_retool.__main__ import main
from tests.bad_inputs.conftest import Refused
from tests.viewer.two_runs import make_run

ROOT = Path(__file__).parents[2]
STEP = "rollouts/step_000002.parquet"
LEARNER = "rollouts/step_000002.learner.parquet"


def damaged(run_dir: Path, name: str, content: bytes | None) -> Path:
    """A run whose file ``name`` has other content; None: it is a directory."""
    make_run(run_dir)
    path = run_dir / name
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    return run_dir


REFUSED = [
    ("report", "metrics.jsonl", b"\x00\xff not json\n", "metrics.jsonl has no rows", "line 1 is no JSON object"),
    ("report", "metrics.jsonl", None, "metrics.jsonl is a directory"),
    ("diff intact", "metrics.jsonl", b"", "metrics.jsonl has no rows"),
    ("diff intact", "config.yaml", b"- 1\n", "config.yaml is no mapping"),
    ("report mismatch", "config.yaml", b"- 1\n", "config.yaml is no mapping"),
    ("report mismatch", "config.yaml", b"{", "config.yaml cannot be read"),
    ("report mismatch", STEP, b"PAR1", "step_000002.parquet: cannot be read"),
    ("report mismatch", LEARNER, b"", "step_000002.learner.parquet: cannot be read"),
    ("report referee", "config.yaml", b"- 1\n", "config.yaml must hold a mapping"),
    ("view --text", STEP, None, "step_000002.parquet: cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=[f"{case[0]} {case[1]} {case[2]}" for case in REFUSED])
def test_refused(case: tuple[str, str, bytes | None, str], refused: Refused, tmp_path: Path) -> None:
    command, name, content, *words = case
    make_run(tmp_path / "intact")
    damaged(tmp_path / "run", name, content)
    refused(f"{command} run", *words)


@pytest.mark.parametrize("case", REFUSED, ids=[f"{case[0]} {case[1]} {case[2]}" for case in REFUSED])
def test_refused_before_torch_is_loaded(case: tuple[str, str, bytes | None, str], tmp_path: Path) -> None:
    command, name, content, *words = case
    make_run(tmp_path / "intact")
    damaged(tmp_path / "run", name, content)
    script = "import sys; from megatron_retool.__main__ import main; status = main()\nsys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split(), "run"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120,
    )  # fmt: skip
    assert words[0] in done.stdout and done.returncode == 0, done.stdout + done.stderr


LEFT_OUT = [
    ("metrics.jsonl", b'{"step": 1, "rollout/acc/mean": "high", "actor/entropy": 2.0}\n', "rollout/acc/mean is no num"),
    ("metrics.jsonl", b'{"step": 1, "actor/entropy": 2.0}\n{"st', "line 2 is no JSON object"),
    (STEP, b"PAR1", "step_000002.parquet: cannot be read"),
    (LEARNER, b"PAR1", "step_000002.learner.parquet"),
    ("config.yaml", b"- 1\n", "config.yaml cannot be read: it is no mapping"),
]


@pytest.mark.parametrize("case", LEFT_OUT, ids=[f"{case[0]} {case[1]!r}" for case in LEFT_OUT])
def test_a_report_says_what_it_leaves_out(
    case: tuple[str, bytes, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, content, words = case
    monkeypatch.setenv("COLUMNS", "300")
    run_dir = damaged(tmp_path / "run", name, content)
    assert main(["report", str(run_dir)]) == 0
    wrote, *left_out = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {run_dir}/report/index.html"
    assert [line for line in left_out if line.startswith("note: ") and words in line], left_out
    shutil.rmtree(run_dir)
    make_run(run_dir)
    assert main(["report", str(run_dir)]) == 0
    assert words not in capsys.readouterr().out


def test_an_exported_page_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = damaged(tmp_path / "run", STEP, b"PAR1")
    assert main(["view", str(run_dir), "--export", str(tmp_path / "page.html")]) == 0
    assert "note: " in (told := capsys.readouterr().out) and "step_000002.parquet: cannot be read" in told
