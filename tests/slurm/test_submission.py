"""submit.sh and interactive.sh: what they refuse, what they ask Slurm for."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.slurm.jobs import ROOT, SCRIPTS, job_environment
from tests.slurm.virtual_cluster import VirtualCluster

TWO_NODES = ROOT / "configs" / "retool_qwen3_30b_a3b_2x8h100.yaml"
ONE_NODE = ROOT / "configs" / "retool_qwen2.5_32b_8xh200.yaml"
DEMO = ROOT / "configs" / "demo_cpu.yaml"


def submit(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / "submit.sh"), *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def sbatch_command(*arguments: str | Path) -> list[str]:
    result = submit("--dry-run", *arguments)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout.splitlines()[-1])


def test_configuration_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    result = submit("--config", TWO_NODES, "--nodes", "1", f"trainer.runs_dir={tmp_path}")
    assert result.returncode == 1
    assert "16 GPUs are needed, the allocation has 1 nodes x 8 = 8" in result.stderr
    assert "--nodes 2" in result.stderr
    assert not list(tmp_path.iterdir())


def test_sbatch_is_asked_for_what_the_configuration_needs(tmp_path: Path) -> None:
    command = sbatch_command(
        "--config", TWO_NODES, "--partition=h100", "--time=24:00:00", f"trainer.runs_dir={tmp_path}", "trainer.seed=7"
    )
    run_dir = tmp_path / "retool_qwen3_30b_a3b"
    script = command.index(str(SCRIPTS / "train_dapo_megatron.sbatch"))
    assert command[0] == "sbatch"
    assert {"--nodes=2", "--gpus-per-node=8", f"--chdir={ROOT}", f"--output={run_dir}/logs/slurm_%j.out"} <= set(
        command[:script]
    )
    assert command[script - 2 : script] == ["--partition=h100", "--time=24:00:00"]
    assert command[script + 1 :] == ["--config", str(TWO_NODES), f"trainer.runs_dir={tmp_path}", "trainer.seed=7"]


def test_own_gpu_options_of_a_cluster() -> None:
    assert "--gpus-per-node=h100:8" in sbatch_command("--config", TWO_NODES, "--gpus-per-node=h100:8")
    with_gres = sbatch_command("--config", TWO_NODES, "--gres=gpu:8")
    assert "--gres=gpu:8" in with_gres
    assert not [word for word in with_gres if word.startswith("--gpus-per-node")]


def test_fine_tuning_counts_the_learner_alone() -> None:
    command = sbatch_command("--config", ONE_NODE, "--sft", "--nodes", "1", "cluster.placement=disaggregated")
    assert str(SCRIPTS / "train_sft_megatron.sbatch") in command
    assert submit("--config", ONE_NODE, "--dry-run", "cluster.placement=disaggregated").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--config", DEMO, "--partition", "h100"], "--option=value"),
        (["--config", DEMO, "-p", "h100"], "--option=value"),
        (["--config", DEMO, "trainer.sed=1"], "trainer.seed"),
        (["--config", DEMO, "--", "bash"], "interactive.sh"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str | Path], message: str) -> None:
    result = submit(*arguments)
    assert result.returncode == 1
    assert message in result.stderr


def test_submitted_job_is_in_the_queue(slurm: VirtualCluster, tmp_path: Path) -> None:
    arguments = ["--config", DEMO, "--nodes", "2", "--hold", f"trainer.runs_dir={tmp_path}"]
    result = slurm.run(["bash", str(SCRIPTS / "submit.sh"), *map(str, arguments)], env=job_environment(slurm))
    identity = result.stdout.split()[-1]
    job = slurm.job(identity)
    slurm.run(["scancel", identity])
    assert (job["JobName"], job["NumNodes"], job["Requeue"]) == ("demo", "2-2", "1")
    assert job["StdOut"] == str(tmp_path / "demo" / "logs" / f"slurm_{identity}.out")


@pytest.mark.slow
def test_interactive_command_sees_all_nodes(slurm: VirtualCluster, tmp_path: Path) -> None:
    script = "import ray, socket; ray.init(address='auto'); print('at', socket.gethostname(), len(ray.nodes()))"
    arguments = ["--config", DEMO, "--nodes", "2", f"trainer.runs_dir={tmp_path}", "--", "python", "-c", script]
    result = slurm.run(
        ["bash", str(SCRIPTS / "interactive.sh"), *map(str, arguments)], env=job_environment(slurm), timeout=240
    )
    assert "at node1 2" in result.stdout
    for node in slurm.nodes:
        assert not [line for line in slurm.processes(node) if "raylet" in line]


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.iterdir()))
def test_bash_syntax(script: str) -> None:
    result = subprocess.run(["bash", "-n", str(SCRIPTS / script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
