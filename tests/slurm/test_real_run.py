"""The demo on two Slurm nodes, each with a learner rank, an engine and a sandbox: a power cut, requeue, resume."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_retool.runs.metrics_file import read_metrics
from tests.slurm.jobs import ROOT, SCRIPTS, job_environment
from tests.slurm.virtual_cluster import VirtualCluster

DEMO = ROOT / "configs" / "demo_cpu.yaml"
SANDBOX = "code_interpreter.server"
STEPS = 3


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo_data")
    sizes = ["pretrain_rows=8", "sft_rows=8", "sft_val_rows=4", "train_rows=64", "val_rows=4"]
    subprocess.run(
        [sys.executable, "-m", "megatron_retool", "make-demo", f"demo.directory={directory}",
         *(f"demo.{size}" for size in sizes)],
        cwd=ROOT, check=True, timeout=240,
    )  # fmt: skip
    return directory


@pytest.mark.rare
@pytest.mark.timeout(1800)
def test_demo_survives_the_loss_of_a_node(slurm: VirtualCluster, demo_data: Path, tmp_path: Path) -> None:
    # A reward that varies inside a group whatever the untrained model writes, so that every step has a gradient.
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(len(solution_str) % 2), 'acc': 0.0}\n"
    )
    overrides = [
        f"trainer.runs_dir={tmp_path}/runs", f"trainer.total_steps={STEPS}", "trainer.save_freq=1",
        "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.log_val_generations=0",
        "demo.enable=false", f"demo.directory={demo_data}",
        "data.train_batch_size=4", "learner.world_size=2", "learner.mini_batch_size=16", "rollout.engine.count=2",
        "rollout.train.n=8", "rollout.val.n=1", "algorithm.dynamic_sampling.enable=false",
        f"reward.function={reward}:compute_score", "weight_sync.method=distributed",
    ]  # fmt: skip
    submitted = slurm.run(
        ["bash", str(SCRIPTS / "submit.sh"), f"--config={DEMO}", "--nodes=2", *overrides],
        env={**job_environment(slurm), "OMP_NUM_THREADS": "1"},
    )
    job = submitted.stdout.split()[-1]
    run_dir = tmp_path / "runs" / "demo"
    output = run_dir / "logs" / f"slurm_{job}.out"
    try:
        _wait_for(run_dir / "checkpoints" / "global_step_1" / "COMPLETE", slurm, job, output)
        for node in slurm.nodes:
            processes = "\n".join(slurm.processes(node))
            assert processes.count("ray::LearnerWorker") == 1, f"{node}:\n{processes}"
            assert processes.count("ray::EngineWorker") == 1, f"{node}:\n{processes}"
            assert processes.count("ray::SandboxWorker") == 1, f"{node}:\n{processes}"
            assert "sglang" in processes and f"{SANDBOX} --die-with-parent --host {slurm.address(node)}" in processes

        slurm.kill_node("node2")
        slurm.run(["scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=power"])
        slurm.start_node("node2")
        slurm.wait_for_job(job, "COMPLETED", timeout=800)
    finally:
        slurm.run(["scancel", job], check=False)
        slurm.wait_for_idle()

    assert int(slurm.job(job)["Restarts"]) >= 1
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # Engines on both nodes serve the learner's weights, after each sync and after the restart.
    assert all(row["rollout_corr/log_prob_abs_diff"] < 1e-4 for row in rows)
    assert "resuming from" in output.read_text()
    # Ray colours its servers' last words, which sometimes still reach the driver, on whatever they are written to.
    own = [line for line in output.read_text().splitlines() if "(raylet)" not in line]
    assert not [line for line in own if "\x1b" in line], "the job's output has terminal codes"
    assert (run_dir / "checkpoints" / f"global_step_{STEPS}" / "COMPLETE").exists()
    for node in slurm.nodes:
        left = slurm.processes(node)
        assert not [line for line in left if "ray" in line or "sglang" in line or SANDBOX in line]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fine_tuning_with_a_rank_on_each_node(slurm: VirtualCluster, demo_data: Path, tmp_path: Path) -> None:
    stage = f"{{name: sft, train_files: [{demo_data}/sft.parquet], batch_size: 4, steps: 3, max_length: 256}}"
    overrides = [
        f"trainer.runs_dir={tmp_path}/runs", f"demo.directory={demo_data}", f"sft.stages=[{stage}]", "sft.log_freq=1",
        "learner.world_size=2",
    ]  # fmt: skip
    submitted = slurm.run(
        ["bash", str(SCRIPTS / "submit.sh"), "--sft", f"--config={DEMO}", "--nodes=2", *overrides],
        env={**job_environment(slurm), "OMP_NUM_THREADS": "1"},
    )
    job = submitted.stdout.split()[-1]
    run_dir = tmp_path / "runs" / "demo"
    try:
        slurm.wait_for_job(job, "COMPLETED", timeout=480)
    finally:
        slurm.run(["scancel", job], check=False)
        slurm.wait_for_idle()
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == [1, 2, 3]
    assert (run_dir / "checkpoints" / "global_step_3" / "COMPLETE").exists()


def _wait_for(path: Path, slurm: VirtualCluster, job: str, output: Path, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        state = slurm.job(job)["JobState"]
        over = state in ("COMPLETED", "FAILED", "CANCELLED") or time.monotonic() > deadline
        assert not over, f"{path} has not appeared, the job is {state}; its output:\n{output.read_text()}"
        time.sleep(0.2)
