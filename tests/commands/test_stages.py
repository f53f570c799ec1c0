import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # noqa: F401 (importing it starts a program, which FakeCommands would take for a stage)
from rich.console import Console

from megatron_retool.commands import stages as stages_module
from megatron_retool.commands.stages import Stages, run_pipeline, run_training
from megatron_retool.config import ConfigError, LoraConfig, load_config
from megatron_retool.reports.run_page import RunReport
from megatron_retool.reports.summary import Summary
from megatron_retool.runs.checkpoints import (
    checkpoint_workspace,
    publish_checkpoint,
    seal_checkpoint,
    workspace_path,
)
from megatron_retool.runs.demo_base import base_settings, naming_the_base, with_demo_base
from megatron_retool.runs.leave import LeaveAsked, LeaveRequest


def stages(tmp_path, *overrides, leave=None):
    config = load_config(None, ["demo.enable=true", f"trainer.runs_dir={tmp_path}", *overrides])
    found = Stages(config.trainer.run_dir, Console(quiet=True), leave)
    found.claim(base_settings(config))
    return found


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
    with pytest.raises(RuntimeError, match="stage sft failed with exit code 3, see above: sh -c exit 3"):
        stages(tmp_path).run("sft", ["sh", "-c", "exit 3"], tmp_path / "never")


def test_a_result_of_an_older_step_is_made_anew(tmp_path):
    done = tmp_path / "result"
    done.touch()  # of an unknown step
    for step in (3, 3, 5):
        stages(tmp_path).run("export", ["sh", "-c", f"echo {step} >> {done}"], done, step)
    assert done.read_text() == "3\n5\n"
    with pytest.raises(RuntimeError):
        stages(tmp_path).run("export", ["false"], done, 7)
    stages(tmp_path).run("export", ["sh", "-c", f"echo 7 >> {done}"], done, 7)
    assert done.read_text() == "3\n5\n7\n"


class FakeCommands:
    """Stands for the stages' processes: leaves what each would leave, and remembers which were run."""

    METRICS = {
        "val-core/all/acc/mean@4": 0.5,
        **{f"val-aux/{name}": 0.5 for name in ("tool/use_rate", "tool/success_rate", "num_turns/mean")},
    }

    def __init__(self, run_dir):
        self.run_dir, self.ran, self.commands = run_dir, [], []

    def checkpoint(self, run_dir, step):
        (checkpoint_workspace(run_dir, step) / "learner").mkdir()
        seal_checkpoint(workspace_path(run_dir, step), {})
        publish_checkpoint(workspace_path(run_dir, step), step)

    def start(self, command, **_):
        self.commands.append(command)
        name = next(part for part in command if part.endswith(".py") or part in ("make-demo", "sft"))
        self.ran.append(Path(name).name)
        if name == "make-demo":
            (self.run_dir / "data" / "model").mkdir(parents=True)
        elif name == "sft":
            self.checkpoint(self.run_dir / "sft", 1)
            (self.run_dir / "sft" / "COMPLETE").touch()
        elif name.endswith(".py"):
            source, target = (command[command.index(option) + 1] for option in ("--mcore-dir", "--hf-dir"))
            result = Path(source if name.endswith("hf_to_mcore.py") else target)
            assert not result.exists() or "--overwrite" in command
            result.mkdir(exist_ok=True)
            (result / "source").write_text(source)
        return SimpleNamespace(pid=0, wait=lambda: 0, poll=lambda: 0)

    def train(self, config, *_):
        self.log("", config.trainer.total_steps)
        self.checkpoint(self.run_dir, config.trainer.total_steps)
        return 0

    def log(self, stage, step):
        (self.run_dir / stage).mkdir(parents=True, exist_ok=True)
        (self.run_dir / stage / "metrics.jsonl").write_text(json.dumps({"step": step, **self.METRICS}) + "\n")


def test_export_is_that_of_the_newest_checkpoint(tmp_path, monkeypatch):
    config_file = tmp_path / "config.yaml"
    config_file.write_text(f"demo: {{enable: true}}\ntrainer: {{runs_dir: {tmp_path}, experiment_name: e}}\n")
    commands = FakeCommands(tmp_path / "e")
    monkeypatch.setattr(subprocess, "Popen", commands.start)
    monkeypatch.setattr(stages_module, "write_report", lambda *_, **__: RunReport(Path("report"), []))

    def run(total_steps):
        overrides = [f"trainer.total_steps={total_steps}", f"model.path={tmp_path / 'model'}"]
        (tmp_path / "model").mkdir(exist_ok=True)
        commands.ran.clear()
        config = load_config(config_file, overrides)
        console = Console(quiet=True)
        assert run_pipeline(config, str(config_file), overrides, console, commands.train, LeaveRequest()) == 0
        exported = (tmp_path / "e" / "export" / "source").read_text()
        assert exported == str(tmp_path / "e" / "checkpoints" / f"global_step_{total_steps}" / "learner")
        return list(commands.ran)

    assert run(3) == ["sft", "mcore_to_hf.py", "hf_to_mcore.py", "mcore_to_hf.py"]
    assert run(3) == []
    assert run(5) == ["mcore_to_hf.py"]
    assert run(5) == []


