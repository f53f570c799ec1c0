"""Supervised fine-tuning on the real learner: it learns, resumes exactly, runs on several ranks, and ends cleanly."""

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
from rich.console import Console

from conversion.files.dist_checkpoint import CheckpointPlace, DistCheckpoint
from megatron_retool import sft
from megatron_retool.config import Config, ConfigError, OptimizerConfig, SFTStage, save_config
from megatron_retool.data.files import DataError
from megatron_retool.monitor.logger import read_metrics
from megatron_retool.runs.checkpoints import complete_checkpoints
from tests.data.conftest import (
    demo_config,
    demo_directory,  # noqa: F401
)

QUIET = Console(quiet=True)


@pytest.fixture
def config(demo_directory, tmp_path) -> Config:  # noqa: F811
    base = demo_config(
        demo_directory,
        f"trainer.runs_dir={tmp_path}",
        "trainer.experiment_name=run",
        "trainer.loggers=[jsonl]",
        f"model.path={demo_directory / 'model'}",
        "learner.dtype=float32",
        "learner.max_tokens_per_micro_batch=4096",
        "sft.log_freq=1",
    )
    optimizer = OptimizerConfig(lr=5e-3, betas=[0.9, 0.98], weight_decay=0.01, warmup_steps=3)
    stages = [
        SFTStage(
            name="pretrain",
            train_files=[str(demo_directory / "pretrain.parquet")],
            batch_size=16,
            steps=10,
            max_length=256,
            optimizer=dataclasses.replace(optimizer, schedule="constant"),
        ),
        SFTStage(
            name="sft",
            train_files=[str(demo_directory / "sft.parquet")],
            val_files=[str(demo_directory / "sft_val.parquet")],
            batch_size=8,
            steps=10,
            max_length=256,
            optimizer=dataclasses.replace(optimizer, schedule="linear", min_lr=5e-4),
        ),
    ]
    return dataclasses.replace(base, sft=dataclasses.replace(base.sft, stages=stages))


def with_sft(config: Config, **settings) -> Config:
    return dataclasses.replace(config, sft=dataclasses.replace(config.sft, **settings))


def with_name(config: Config, name: str, **trainer) -> Config:
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, experiment_name=name, **trainer))


def metrics(config: Config) -> list[dict]:
    return read_metrics(config.run_dir / "metrics.jsonl")


def losses(config: Config) -> list[float]:
    return [row["sft/loss"] for row in metrics(config)]


