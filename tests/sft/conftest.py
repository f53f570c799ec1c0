"""A small fine-tuning of two stages on the demo's data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from megatron_retool.config import Config, OptimizerConfig, SFTStage
from megatron_retool.runs.metrics_file import read_metrics
from tests.data.conftest import (
    demo_config,
    demo_directory,  # noqa: F401
)

QUIET = Console(quiet=True)


@pytest.fixture
def config(demo_directory, tmp_path) -> Config:  # noqa: F811
    return config_of(demo_directory, tmp_path)


def config_of(demo_directory: Path, runs_dir: Path) -> Config:  # noqa: F811
    base = demo_config(
        demo_directory,
        f"trainer.runs_dir={runs_dir}",
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
    return read_metrics(config.trainer.run_dir / "metrics.jsonl")


def losses(config: Config) -> list[float]:
    return [row["sft/loss"] for row in metrics(config)]