def test_a_second_experiment_begins_with_training(tmp_path, monkeypatch):
    """One override, a new name: data, fine-tuned model and its conversion are those of the first run."""
    config_file = tmp_path / "config.yaml"
    config_file.write_text(
        "demo: {enable: true, directory: '${trainer.runs_dir}/${trainer.experiment_name}/data'}\n"
        "model: {path: '${demo.directory}/model'}\ndata: {train_files: ['${demo.directory}/train.parquet']}\n"
        f"trainer: {{runs_dir: {tmp_path}, total_steps: 2, at_end: [export, summary]}}\n"
    )

    def run(name):
        overrides = [f"trainer.experiment_name={name}"]
        commands = FakeCommands(tmp_path / name)
        trained = []

        def train(config, *_):
            trained.append(config)
            return commands.train(config)

        monkeypatch.setattr(subprocess, "Popen", commands.start)
        config = load_config(config_file, overrides)
        assert run_pipeline(config, str(config_file), overrides, Console(quiet=True), train, LeaveRequest()) == 0
        return commands.ran, trained[0]

    first, _ = run("first")
    assert first == ["make-demo", "sft", "mcore_to_hf.py", "hf_to_mcore.py", "mcore_to_hf.py"]
    for _ in range(2):  # once more: what it started from is what it goes on with
        second, config = run("second")
        assert config.model.path == str(tmp_path / "first" / "sft_hf")
        assert config.model.mcore_path == str(tmp_path / "first" / "sft_mcore")
        assert config.data.train_files == [str(tmp_path / "first" / "data" / "train.parquet")]
        assert config.trainer.run_dir == tmp_path / "second"
        assert second in (["mcore_to_hf.py"], [])
    with pytest.raises(ConfigError, match=r"second started from the base of .*first, not of .*other"):
        shutil.copytree(tmp_path / "first", tmp_path / "other")
        overrides = ["trainer.experiment_name=second", f"demo.base={tmp_path}/other"]
        run_pipeline(
            load_config(config_file, overrides), str(config_file), overrides, Console(quiet=True), None, LeaveRequest()
        )


def test_what_a_run_does_at_its_end_is_chosen(tmp_path, monkeypatch):
    """A run that is not the demo's too: export, report and summary, each of them or none."""
    made = []
    monkeypatch.setattr(
        stages_module, "write_report", lambda *_, **__: made.append("report") or RunReport(Path("report"), [])
    )
    monkeypatch.setattr(Summary, "print", lambda *_: made.append("summary"))
    for name, wanted in (("all", "[export,report,summary]"), ("none", "[]"), ("report", "[report]")):
        commands = FakeCommands(tmp_path / name)
        monkeypatch.setattr(subprocess, "Popen", commands.start)
        config = load_config(
            None,
            [f"trainer.runs_dir={tmp_path}", f"trainer.experiment_name={name}", f"trainer.at_end={wanted}",
             "trainer.total_steps=1"],
        )  # fmt: skip
        made.clear()
        assert run_training(config, Stages(config.trainer.run_dir, Console(quiet=True)), commands.train) == 0
        assert commands.ran + made == {
            "all": ["mcore_to_hf.py", "report", "summary"], "none": [], "report": ["report"]
        }[name]  # fmt: skip
    with pytest.raises(ConfigError, match=r"trainer\.at_end: 'exprot' is not one of export, report, summary"):
        load_config(None, ["trainer.at_end=[exprot]"])


def test_the_base_is_trained_whole_whatever_the_run_does():
    with_adapters = ["learner.lora.rank=8", "learner.lora.targets=[attention]", "learner.lora.sync=adapter"]
    assert load_config(None, [*with_adapters, *stages_module._whole_model()]).learner.lora == LoraConfig()


def test_single_commands_of_the_demo_find_the_base_too(tmp_path):
    config_file = tmp_path / "config.yaml"
    config_file.write_text(
        "demo: {enable: true, directory: '${trainer.runs_dir}/${trainer.experiment_name}/data'}\n"
        "model: {path: '${demo.directory}/model'}\ndata: {val_files: ['${demo.directory}/val.parquet']}\n"
        f"trainer: {{runs_dir: {tmp_path}, experiment_name: second}}\n"
    )

    def resolve(*overrides):
        return with_demo_base(
            load_config(config_file, overrides), lambda base: load_config(config_file, [*base, *overrides])
        )

    with (
        pytest.raises(
            ConfigError, match=r"second/data/val.parquet is gone\. No base .*no run in .* has one.*demo\.base="
        ),
        naming_the_base(resolve()),
    ):
        raise FileNotFoundError(f"{tmp_path}/second/data/val.parquet is gone")
    for part in ("data/model", "sft/COMPLETE", "sft_hf", "sft_mcore"):
        (tmp_path / "first" / part).mkdir(parents=True)
    settings = base_settings(load_config(config_file))
    (tmp_path / "first" / "pipeline.json").write_text(json.dumps({"settings": settings}))
    config = resolve()
    assert config.model.path == str(tmp_path / "first" / "sft_hf")
    assert config.data.val_files == [str(tmp_path / "first" / "data" / "val.parquet")]
    config = resolve("model.path=elsewhere")
    assert (config.model.path, config.model.mcore_path) == ("elsewhere", None)
    assert config.data.val_files == [str(tmp_path / "first" / "data" / "val.parquet")]


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