def test_stages_follow_one_another_and_learn(config):
    sft.main(config, QUIET)
    rows = metrics(config)
    assert [row["step"] for row in rows] == list(range(1, 21))
    found = losses(config)
    assert found[0] > 5.5
    assert found[9] < 0.8 * found[0]
    assert found[-1] < found[10]
    assert [row["step"] for row in rows if "sft/val_loss" in row] == [20]
    assert rows[-1]["sft/val_loss"] < found[10]
    rates = [row["sft/lr"] for row in rows]
    # Each stage warms up anew; the first stage then stays, the second falls to a tenth.
    assert rates[:5] == pytest.approx([0.00125, 0.0025, 0.00375, 0.005, 0.005])
    assert rates[9] == pytest.approx(0.005)
    assert rates[10] == pytest.approx(0.00125)
    assert rates[13] == max(rates[10:])
    assert rates[-1] < 0.0015
    assert all(row["perf/throughput"] > 0 for row in rows)
    assert [c.step for c in complete_checkpoints(config.run_dir)] == [20]
    assert (config.run_dir / "COMPLETE").exists()
    before = (config.run_dir / "metrics.jsonl").read_bytes()
    sft.main(config, QUIET)
    assert (config.run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("stop", [5, 10, 13])
def test_a_stopped_run_resumes_as_if_it_had_not(config, monkeypatch, stop):
    """Stopped in the first stage, between the stages, and in the second."""
    config = with_sft(config, save_freq=stop)
    sft.main(with_name(config, "whole"), QUIET)

    class Killed(BaseException):
        pass

    update = sft.Run._update
    steps = 0

    def stop_after(self, stage, step, window):
        nonlocal steps
        if steps == stop + 2:
            raise Killed
        steps += 1
        return update(self, stage, step, window)

    stopped = with_name(config, "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(sft.Run, "_update", stop_after)
        with pytest.raises(Killed):
            sft.main(stopped, QUIET)
    assert len(metrics(stopped)) == stop + 2
    assert not (stopped.run_dir / "COMPLETE").exists()
    sft.main(stopped, QUIET)
    assert [row["step"] for row in metrics(stopped)] == list(range(1, 21))
    assert losses(stopped) == pytest.approx(losses(with_name(config, "whole")), abs=1e-6)
    assert metrics(stopped)[-1]["sft/val_loss"] == pytest.approx(
        metrics(with_name(config, "whole"))[-1]["sft/val_loss"], abs=1e-6
    )
    with pytest.raises(ConfigError, match="made with other settings.*resume_mode=disable"):
        (stopped.run_dir / "COMPLETE").unlink()
        sft.main(with_name(config, "stopped", seed=3), QUIET)


def test_a_run_goes_back_to_an_older_checkpoint(config):
    config = with_sft(config, save_freq=15)
    sft.main(config, QUIET)
    first, origin = losses(config), config.run_dir / "checkpoints" / "global_step_15"
    back = with_name(config, "run", resume_mode="resume_path", resume_from_path=str(origin), keep_checkpoints=1)
    sft.main(back, QUIET)
    assert losses(config) == pytest.approx(first, abs=1e-6) and (config.run_dir / "COMPLETE").exists()
    assert [c.step for c in complete_checkpoints(config.run_dir)] == [15, 20]
    (aside,) = config.run_dir.parent.glob("run.*")
    assert [c.step for c in complete_checkpoints(aside)] == [20] and (aside / "COMPLETE").exists()


def test_two_ranks_give_the_same_losses_as_one(config):
    config = with_sft(config, stages=config.sft.stages[1:])
    sft.main(with_name(config, "one"), QUIET)
    two = dataclasses.replace(with_name(config, "two"), learner=dataclasses.replace(config.learner, world_size=2))
    sft.main(two, QUIET)
    assert losses(two) == pytest.approx(losses(with_name(config, "one")), abs=2e-5)
    assert (two.run_dir / "COMPLETE").exists()
    assert (two.run_dir / "checkpoints" / "global_step_10" / "COMPLETE").exists()


def test_an_error_of_a_rank_is_the_commands_error(config, tmp_path):
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"messages": [json.dumps([{"role": "user", "content": "alone"}])]}), bad)
    stage = dataclasses.replace(config.sft.stages[0], train_files=[str(bad)])
    config = with_sft(config, stages=[stage])
    message = "bad.parquet, row 0, column 'messages': no assistant message"
    others = set(psutil.Process().children(recursive=True))  # servers that other tests keep for the session
    with pytest.raises(DataError, match=message):
        sft.main(config, QUIET)
    with pytest.raises(RuntimeError, match=f"^{bad.parent}/{message}"):
        sft.main(dataclasses.replace(config, learner=dataclasses.replace(config.learner, world_size=2)), QUIET)
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: with_sft(c, stages=[]), "sft.stages is empty"),
        (
            lambda c: with_sft(c, stages=[dataclasses.replace(c.sft.stages[0], train_files=["no.parquet"])]),
            r"sft.stages\[0\].train_files: no.parquet does not exist",
        ),
        (
            lambda c: with_sft(c, stages=[c.sft.stages[0], dataclasses.replace(c.sft.stages[1], train_files=[])]),
            r"sft.stages\[1\].train_files is empty",
        ),
        (
            lambda c: with_sft(c, stages=[dataclasses.replace(c.sft.stages[0], batch_size=0)]),
            r"sft.stages\[0\].batch_size=0",
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
        sft.main(change(config), QUIET)
    assert not config.run_dir.exists()


def weights(config: Config, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, optimizer states included, whatever layout wrote it."""
    checkpoint = DistCheckpoint(config.run_dir / "checkpoints" / f"global_step_{step}" / "learner")
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
        cwd=Path(sft.__file__).parents[1],
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


@pytest.mark.parametrize(
    ("ranks", "to_a_rank"), [(1, False), (2, False), (2, True)], ids=["alone", "command", "one_of_two_ranks"]
)
def test_asked_to_leave_all_ranks_checkpoint_one_step_and_the_run_resumes(config, tmp_path, ranks, to_a_rank):
    stages = [config.sft.stages[0], dataclasses.replace(config.sft.stages[1], steps=50)]
    whole = with_sft(with_name(config, "whole"), stages=stages)
    asked = with_name(whole, "asked")
    asked = dataclasses.replace(asked, learner=dataclasses.replace(asked.learner, world_size=ranks))
    command = start_command(asked, tmp_path / "config.yaml")
    try:
        told = command.pid
        if to_a_rank:  # as srun's ranks get it, at different times
            children = psutil.Process(command.pid).children()
            told = next(child.pid for child in children if "megatron_retool.sft" in child.cmdline())
        os.kill(told, signal.SIGUSR1)
        assert command.wait(60) == 85
    finally:
        command.kill()
        command.wait()
    left_at = len(metrics(asked))
    assert 2 <= left_at < 60
    assert [checkpoint.step for checkpoint in complete_checkpoints(asked.run_dir)] == [left_at]
    assert not (asked.run_dir / "COMPLETE").exists()

    sft.main(whole, QUIET)
    assert sft.main(with_name(whole, "asked"), QUIET)  # on one rank: where it goes on is the same in every layout
    assert [row["step"] for row in metrics(asked)] == list(range(1, 61))
    tolerance = 1e-6 if ranks == 1 else 1e-4
    assert losses(asked) == pytest.approx(losses(whole), abs=tolerance)
    expected, found = weights(whole, 60), weights(asked, 60)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=10 * tolerance, msg=key)


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
