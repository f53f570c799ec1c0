"""A disk that is full when a checkpoint is due: the old one stays, the run continues, and the next step tries again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import Config, load_config
from megatron_retool.loop import train as train_module
from megatron_retool.runs import checkpointer as checkpointer_module
from megatron_retool.runs.checkpointer import Checkpointer, Contents
from megatron_retool.runs.checkpoints import SaveError, checkpoint_workspace, complete_checkpoints
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.weights_checkpoints import weights_checkpoints


class FakeLearner:
    """Writes so many bytes for each checkpoint, and tells of a full disk as the group does."""

    size = 400_000
    error: Exception | None = None

    def __init__(self) -> None:
        self.saved: list[bool] = []

    async def save(self, directory: Path, *, asynchronous: bool, weights_only: bool = False) -> None:
        self.asynchronous = asynchronous
        self.saved.append(weights_only)
        await self.finish_save()
        directory.mkdir()
        try:
            (directory / "weights").write_bytes(bytes(self.size))
            (directory / "COMPLETE").touch()
        except OSError as error:
            raise SaveError(str(error)) from error

    async def finish_save(self) -> None:
        if self.error is not None:
            raise self.error

    async def load(self, directory: Path) -> None:
        raise AssertionError("there is no checkpoint to load")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run's directory whose checkpoints lie on a file system of one megabyte."""
    path = tmp_path / "experiment" / "checkpoints"
    path.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small file system")
    yield path.parent
    subprocess.run(["umount", str(path)], check=True)


def checkpointer_in(directory: Path, *overrides: str) -> tuple[Checkpointer, FakeLearner, Console]:
    config = load_config(None, [f"trainer.runs_dir={directory}", "trainer.keep_checkpoints=5", *overrides])
    learner, console = FakeLearner(), Console(record=True, width=300)
    return Checkpointer(config, console, lambda: {"learner": learner}), learner, console


def save_step(checkpointer: Checkpointer, step: int, wait: bool = True) -> float:
    """How many saves have failed in a row."""
    files = {"prompt_source.json": {"drawn": step}, "trainer_state.json": {"step": step}}
    return asyncio.run(checkpointer.save(step, Contents(files), wait=wait))["checkpoint/failed_saves"]


def test_asynchronous_save_is_complete_when_it_is_finished(tmp_path: Path) -> None:
    checkpointer, learner, _ = checkpointer_in(tmp_path, "trainer.async_save=true", "trainer.experiment_name=e")
    save_step(checkpointer, 1, wait=False)
    assert learner.asynchronous and complete_checkpoints(tmp_path / "e") == [] and checkpointer.newest is None
    save_step(checkpointer, 2, wait=False)  # completes the one before it
    assert [c.step for c in complete_checkpoints(tmp_path / "e")] == [1]
    asyncio.run(checkpointer.finish())
    assert [c.step for c in complete_checkpoints(tmp_path / "e")] == [1, 2]
    save_step(checkpointer, 3)  # the last step waits
    assert checkpointer.newest is not None and not learner.asynchronous
    assert checkpointer.newest.step == 3 and checkpointer.newest.read("trainer_state.json")["step"] == 3


def test_full_disk_leaves_the_old_checkpoint_and_no_debris(small_disk: Path) -> None:
    checkpointer, _, _ = checkpointer_in(small_disk.parent)
    save_step(checkpointer, 1)
    save_step(checkpointer, 2)
    with pytest.raises(SaveError, match=r"step 3 was not written: .*No space left.*global_step_2 is intact"):
        save_step(checkpointer, 3)
    assert [c.step for c in complete_checkpoints(small_disk)] == [1, 2]
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == ["global_step_1", "global_step_2"]
    assert checkpointer.newest is not None
    assert checkpointer.newest.step == 2 and checkpointer.newest.read("prompt_source.json") == {"drawn": 2}


def test_full_disk_at_the_last_file_is_no_checkpoint_either(small_disk: Path) -> None:
    checkpointer, learner, _ = checkpointer_in(small_disk.parent)
    learner.size = 2**20  # the weights just fit, the rest does not
    with pytest.raises(SaveError, match="There is no older one; free some space"):
        save_step(checkpointer, 1)
    assert list((small_disk / "checkpoints").iterdir()) == [] and checkpointer.newest is None


def test_run_goes_on_and_tries_again_until_one_is_written(tmp_path: Path) -> None:
    checkpointer, learner, console = checkpointer_in(tmp_path, "trainer.experiment_name=e")
    assert not checkpointer.overdue
    learner.error = SaveError("disk full")
    assert save_step(checkpointer, 1, wait=False) == 1 and checkpointer.overdue
    assert save_step(checkpointer, 2, wait=False) == 2
    assert "disk full. There is no older one" in console.export_text(clear=False)
    assert "Training continues (trainer.on_failed_save)" in console.export_text()
    with pytest.raises(SaveError):  # the last step's, or the one before a requeue
        save_step(checkpointer, 3)
    learner.error = None
    assert save_step(checkpointer, 4, wait=False) == 0 and not checkpointer.overdue
    learner.error = ValueError("a bug, not a disk")
    with pytest.raises(ValueError, match="a bug"):
        save_step(checkpointer, 5, wait=False)


