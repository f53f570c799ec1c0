"""A disk that is full when a checkpoint is due: the old one stays, the run goes on, and the next step tries again."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_retool.cluster.gpu_phases import GpuTurns
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import Config, load_config
from megatron_retool.loop.experience import Collected
from megatron_retool.loop.faults import CheckpointSaves
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.train import finish_save, save
from megatron_retool.runs.checkpoints import SaveError, complete_checkpoints


class FakeLearner:
    """Writes so many bytes for each checkpoint, and tells of a full disk as the group does."""

    size = 400_000

    async def save(self, directory: Path, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        directory.mkdir()
        try:
            (directory / "weights").write_bytes(bytes(self.size))
        except OSError as error:
            raise SaveError(str(error)) from error

    async def finish_save(self) -> None:
        pass


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


def run_in(directory: Path, *overrides: str) -> tuple[Any, TrainerState]:
    config = load_config(None, [f"trainer.runs_dir={directory}", "trainer.keep_checkpoints=5", *overrides])
    turns = GpuTurns(False, list, list)
    run = SimpleNamespace(
        config=config,
        learner=FakeLearner(),
        critic=None,
        total_steps=9,
        checkpoint=None,
        turns=turns,
        pending_save=None,
    )
    return run, TrainerState.first(config)


def save_step(run: Any, state: TrainerState, step: int, wait: bool = True) -> None:
    state.step = step
    asyncio.run(save(run, state, Collected([], [], {"drawn": step}), wait=wait))


def test_asynchronous_save_is_complete_when_it_is_finished(tmp_path: Path) -> None:
    run, state = run_in(tmp_path, "trainer.async_save=true", "trainer.experiment_name=e")
    save_step(run, state, 1, wait=False)
    assert run.learner.asynchronous and complete_checkpoints(tmp_path / "e") == [] and run.checkpoint is None
    save_step(run, state, 2, wait=False)  # completes the one before it
    assert [c.step for c in complete_checkpoints(tmp_path / "e")] == [1]
    asyncio.run(finish_save(run))
    assert [c.step for c in complete_checkpoints(tmp_path / "e")] == [1, 2] and run.pending_save is None
    save_step(run, state, 3)  # the last step waits
    assert run.checkpoint.step == 3 and run.checkpoint.read("trainer_state.json")["step"] == 3


def test_full_disk_leaves_the_old_checkpoint_and_no_debris(small_disk: Path) -> None:
    run, state = run_in(small_disk.parent)
    save_step(run, state, 1)
    save_step(run, state, 2)
    with pytest.raises(SaveError, match=r"step 3 was not written: .*No space left.*global_step_2 is intact"):
        save_step(run, state, 3)
    assert [c.step for c in complete_checkpoints(small_disk)] == [1, 2]
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == ["global_step_1", "global_step_2"]
    assert run.checkpoint.step == 2 and run.checkpoint.read("prompt_source.json") == {"drawn": 2}


def test_full_disk_at_the_last_file_is_no_checkpoint_either(small_disk: Path) -> None:
    run, state = run_in(small_disk.parent)
    run.learner.size = 2**20  # the weights just fit, the rest does not
    with pytest.raises(SaveError, match="There is no older one; free some space"):
        save_step(run, state, 1)
    assert list((small_disk / "checkpoints").iterdir()) == [] and run.checkpoint is None


async def outcome(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_run_goes_on_and_tries_again_until_one_is_written() -> None:
    console = Console(record=True, width=300)
    saves = CheckpointSaves(load_config(), console)

    def attempt(error: Exception | None, required: bool = False) -> float:
        return asyncio.run(saves.attempt(outcome(error), required=required))["checkpoint/failed_saves"]

    assert not saves.overdue
    assert attempt(SaveError("disk full")) == 1 and saves.overdue
    assert attempt(SaveError("disk full")) == 2
    assert "disk full. Training goes on" in console.export_text()
    with pytest.raises(SaveError):  # the last step's, or the one before a requeue
        attempt(SaveError("disk full"), required=True)
    assert attempt(None) == 0 and not saves.overdue
    with pytest.raises(ValueError):
        attempt(ValueError("a bug, not a disk"))


def test_run_can_be_told_to_stop() -> None:
    saves = CheckpointSaves(load_config(None, ["trainer.on_failed_save=stop"]), Console(quiet=True))
    with pytest.raises(SaveError):
        asyncio.run(saves.attempt(outcome(SaveError("disk full")), required=False))


def test_group_tells_why_a_rank_wrote_nothing(tmp_path: Path) -> None:
    async def answer(reason: str | None) -> str | None:
        return reason

    group = LearnerGroup.__new__(LearnerGroup)
    group.config, group.role, group.nodes = Config(), "learner", []
    reasons = [None, "rank 1: No space left on device"]
    group.workers = [SimpleNamespace(save=SimpleNamespace(remote=lambda *_, r=r: answer(r))) for r in reasons]
    with pytest.raises(SaveError, match="rank 1: No space left"):
        asyncio.run(group.save(tmp_path))
