import os
import signal
import sys
import threading
import time

import pytest
from rich.console import Console

from megatron_retool.config import ConfigError, load_config
from megatron_retool.leave import LeaveAsked, LeaveRequest
from megatron_retool.pipeline import Stages


def stages(tmp_path, *overrides, leave=None):
    config = load_config(None, ["demo.enable=true", f"trainer.runs_dir={tmp_path}", *overrides])
    return Stages(config.run_dir, config, Console(quiet=True), leave)


def test_results_of_other_settings_are_not_mixed(tmp_path):
    stages(tmp_path, "trainer.seed=1").call("make-demo", lambda: 0)
    stages(tmp_path, "trainer.seed=1", "trainer.total_steps=5", "learner.optimizer.lr=1")  # neither matters before RL
    with pytest.raises(ConfigError, match=r"trainer\.seed=1, now 2.*resume_mode=disable"):
        stages(tmp_path, "trainer.seed=2")
    with pytest.raises(ConfigError, match=r"demo\.hidden_size=128, now 64"):
        stages(tmp_path, "trainer.seed=1", "demo.hidden_size=64")


def test_a_stage_whose_result_is_there_is_not_run_again(tmp_path):
    done = tmp_path / "result"
    command = ["sh", "-c", f"echo x >> {done}"]
    for _ in range(2):
        stages(tmp_path).run("make-demo", command, done)
    assert done.read_text() == "x\n"
    assert "make-demo" in stages(tmp_path).seconds


def test_a_failed_stage_names_its_command(tmp_path):
    with pytest.raises(RuntimeError, match="stage sft failed with exit code 3: sh -c exit 3"):
        stages(tmp_path).run("sft", ["sh", "-c", "exit 3"], tmp_path / "never")


LISTENS_LATE = """
import signal, sys, time
time.sleep(0.5)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
open(sys.argv[1], "w").close()
while not asked:
    time.sleep(0.02)
sys.exit(85)
"""


def test_a_stage_is_asked_to_leave_as_soon_as_it_listens_and_no_other_begins(tmp_path):
    with LeaveRequest() as leave:
        found = stages(tmp_path, leave=leave)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()  # the stage's process does not listen yet
        with pytest.raises(LeaveAsked):
            found.run("sft", [sys.executable, "-c", LISTENS_LATE, str(tmp_path / "listens")], tmp_path / "never")
        assert (tmp_path / "listens").exists()
        with pytest.raises(LeaveAsked):
            found.call("rl", lambda: pytest.fail("begun"))
    assert "rl" not in found.seconds


def test_a_stage_that_does_not_listen_ends_first(tmp_path):
    done = tmp_path / "done"
    with LeaveRequest() as leave:
        found = stages(tmp_path, leave=leave)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        start = time.monotonic()
        found.run("mcore_to_hf", ["sh", "-c", f"sleep 0.7; touch {done}"], done)
        assert done.exists() and time.monotonic() - start > 0.6
