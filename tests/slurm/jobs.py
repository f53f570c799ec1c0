"""Submitting the real batch scripts with a stub in the driver's place."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.virtual_cluster import VirtualCluster

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
STUB = Path(__file__).with_name("stub_driver.py")


@dataclass
class Job:
    """One submitted job and the directory of everything it leaves behind."""

    slurm: VirtualCluster
    identity: str
    directory: Path

    @property
    def run_dir(self) -> Path:
        return self.directory / "runs" / "demo"

    def output(self) -> str:
        return (self.directory / "job.out").read_text()

    def wait(self, state: str, timeout: float = 180) -> None:
        self.slurm.wait_for_job(self.identity, state, timeout)

    def wait_for_file(self, path: Path, timeout: float = 180) -> None:
        """Wait for a file that the driver writes; a job that ends before fails the test with its output."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            state = self.slurm.job(self.identity)["JobState"]
            over = state in ("COMPLETED", "FAILED", "CANCELLED") or time.monotonic() > deadline
            assert not over, f"{path.name} has not appeared and the job is {state}; its output:\n{self.output()}"
            time.sleep(0.1)

    def wait_for_requeue(self, timeout: float = 90) -> None:
        """Wait until the job has been put back into the queue; Slurm starts it again by itself some seconds later."""
        deadline = time.monotonic() + timeout
        while self.slurm.job(self.identity)["Restarts"] == "0":
            assert time.monotonic() < deadline, f"not requeued in {timeout:.0f} s; the job's output:\n{self.output()}"
            time.sleep(0.1)
        self.wait("PENDING", timeout)

    def record(self, start: int, rank: int = 0) -> dict[str, Any]:
        """What the stub wrote down in a start of this job."""
        return json.loads((self.directory / "records" / f"start{start}.rank{rank}.json").read_text())

    def starts(self) -> int:
        return len({path.name.partition(".")[0] for path in (self.directory / "records").glob("start*.json")})


class Submitter:
    """Submits batch scripts whose driver is the stub. ``directory`` is shared by all nodes."""

    def __init__(self, slurm: VirtualCluster, directory: Path) -> None:
        self.slurm = slurm
        self.directory = directory
        self.jobs: list[Job] = []

    def __call__(
        self,
        behaviour: str,
        script: str = "train_sft_megatron.sbatch",
        environment: dict[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Job:
        records = self.directory / "records"
        records.mkdir()
        stub = f"{sys.executable} {STUB} {behaviour.replace(' ', '_')} {records}"
        identity = self.slurm.run(
            ["sbatch", "--parsable", "--nodes=2", f"--output={self.directory}/job.out", *options, str(SCRIPTS / script),
             f"trainer.runs_dir={self.directory}/runs", "trainer.resume_mode=disable"],
            env={"MEGATRON_RETOOL_COMMAND": stub, **job_environment(self.slurm), **(environment or {})},
        ).stdout.strip()  # fmt: skip
        self.jobs.append(Job(self.slurm, identity, self.directory))
        return self.jobs[-1]

    def close(self) -> None:
        """Cancel what still runs, so that the next test finds both nodes idle."""
        for job in self.jobs:
            self.slurm.run(["scancel", job.identity], check=False)
        self.slurm.wait_for_idle()


def job_environment(slurm: VirtualCluster) -> dict[str, str]:
    return {
        "MEGATRON_RETOOL_ROOT": str(ROOT),
        "MEGATRON_RETOOL_VENV": str(Path(sys.executable).parents[1]),
        "MEGATRON_RETOOL_LOCAL_DIR": str(slurm.directory / "tmp"),
    }
