"""The doctor on this host, as a user calls it; and its Slurm script."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron_retool.doctor.catalogue import STEPS
from megatron_retool.doctor.outcome import Verdict
from megatron_retool.doctor.report import Report
from megatron_retool.doctor.run import examine

ROOT = Path(__file__).parents[2]
NEED_GPUS = {
    "driver", "kernels_transformer_engine", "kernels_flash_attn", "kernels_apex", "learner_fp8_tensorwise",
    "learner_fp8_blockwise", "learner_fp8_mxfp8", "engine_dense", "sleep_wake", "demo",
}  # fmt: skip


@pytest.mark.slow
def test_every_step_that_a_cpu_host_allows_passes(tmp_path):
    command = [sys.executable, "-m", "megatron_retool", "doctor", "--gpus", "0", "--output", str(tmp_path / "d.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.read(tmp_path / "d.json")
    assert [outcome.step for outcome in report.outcomes] == [step.name for step in STEPS]
    skipped = {outcome.step for outcome in report.outcomes if outcome.verdict is Verdict.SKIPPED}
    assert skipped == NEED_GPUS and not report.failed
    assert all(outcome.reason for outcome in report.outcomes if outcome.step in skipped)
    figures = {outcome.step: len(outcome.figures) for outcome in report.outcomes if outcome.step not in skipped}
    assert min(figures.values()) > 0
    assert str(ROOT) not in (tmp_path / "d.json").read_text() and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]


def test_the_exit_status_tells_of_a_failure_and_the_report_is_there(tmp_path, monkeypatch):
    """A GPU that is asked for and not there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    console = Console(file=io.StringIO(), width=200)
    asked = ["driver", "kernels_torch"]
    assert examine(1, asked, tmp_path / "d.json", tmp_path / "kept", console) == 1
    text = console.file.getvalue()
    assert "GPUs of torch: 0 (at least 1)" in text and "cure: nvidia-smi has to work" in text
    found = json.loads((tmp_path / "d.json").read_text())
    assert [step["verdict"] for step in found["steps"]] == ["fail", "pass"] and found["verdict"] == "fail"
    assert (tmp_path / "kept" / "driver.log").exists()
    with pytest.raises(FileExistsError, match="--keep"):
        examine(1, asked, tmp_path / "d.json", tmp_path / "kept", console)


def test_slurm_runs_it_on_each_node_with_a_report_of_its_own(tmp_path):
    programs = {
        "scontrol": "echo node1; echo node2",
        # The command behind srun's options, once for each task.
        "srun": 'while [[ "$1" == --* ]]; do shift; done\nfor n in 0 1; do SLURM_PROCID=$n "$@"; done',
        "venv/bin/python": f'echo "$@" >>{tmp_path}/calls',
    }
    for name, script in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.defpath}",
        "MEGATRON_RETOOL_ROOT": str(ROOT),
        "MEGATRON_RETOOL_VENV": str(tmp_path / "venv"),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "7",
    }
    script = ROOT / "scripts" / "slurm" / "doctor.sbatch"
    command = ["bash", str(script), str(tmp_path / "out" / "d.json"), "--gpus", "8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"-m megatron_retool doctor --output {out}/d.json --gpus 8",
        f"-m megatron_retool doctor --output {out}/d.1.json --gpus 8",
    ]
