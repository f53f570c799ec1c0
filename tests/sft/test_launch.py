"""The command of supervised fine-tuning: several ranks, errors, and signals."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conversion.files.dist_checkpoint import DistCheckpoint
from conversion.model.weight_map import CheckpointPlace
from megatron_retool.config import Config, ConfigError, save_config
from megatron_retool.data.files import DataError
from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.sft import launch
from megatron_retool.sft.launch import fine_tune
from tests.kit.processes import descendants_named
from tests.sft.conftest import QUIET, config_of, losses, metrics, with_name, with_sft


@pytest.mark.slow
def test_two_ranks_give_the_same_losses_as_one(config):
    config = with_sft(config, stages=config.sft.stages[1:])
    fine_tune(with_name(config, "one"), QUIET)
    two = dataclasses.replace(with_name(config, "two"), learner=dataclasses.replace(config.learner, world_size=2))
    fine_tune(two, QUIET)
    assert losses(two) == pytest.approx(losses(with_name(config, "one")), abs=2e-5)
    assert (two.trainer.run_dir / "COMPLETE").exists()
    assert (two.trainer.run_dir / "checkpoints" / "global_step_10" / "COMPLETE").exists()


@pytest.mark.slow
def test_an_error_of_a_rank_is_the_commands_error(config, tmp_path):
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"messages": [json.dumps([{"role": "user", "content": "alone"}])]}), bad)
    stage = dataclasses.replace(config.sft.stages[0], train_files=[str(bad)])
    config = with_sft(config, stages=[stage])
    message = "bad.parquet, row 0, column 'messages': no assistant message"
    others = set(psutil.Process().children(recursive=True))  # servers that other tests keep for the session
    with pytest.raises(DataError, match=message):
        fine_tune(config, QUIET)
    with pytest.raises(RuntimeError, match=f"^{bad.parent}/{message}"):
        fine_tune(dataclasses.replace(config, learner=dataclasses.replace(config.learner, world_size=2)), QUIET)
    left = set(psutil.Process().children(recursive=True)) - others
    assert [process for process in left if others.isdisjoint(process.parents())] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: with_sft(c, stages=[]), "sft.stages is empty"),
        (
            lambda c: with_sft(c, stages=[dataclasses.replace(c.sft.stages[0], train_files=["no.parquet"])]),
            r"sft.stages\[0\].train_files: no.parquet: the file does not exist",
        ),
        (
            lambda c: with_sft(c, stages=[c.sft.stages[0], dataclasses.replace(c.sft.stages[1], train_files=[])]),
            r"sft.stages\[1\].train_files is empty",
        ),
        (lambda c: dataclasses.replace(c, model=dataclasses.replace(c.model, path="")), "model.path is not set"),
        (
            lambda c: dataclasses.replace(
                c,
                learner=dataclasses.replace(c.learner, world_size=4),
                cluster=dataclasses.replace(c.cluster, nodes=2),
            ),
            "cluster.nodes=2: start the command on every node with torchrun",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(config, change, message):
    with pytest.raises(ConfigError, match=message):
        fine_tune(change(config), QUIET)
    assert not config.trainer.run_dir.exists()


def weights(config: Config, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, optimizer states included, whatever layout wrote it."""
    checkpoint = DistCheckpoint(config.trainer.run_dir / "checkpoints" / f"global_step_{step}" / "learner")
    return {
        key: checkpoint.read(CheckpointPlace(key, (), ()), tuple(stored.size))
        for key, stored in checkpoint.tensors.items()
    }


def start_command(config: Config, file: Path) -> subprocess.Popen[bytes]:
    """The command itself, in another process; returns once it has trained two steps."""
    save_config(config, file)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = subprocess.Popen(
        [sys.executable, "-m", "megatron_retool", "sft", "--config", str(file)],
        cwd=Path(launch.__file__).parents[2],
        env=environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(metrics(config)) < 2:
        if command.poll() is not None or time.monotonic() > deadline:
            command.kill()
            raise AssertionError(f"two steps were not trained; exit code {command.wait()}")
        time.sleep(0.05)
    return command


@pytest.fixture(scope="module")
def uninterrupted(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of sixty steps on one rank."""
    config = config_of(demo_directory, tmp_path_factory.mktemp("uninterrupted"))
    config = with_sft(config, stages=[config.sft.stages[0], dataclasses.replace(config.sft.stages[1], steps=50)])
    fine_tune(config, QUIET)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "to_a_rank"),
    [pytest.param(1, False, marks=pytest.mark.rare), (2, False), pytest.param(2, True, marks=pytest.mark.rare)],
    ids=["alone", "command", "one_of_two_ranks"],
)
def test_asked_to_leave_all_ranks_checkpoint_one_step_and_the_run_resumes(
    config, uninterrupted, tmp_path, ranks, to_a_rank
):
    alone = with_sft(config, stages=uninterrupted.sft.stages)
    asked = dataclasses.replace(alone, learner=dataclasses.replace(alone.learner, world_size=ranks))
    command = start_command(asked, tmp_path / "config.yaml")
    try:
        told = command.pid
        if to_a_rank:  # as srun's ranks get it, at different times
            told = descendants_named(command.pid, "megatron_retool.sft")[0].pid
        os.kill(told, signal.SIGUSR1)
        assert command.wait(60) == 85
    finally:
        command.kill()
        command.wait()
    left_at = len(metrics(asked))
    assert 2 <= left_at < 60
    assert [checkpoint.step for checkpoint in complete_checkpoints(asked.trainer.run_dir)] == [left_at]
    assert not (asked.trainer.run_dir / "COMPLETE").exists()

    assert fine_tune(alone, QUIET)  # on one rank: where it goes on is the same in every layout
    assert [row["step"] for row in metrics(asked)] == list(range(1, 61))
    tolerance = 1e-6 if ranks == 1 else 1e-4
    assert losses(asked) == pytest.approx(losses(uninterrupted), abs=tolerance)
    expected, found = weights(uninterrupted, 60), weights(asked, 60)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=10 * tolerance, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_command(config, tmp_path, number):
    endless = dataclasses.replace(config.sft.stages[0], steps=10**6)
    config = with_sft(config, stages=[endless])
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, world_size=2))
    command = start_command(config, tmp_path / "config.yaml")
    try:
        ranks = psutil.Process(command.pid).children(recursive=True)
        assert len(ranks) >= 2
        command.send_signal(number)
        code = command.wait(15)
        assert code == (130 if number == signal.SIGINT else -9)
        gone, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
    finally:
        command.kill()
        command.wait()
