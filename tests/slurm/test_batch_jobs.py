"""The batch scripts on a real Slurm of two nodes, with a stub in the driver's place."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import ROOT, Submitter
from tests.slurm.virtual_cluster import VirtualCluster


def test_ranks_spread_over_nodes(slurm: VirtualCluster, submit: Submitter) -> None:
    job = submit("ends well")
    job.wait("COMPLETED")
    records = [job.record(start=0, rank=rank) for rank in (0, 1)]
    assert [record["host"] for record in records] == ["node1", "node2"]
    assert {record["directory"] for record in records} == {str(ROOT)}
    assert not any(record["terminal"] for record in records), "progress lines would fill the job's output"
    for rank, environment in enumerate(record["environment"] for record in records):
        assert environment["RANK"] == str(rank)
        assert environment["LOCAL_RANK"] == "0"
        assert environment["WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == slurm.address("node1")
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
        assert environment["NCCL_DEBUG"] == "WARN"
    assert records[0]["environment"]["MASTER_PORT"] == records[1]["environment"]["MASTER_PORT"]
    assert records[0]["arguments"][-2:] == ["cluster.nodes=2", "cluster.gpus_per_node=0"]


def test_signal_checkpoints_requeues_and_resumes(slurm: VirtualCluster, submit: Submitter) -> None:
    job = submit("checkpoints when asked")
    job.wait_for_file(job.run_dir / "waiting")
    slurm.run(["scancel", "--batch", "--signal=USR1", job.identity])  # what --signal=B:USR1@120 does
    job.wait_for_requeue()
    for rank in (0, 1):
        record = job.record(start=0, rank=rank)
        assert record["asked"] == 1
        assert record["child_lives"], "the signal reached a child of the driver"
    job.wait("COMPLETED")
    assert "trainer.resume_mode=auto" not in job.record(start=0)["arguments"]
    assert job.record(start=1)["arguments"][-1] == "trainer.resume_mode=auto"
    assert "the driver has checkpointed: requeued" in job.output()


@pytest.mark.slow
def test_driver_that_does_not_finish_in_time_is_ended_and_requeued(submit: Submitter) -> None:
    """Slurm itself signals the job before its time limit; a step that takes longer must not cost the requeue."""
    job = submit("does not leave", options=["--time=1", "--signal=B:USR1@50"])
    job.wait_for_requeue(timeout=360)
    assert "SIGUSR1: the driver shall finish" in job.output()
    assert "no time left: ending the driver" in job.output()
    assert "the driver was ended after SIGUSR1: requeued" in job.output()
    job.wait("COMPLETED")
    assert job.record(start=1)["arguments"][-1] == "trainer.resume_mode=auto"


def test_cancelled_job_stays_cancelled(submit: Submitter) -> None:
    job = submit("does not leave")
    job.wait_for_file(job.run_dir / "waiting")
    submit.slurm.run(["scancel", job.identity])
    job.wait("CANCELLED", timeout=60)
    submit.slurm.wait_for_idle()
    assert submit.slurm.job(job.identity)["JobState"] == "CANCELLED"
    assert "requeued" not in job.output()


def test_error_of_the_driver_fails_the_job(slurm: VirtualCluster, submit: Submitter) -> None:
    job = submit("fails")
    job.wait("FAILED")
    assert slurm.job(job.identity)["ExitCode"] == "3:0"
    assert job.starts() == 1
    assert "the driver ended with exit code 3 (rank " in job.output()
    assert "not requeued" in job.output()


def test_requeue_stops_without_progress(slurm: VirtualCluster, submit: Submitter) -> None:
    job = submit("asks to be requeued", environment={"MEGATRON_RETOOL_FRUITLESS_STARTS": "2"})
    job.wait_for_requeue()
    job.wait("FAILED")
    assert job.starts() == 2
    assert "2 starts in a row made no checkpoint" in job.output()


# Stand-ins for apptainer and for an srun with pyxis: they note the options of the container in $NOTES, and run the
# command outside of one.
APPTAINER = """#!/bin/bash
echo "${*:1:7}" >>"$NOTES"
exec "${@:8}"
"""
PYXIS = f"""#!/bin/bash
for word in "$@"; do
  case "$word" in --container-* | --no-container-*) noted+=("$word") ;; *) kept+=("$word") ;; esac