def test_an_asynchronous_save_that_fails_while_it_is_written_is_overdue(tmp_path: Path) -> None:
    checkpointer, learner, _ = checkpointer_in(tmp_path, "trainer.async_save=true", "trainer.experiment_name=e")
    assert save_step(checkpointer, 1, wait=False) == 0
    learner.error = SaveError("disk full")
    asyncio.run(checkpointer.finish())
    assert checkpointer.overdue and list((tmp_path / "e" / "checkpoints").iterdir()) == []
    asyncio.run(checkpointer.load())  # a learner that is built again knows of nothing
    assert not checkpointer.overdue


def save_both(checkpointer: Checkpointer, step: int, *, complete: bool, weights: bool) -> dict[str, float]:
    contents = Contents({"trainer_state.json": {"step": step}}) if complete else None

    async def save() -> dict[str, float]:
        metrics = await checkpointer.write(step, contents, wait=False, weights=weights)
        await checkpointer.commit()
        return metrics

    return asyncio.run(save())


def test_two_kinds_of_one_step_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "link_weights", shutil.copytree)
    settings = ("trainer.experiment_name=e", "trainer.keep_weights=2", "trainer.keep_checkpoints=1")
    checkpointer, learner, console = checkpointer_in(tmp_path, *settings)
    both = save_both(checkpointer, 2, complete=True, weights=True)
    assert learner.saved == [False]
    assert {"checkpoint/size_gb", "checkpoint/weights_size_gb", "checkpoint/seconds"} <= both.keys()
    assert both["checkpoint/weights_size_gb"] == learner.size / 2**30 <= both["checkpoint/size_gb"]
    text = console.export_text()
    assert text.startswith("saved ") and "global_step_2, 390." in text
    assert "weights_step_2, 390.6 KiB of only weights, in files of global_step_2, in " in text
    alone = save_both(checkpointer, 3, complete=False, weights=True)
    assert learner.saved == [False, True] and "checkpoint/size_gb" not in alone
    assert checkpointer.newest is not None and checkpointer.newest.step == 2
    save_both(checkpointer, 4, complete=True, weights=True)
    names = sorted(path.name for path in (tmp_path / "e" / "checkpoints").iterdir())
    assert names == ["global_step_4", "weights_step_3", "weights_step_4"]


def test_weights_that_could_not_be_written_are_tried_again(tmp_path: Path) -> None:
    checkpointer, learner, console = checkpointer_in(tmp_path, "trainer.experiment_name=e")
    learner.error = SaveError("disk full")
    assert save_both(checkpointer, 1, complete=False, weights=True)["checkpoint/failed_saves"] == 1
    assert checkpointer.weights_overdue and not checkpointer.overdue
    assert list((tmp_path / "e" / "checkpoints").iterdir()) == []
    assert "disk full" in console.export_text()
    learner.error = None
    assert save_both(checkpointer, 2, complete=False, weights=True)["checkpoint/failed_saves"] == 0
    assert not checkpointer.weights_overdue
    assert [each.step for each in weights_checkpoints(tmp_path / "e")] == [2]


def test_an_asynchronous_save_is_reported_when_it_is_complete(tmp_path: Path) -> None:
    checkpointer, learner, _ = checkpointer_in(tmp_path, "trainer.async_save=true", "trainer.experiment_name=e")
    assert save_both(checkpointer, 1, complete=False, weights=True) == {"checkpoint/failed_saves": 0.0}
    assert weights_checkpoints(tmp_path / "e") == []
    report = asyncio.run(checkpointer.finish())
    assert report.keys() == {"checkpoint/weights_size_gb", "checkpoint/seconds"}
    assert [each.step for each in weights_checkpoints(tmp_path / "e")] == [1]
    assert asyncio.run(checkpointer.finish()) == {}


def test_run_can_be_told_to_stop(tmp_path: Path) -> None:
    checkpointer, learner, _ = checkpointer_in(tmp_path, "trainer.on_failed_save=stop", "trainer.experiment_name=e")
    learner.error = SaveError("disk full")
    with pytest.raises(SaveError):
        save_step(checkpointer, 1, wait=False)


def test_group_tells_why_a_rank_wrote_nothing(tmp_path: Path) -> None:
    async def answer(reason: str | None) -> str | None:
        return reason

    group = LearnerGroup.__new__(LearnerGroup)
    group.config, group.role, group.nodes = Config(), "learner", []
    reasons = [None, "rank 1: No space left on device"]
    group.workers = [SimpleNamespace(save=SimpleNamespace(remote=lambda *_, r=r: answer(r))) for r in reasons]
    with pytest.raises(SaveError, match="rank 1: No space left"):
        asyncio.run(group.save(tmp_path))


def test_a_save_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    """Whatever ends the run, once its processes are gone; what an earlier run left goes at the start, and is named."""
    config = load_config(None, [f"trainer.runs_dir={tmp_path}"])
    (config.trainer.run_dir / "checkpoints" / "global_step_4").mkdir(parents=True)
    console = Console(record=True, soft_wrap=True)

    class StoppedDeployment:
        def __init__(self, *_):
            self.watchdog = contextlib.nullcontext()

        async def __aenter__(self):
            assert not (config.trainer.run_dir / "checkpoints" / "global_step_4").exists()
            checkpoint_workspace(config.trainer.run_dir, 5)
            raise asyncio.CancelledError

        async def __aexit__(self, *_):
            raise AssertionError("was not entered")

    monkeypatch.setattr(train_module, "Deployment", StoppedDeployment)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(train_module.train(config, console, LeaveRequest()))
    assert list((config.trainer.run_dir / "checkpoints").iterdir()) == []
    assert "global_step_4: it was not complete" in console.export_text()
