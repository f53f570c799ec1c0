"""The doctor on this host, as a user calls it; and its Slurm script."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron_retool.commands import doctor as command
from megatron_retool.config import ConfigError
from megatron_retool.parity.doctor.catalogue import STEPS
from megatron_retool.parity.doctor.node_steps import least_bandwidth
from megatron_retool.parity.doctor.outcome import StepVerdict
from megatron_retool.parity.doctor.report import DoctorReport
from megatron_retool.parity.doctor.run import examine
from megatron_retool.ports import free_port

ROOT = Path(__file__).parents[3]
NEED_GPUS = {
    "driver", "kernels_transformer_engine", "kernels_flash_attn", "kernels_apex", "learner_fp8_tensorwise",
    "learner_fp8_blockwise", "learner_fp8_parameters", "learner_fp8_mxfp8", "learner_nvfp4", "preload",
    "kernels_sglang", "engine_dense",
    "engine_fp8", "sleep_wake", "demo", "collectives_between_nodes",
}  # fmt: skip


@pytest.mark.rare
def test_every_step_that_a_cpu_host_allows_passes(tmp_path):
    command = [sys.executable, "-m", "megatron_retool", "doctor", "--gpus", "0", "--output", str(tmp_path / "d.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = DoctorReport.read(tmp_path / "d.json")
    assert [outcome.step for outcome in report.outcomes] == [step.name for step in STEPS]
    skipped = {outcome.step for outcome in report.outcomes if outcome.verdict is StepVerdict.SKIPPED}
    assert skipped == NEED_GPUS and not report.failed
    assert all(outcome.reason for outcome in report.outcomes if outcome.step in skipped)
    figures = {outcome.step: len(outcome.figures) for outcome in report.outcomes if outcome.step not in skipped}
    assert min(figures.values()) > 0
    assert str(ROOT) not in (tmp_path / "d.json").read_text() and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]


def test_the_exit_status_tells_of_a_failure_and_the_report_is_there(tmp_path, monkeypatch):
    """A GPU that is asked for and not there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output = io.StringIO()
    asked = ["driver", "kernels_torch"]
    assert examine(1, asked, tmp_path / "d.json", tmp_path / "kept", Console(file=output, width=200)) == 1
    text = output.getvalue()
    assert "GPUs of torch: 0 (at least 1)" in text and "cure: nvidia-smi has to work" in text
    found = json.loads((tmp_path / "d.json").read_text())
    assert [step["verdict"] for step in found["steps"]] == ["fail", "pass"] and found["verdict"] == "fail"
    assert (tmp_path / "kept" / "driver.log").exists()
    with pytest.raises(FileExistsError, match="--keep"):
        examine(1, asked, tmp_path / "d.json", tmp_path / "kept", Console())


def test_slurm_runs_it_on_each_node_with_a_report_of_its_own(tmp_path):
    programs = {
        "scontrol": '[[ "$2" == hostnames ]] || exec echo NodeName=node1 NodeAddr=10.0.0.1; echo node1; echo node2',
        # The command behind srun's options, once for each task.
        "srun": 'while [[ "$1" == --* ]]; do shift; done\nfor n in 0 1; do SLURM_PROCID=$n "$@"; done',
        "venv/bin/python": f"""
            [[ "$*" != *cluster.network* ]] || {{ echo 10.0.0.9 ib0 4000; exit; }}
            echo "$@" "$NCCL_SOCKET_IFNAME" >>{tmp_path}/calls
        """,
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
    together = "--rendezvous 10.0.0.1:20007 --gpus 8 ib0"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"-m megatron_retool doctor --output {out}/d.json --nodes 2 --node-rank 0 {together}",
        f"-m megatron_retool doctor --output {out}/d.1.json --nodes 2 --node-rank 1 {together}",
    ]


@pytest.mark.slow
def test_the_network_is_measured_by_doctors_on_each_node(tmp_path, monkeypatch):
    """Two on this host, one rank each, as two nodes would."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    port = free_port("127.0.0.1")
    call = [sys.executable, "-m", "megatron_retool", "doctor", "--steps", "collectives_between_nodes"]
    together = ["--gpus", "0", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
    doctors = [
        subprocess.Popen(
            [*call, *together, "--node-rank", str(rank), "--output", str(tmp_path / f"{rank}.json")], cwd=ROOT
        )
        for rank in range(2)
    ]
    assert [doctor.wait(120) for doctor in doctors] == [0, 0]
    for rank in range(2):
        (outcome,) = DoctorReport.read(tmp_path / f"{rank}.json").outcomes
        found = {figure.name: figure.value for figure in outcome.figures}
        assert (found["nodes"], found["ranks on each"]) == (2, 1)
        for operation in ("all_reduce", "all_gather"):
            assert found[f"{operation} between ranks of equal number: ranks with the right values"] == 2
            assert found[f"{operation} between ranks of equal number: a link carries"] > 0


def test_a_link_between_nodes_has_a_bound_where_the_gpu_is_known():
    assert least_bandwidth("NVIDIA H100 80GB HBM3") == pytest.approx(10)
    assert least_bandwidth("NVIDIA L40S") is None and least_bandwidth(None) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "2"], "--node-rank, --rendezvous: "),
        (["--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1"], "2 nodes have the numbers 0 to 1"),
        (["--nodes", "2", "--node-rank", "0", "--rendezvous", "node1"], "HOST:PORT"),
        (["--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "--slurm"], "leave out --nodes"),
    ],
)
def test_what_does_not_make_a_group_of_nodes_is_refused(options, said):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match=said):
        command.run(parser.parse_args(options), Console(file=io.StringIO()))
