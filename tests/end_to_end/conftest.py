"""One short but real run (Ray, Megatron-Core, SGLang, sandbox), shared by the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.campaign.demo import write_config

ROOT = Path(__file__).parents[2]
MARKER = "MEGATRON_RETOOL_TEST_RUN"
_RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def processes_of(marker: str) -> dict[int, str]:
    """Command lines of live processes that inherited the marker of one test's run, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARKER}={marker}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:300]
            except OSError:
                continue
    return found


def pids_of(marker: str, words: str) -> list[int]:
    """Processes of the run with ``words`` in their command line."""
    return [pid for pid, command in processes_of(marker).items() if words in command]


def wait_until_gone(marker: str, seconds: float) -> dict[int, str]:
    """Processes of the run that are still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(marker)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill_driver(process: subprocess.Popen[str], marker: str) -> None:
    """SIGKILL to the driver alone; all that works for the run goes with it.

    Two agents of Ray without work stay a minute longer: before they end they try for 60 s, which is written into Ray,
    to report their raylet's death to a control store that has gone too.
    """
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while left := [command for command in processes_of(marker).values() if not command.startswith(_RAY_AGENTS)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@dataclass
class CommandLine:
    """Runs commands of this project as a user would, marked so that their processes can be found afterwards."""

    config: Path | None
    """None: the one that commands take by themselves."""
    directory: Path = ROOT
    """Where the commands are started."""
    python: Path = Path(sys.executable)

    def start(self, command: str, *overrides: str) -> tuple[subprocess.Popen[str], str]:
        marker = uuid.uuid4().hex
        config = [] if self.config is None else ["--config", str(self.config)]
        if command == "train":
            overrides = ("trainer.at_end=[]", *overrides)
        process = subprocess.Popen(
            [self.python, "-m", "megatron_retool", command, *config, *overrides],
            cwd=self.directory,
            env={**os.environ, MARKER: marker, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return process, marker

    def run(self, command: str, *overrides: str, timeout: float = 800) -> tuple[int, str]:
        """Exit code and output; fails where a process outlives the command."""
        process, marker = self.start(command, *overrides)
        output, _ = process.communicate(timeout=timeout)
        assert wait_until_gone(marker, 10) == {}
        return process.returncode, output


@dataclass
class FinishedRun:
    command_line: CommandLine
    run_dir: Path
    output: str

    def copy(self, name: str, upto: int | None) -> Path:
        """The run under another name, with checkpoints up to a step only (None: none at all)."""
        target = self.run_dir.with_name(name)
        shutil.copytree(
            self.run_dir, target, ignore=shutil.ignore_patterns("rollouts", "report", "export", "validation*")
        )
        for path in (target / "checkpoints").iterdir():
            if upto is None or int(path.name.rsplit("_", 1)[1]) > upto:
                shutil.rmtree(path)
        return target


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The demo's whole pipeline with three small RL steps.

    Workers of pytest-xdist share it: the first that needs it makes it, while the other waits.
    """
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= "demo"
    with FileLock(f"{directory}.lock"):
        config, said = directory / "short.yaml", directory / "output.txt"
        command_line = CommandLine(config)
        if not said.exists():
            directory.mkdir(exist_ok=True)
            trainer = {"test_freq": 0, "quick_test_freq": 2, "save_freq": 1, "keep_checkpoints": 5}
            assert write_config(directory, "short", 3, **trainer, deterministic=True) == config
            more = ("trainer.save_weights_freq=2", "trainer.checkpoint_compression=zstd", "trainer.profiler.tool=torch",
                    "trainer.profiler.steps=[2]")  # fmt: skip
            code, output = command_line.run("pipeline", *more)
            assert code == 0, output
            said.write_text(output)
    return FinishedRun(command_line, directory / "short", said.read_text())
