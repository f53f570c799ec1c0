"""What is said to a run that continues with other settings, or has nothing left to do."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_retool.config import Config, load_config, save_config
from megatron_retool.config.differences import changed_settings
from megatron_retool.loop.resume import announce_resume, announce_start
from megatron_retool.runs.checkpoints import Checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo() -> Config:
    return load_config(ROOT / "configs" / "demo_cpu.yaml", ["trainer.total_steps=3", "trainer.experiment_name=r"])


def changed(config: Any, settings: Mapping[str, Any]) -> Any:
    """A copy with other values under dotted keys."""
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        new = changed(getattr(config, section), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{section: new})
    return config


class Run:
    """A run of three steps under ``config``, and what is said to one that continues from it."""

    def __init__(self, directory: Path, config: Config) -> None:
        self.config = changed(config, {"trainer.runs_dir": str(directory)})
        self.checkpoint = Checkpoint(self.config.trainer.run_dir / "checkpoints" / "global_step_3", 3)
        self.checkpoint.path.mkdir(parents=True)
        self.ran_as({})

    def ran_as(self, settings: Mapping[str, Any], steps: int = 3) -> None:
        save_config(changed(self.config, settings), self.config.trainer.run_dir / "config.yaml")
        (self.checkpoint.path / "trainer_state.json").write_text(json.dumps({"total_steps": steps}))

    def asked(self, settings: Mapping[str, Any]) -> tuple[bool, str]:
        output = io.StringIO()
        finished = announce_resume(changed(self.config, settings), self.checkpoint, Console(file=output, width=80))
        return finished, output.getvalue()


@pytest.fixture
def run(tmp_path: Path, demo: Config) -> Run:
    return Run(tmp_path, demo)


def test_a_finished_run_says_how_to_go_on(run: Run) -> None:
    assert run.asked({}) == (
        True,
        f"{run.checkpoint.path} is the last step already (3 steps): nothing to train. To continue, raise "
        "trainer.total_steps; to start over, choose another trainer.experiment_name\n",
    )
    assert run.asked({"trainer.total_steps": 2})[0], "a run is never too long"


def test_settings_that_come_too_late_are_named(run: Run) -> None:
    finished, text = run.asked({"learner.optimizer.lr": 5e-5})
    assert finished
    before = run.config.learner.optimizer.lr
    file = run.config.trainer.run_dir / "config.yaml"
    assert text.startswith(f"settings that are not those of {file}:\n  learner.optimizer.lr: {before}, now 5e-05\n")
    assert "nothing to train, and these settings have no effect" in text


def test_a_longer_run_goes_on_under_the_new_settings(run: Run) -> None:
    finished, text = run.asked({"trainer.total_steps": 100, "learner.optimizer.lr": 5e-5, "cluster.nodes": 4})
    assert not finished
    assert "  trainer.total_steps: 3, now 100\n" in text and "cluster" not in text
    assert "they hold from step 4 on, and the weights are those of step 3" in text
    assert "another trainer.experiment_name" in text and "schedule" not in text
    _, text = run.asked({"trainer.total_steps": 9, "learner.optimizer.schedule": "cosine", "model.path": "x"})
    assert "schedule=cosine ends at the new last step: the learning rate continues where the new schedule" in text
    assert "name no weights for a run that continues" in text


@pytest.mark.parametrize("key", ["learner.mini_batch_size", "rollout.train.n", "data.train_batch_size"])
def test_a_schedule_says_what_another_number_of_updates_does_to_it(run: Run, key: str) -> None:
    sizes = {"data.train_batch_size": 16, "rollout.train.n": 4, "learner.mini_batch_size": 32}
    before = {**sizes, "trainer.total_steps": 9, "learner.optimizer.schedule": "cosine"}
    run.ran_as(before, steps=9)
    _, text = run.asked({**before, key: 2 * sizes[key]})
    now, after = (1, 6) if key == "learner.mini_batch_size" else (4, 1.5)
    assert f"schedule=cosine counts updates: a step has {now}, and had 2. The learning rate" in text
    assert f"that after step {after} of a run with {now} updates a step, and not after step 3" in text
    assert f"learner.mini_batch_size={32 if now == 1 else 64} would keep 2" in text
    constant = {**before, "learner.optimizer.schedule": "constant"}
    run.ran_as(constant, steps=9)
    assert "counts updates" not in run.asked({**constant, key: 2 * sizes[key]})[1]
    run.ran_as(before, steps=9)
    same = {**before, "data.train_batch_size": 32, "learner.mini_batch_size": 64}
    assert "counts updates" not in run.asked(same)[1]


def test_nothing_is_said_where_nothing_changed(run: Run) -> None:
    run.ran_as({"trainer.total_steps": 5})
    assert run.asked({"trainer.total_steps": 5, "trainer.resume_mode": "resume_path"}) == (False, "")


def test_the_length_in_epochs_is_the_checkpoints_while_data_are_the_same(run: Run) -> None:
    epochs = {"trainer.total_steps": None, "trainer.total_epochs": 2}
    run.ran_as(epochs)
    assert run.asked(epochs)[0]
    assert not run.asked({**epochs, "trainer.total_epochs": 3})[0]
    assert not run.asked({**epochs, "data.train_batch_size": 8})[0]
    run.ran_as(epochs, steps=9)
    assert not run.asked(epochs)[0]


def test_settings_younger_than_the_run_had_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(Config(), file)
    assert changed_settings(file, Config()) == {}
    file.write_text("trainer: {seed: 1, gone: 2}\nreward: {function_kwargs: {a: 1}}\nalgorithm: null\n")
    assert changed_settings(file, Config()) == {"trainer.seed": (1, 0), "reward.function_kwargs": ({"a": 1}, {})}


@pytest.mark.parametrize("content", [None, "", "[1, 2]", "a: [", "\x00"])
def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert changed_settings(tmp_path / "config.yaml", Config()) == {}


def test_what_weights_alone_are_good_for_is_said_at_the_start(run: Run, tmp_path: Path) -> None:
    start = tmp_path / "other" / "checkpoints" / "weights_step_7"
    start.mkdir(parents=True)
    settings = {"model.mcore_path": str(start)}

    def said() -> str:
        output = io.StringIO()
        config = changed(run.config, settings)
        announce_start(config.model, config.trainer, Console(file=output, width=80))
        return output.getvalue()

    assert said() == ""  # not complete
    (start / "COMPLETE").touch()
    assert said() == (
        f"begins with the weights of {start}: steps are counted from 0, and optimizer, learning-rate schedule, data "
        "and random state start over\n"
    )
    del settings["model.mcore_path"]
    own = run.config.trainer.run_dir / "checkpoints" / "weights_step_2"
    own.mkdir()
    (own / "COMPLETE").touch()
    assert said().startswith(f"{own} holds only weights, from which no run resumes: this one starts over")
    settings["trainer.resume_mode"] = "disable"
    assert said() == ""