done
echo "${{noted[*]}}" >>"$NOTES"
exec {shutil.which("srun")} "${{kept[@]}}"
"""


@pytest.mark.parametrize(
    ("image", "program", "stand_in", "options"),
    [
        ("image.sif", "apptainer", APPTAINER, "exec --nv --bind {mounts} --pwd {root} image.sif"),
        ("image.sqsh", "srun", PYXIS, "--container-image=image.sqsh --container-name=megatron_retool_{job} "
         "--container-mounts={mounts} --container-workdir={root} --no-container-mount-home"),
    ],
    ids=["apptainer", "pyxis"],
)  # fmt: skip
def test_everything_runs_in_the_container(
    submit: Submitter, tmp_path: Path, image: str, program: str, stand_in: str, options: str
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / program).write_text(stand_in)
    (programs / program).chmod(0o755)
    environment = {
        "MEGATRON_RETOOL_CONTAINER": image,
        "MEGATRON_RETOOL_CONTAINER_MOUNTS": "/data:/data",
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "NOTES": str(tmp_path / "notes"),
    }
    job = submit("ends well", environment=environment)
    job.wait("COMPLETED")
    local = submit.slurm.directory / "tmp"
    mounts = f"{ROOT}:{ROOT},{local}:{local},{job.run_dir}:{job.run_dir},/data:/data"
    notes = (tmp_path / "notes").read_text().splitlines()
    # The address of the head node and one process for each of the two ranks, or one srun for both.
    assert notes.count(options.format(mounts=mounts, root=ROOT, job=job.identity)) >= 2, notes


def test_node_failure_requeues_and_resumes(slurm: VirtualCluster, submit: Submitter) -> None:
    job = submit("checkpoints when asked")
    job.wait_for_file(job.run_dir / "waiting")
    slurm.kill_node("node2")
    # Slurm would find out after SlurmdTimeout; a health check or an operator says so at once.
    slurm.run(["scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=power"])
    job.wait_for_requeue()
    slurm.start_node("node2")
    job.wait("COMPLETED")
    assert job.record(start=1)["arguments"][-1] == "trainer.resume_mode=auto"


@pytest.mark.slow
def test_ray_on_every_node(slurm: VirtualCluster, submit: Submitter) -> None:
    """Ray joins, the driver reaches both nodes, a dead raylet requeues the job, and nothing is left at the end."""
    job = submit("ray", script="train_dapo_megatron.sbatch")
    job.wait_for_file(job.run_dir / "waiting")
    assert json.loads((job.run_dir / "ray_places.json").read_text()) == [
        [name, slurm.address(name), "eth0"] for name in ("node1", "node2")
    ]
    assert {path.name for path in (job.run_dir / "logs").glob("ray_*.log")} == {"ray_node1.log", "ray_node2.log"}
    assert job.run_dir.joinpath("logs", f".slurm_{job.identity}", "ray_token").stat().st_mode & 0o077 == 0
    slurm.on_node("node2", ["pkill", "-KILL", "-x", "raylet"])
    job.wait_for_requeue()
    assert "Ray ended on node2" in job.output()
    job.wait("COMPLETED")
    arguments = job.record(start=1)["arguments"]
    assert arguments[-4:] == [
        "cluster.ray_address=auto", "cluster.nodes=2", "cluster.gpus_per_node=0", "trainer.resume_mode=auto"
    ]  # fmt: skip
    assert not list(job.run_dir.joinpath("logs").glob(".slurm_*")), "the token is still there"
    for node in slurm.nodes:
        assert not [line for line in slurm.processes(node) if "ray" in line], f"Ray is still running on {node}"
        assert not list((slurm.directory / f"tmp.{node}").iterdir())


@pytest.mark.rare
def test_node_that_does_not_come_is_named(slurm: VirtualCluster, submit: Submitter, tmp_path: Path) -> None:
    bin_directory = tmp_path / "venv" / "bin"
    bin_directory.mkdir(parents=True)
    real = Path(sys.executable).parent
    for name, first in (("python", ""), ("ray", "[[ $SLURMD_NODENAME != node2 ]] || exec sleep 600\n")):
        (bin_directory / name).write_text(f'#!/bin/bash\n{first}exec {real / name} "$@"\n')
        (bin_directory / name).chmod(0o755)
    environment = {"MEGATRON_RETOOL_VENV": str(tmp_path / "venv"), "MEGATRON_RETOOL_NODE_TIMEOUT": "15"}
    job = submit("ends well", script="train_dapo_megatron.sbatch", environment=environment)
    job.wait("FAILED")
    assert "node2 has not joined Ray" in job.output()
    assert "node1 has not joined" not in job.output()
    assert job.starts() == 0
