"""Commands that want the same run's directory, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_retool.config import ConfigError
from megatron_retool.runs import lock
from megatron_retool.runs.lock import lock_path, run_lock

HOLD = """
import sys, time
from pathlib import Path
from megatron_retool.runs.lock import run_lock
with run_lock(Path(sys.argv[1]), "train"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(run_dir: Path, job: str | None = None) -> subprocess.Popen[str]:
    """A process that holds the lock until its input ends."""
    environment = {name: value for name, value in os.environ.items() if name != lock.JOB_VARIABLE}
    environment |= {lock.JOB_VARIABLE: job} if job else {}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_command_is_refused_and_told_who_is_at_work(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "demo"
    first = holder(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    link = tmp_path / "link"
    link.symlink_to(run_dir)
    for name in (run_dir, link):
        with pytest.raises(ConfigError) as refusal, run_lock(name, "sft"):
            pass
        message = str(refusal.value)
        assert "\n" not in message and f"{name} is in use by megatron-retool train on {os.uname().nodename}" in message
        assert f"process {first.pid}, since " in message and "trainer.experiment_name" in message
    with run_lock(tmp_path / "runs" / "other", "train"):
        pass
    first.communicate("", timeout=30)
    with run_lock(run_dir, "sft"):
        assert lock_path(run_dir).exists()
    assert not lock_path(run_dir).exists()


def test_the_lock_of_a_killed_command_is_free_at_once(tmp_path: Path) -> None:
    first = holder(tmp_path / "demo")
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    assert lock_path(tmp_path / "demo").exists()
    with run_lock(tmp_path / "demo", "train"):
        pass


def test_a_run_that_is_moved_aside_stays_locked_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    with run_lock(tmp_path / "demo", "pipeline"):
        (tmp_path / "demo").rename(tmp_path / "demo.20260101-000000")
        with pytest.raises(ConfigError, match="in use by megatron-retool pipeline"), run_lock(tmp_path / "demo", "sft"):
            pass


def test_a_requeued_job_waits_for_its_former_self(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lock.JOB_VARIABLE, "17")
    first = holder(tmp_path / "demo", job="17")
    ended = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({first.pid}, 9)"])
    with run_lock(tmp_path / "demo", "train"):
        assert first.wait(30) == -signal.SIGKILL
    ended.wait(30)
    monkeypatch.setattr(lock, "ENDING_SECONDS", 0.0)
    second = holder(tmp_path / "demo", job="17")
    with pytest.raises(ConfigError, match="in use"), run_lock(tmp_path / "demo", "train"):
        pass
    second.communicate("", timeout=30)


def test_a_damaged_note_still_refuses(tmp_path: Path) -> None:
    with run_lock(tmp_path / "demo", "train"):
        lock_path(tmp_path / "demo").write_bytes(b"\xff[")
        with (
            pytest.raises(ConfigError, match="demo is in use by another process"),
            run_lock(tmp_path / "demo", "train"),
        ):
            pass


def test_a_lock_that_a_dead_owners_child_still_holds_is_waited_for(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from megatron_retool.runs.lock import run_lock\n"
        "with run_lock(Path(sys.argv[1]), 'train'):\n"
        "    if os.fork() == 0:\n"
        "        os.close(1); time.sleep(2); os._exit(0)\n"
        "    os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "demo")], check=True)
    with run_lock(tmp_path / "demo", "train"):
        pass


def test_the_pipeline_is_refused_while_another_command_is_at_work(tmp_path: Path) -> None:
    first = holder(tmp_path / "lock_test")
    overrides = [f"trainer.runs_dir={tmp_path}", "trainer.experiment_name=lock_test"]
    command = [sys.executable, "-m", "megatron_retool", "pipeline", "--config", "configs/demo_cpu.yaml", *overrides]
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = " ".join((second.stdout + second.stderr).split())
    assert second.returncode != 0 and f"is in use by megatron-retool train on {os.uname().nodename}" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock_test.lock"]
    first.communicate("", timeout=30)
