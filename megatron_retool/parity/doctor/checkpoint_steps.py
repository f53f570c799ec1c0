"""A checkpoint of the learner: training continues from it without a difference, in another layout too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_retool.config import Config
from megatron_retool.parity.doctor import model
from megatron_retool.parity.doctor.learner_steps import finest_dtype, learner_config, make_learner
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession

_STEPS_BEFORE, _STEPS_AFTER = 2, 2
_SAME_LAYOUT = {"float32": 1e-5, "bfloat16": 2e-3}
_ANOTHER_LAYOUT = {"float32": 1e-3, "bfloat16": 2e-2}
"""Of the loss, relative: another layout adds in another order, and so do GPUs from run to run."""
_SCHEDULE = ("learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=1")


def checkpoint(session: DoctorSession) -> list[StepFigure]:
    """Train, save, train on; against a learner that loads what was saved, on one rank and on two."""
    directory = session.directory / "checkpoint"
    dtype = finest_dtype()[0]
    config = learner_config(session, model.DENSE, f"learner.dtype={dtype}", *_SCHEDULE)
    expected = session.run_ranks(_train_and_save, 1, config, directory)
    figures = [StepFigure("learning before the checkpoint: loss falls by", expected["fell"], at_least=0.01)]
    resumed = session.run_ranks(_resume, 1, config, directory)
    figures += _compared("resumed", resumed, expected["after"], _SAME_LAYOUT[dtype])
    if session.gpus == 1:
        return [*figures, StepFigure("another layout", "not tried: NCCL takes no two ranks on one GPU")]
    layouts = {"two ranks, tensor parallel": "tensor", "two ranks, pipeline parallel": "pipeline"}
    for label, kind in layouts.items():
        overrides = ["learner.world_size=2", f"learner.{kind}_model_parallel_size=2"]
        other = learner_config(session, model.DENSE, f"learner.dtype={dtype}", *_SCHEDULE, *overrides)
        result = session.run_ranks(_resume, 2, other, directory)
        figures += _compared(label, result, expected["after"], _ANOTHER_LAYOUT[dtype])
    return figures


def _train_and_save(config: Config, directory: Path) -> dict[str, Any]:
    learner = make_learner(config)
    batch = model.mini_batch()
    before = [learner.sft_update(batch) for _ in range(_STEPS_BEFORE)]
    learner.save(directory)
    after = [learner.sft_update(batch) for _ in range(_STEPS_AFTER)]
    learner.close()
    return {"after": after, "fell": before[0]["loss"] - after[-1]["loss"]}


def _resume(config: Config, directory: Path) -> list[dict[str, float]]:
    learner = make_learner(config)
    learner.load(directory)
    result = [learner.sft_update(model.mini_batch()) for _ in range(_STEPS_AFTER)]
    learner.close()
    return result


def _compared(
    label: str, found: list[dict[str, float]], expected: list[dict[str, float]], bound: float
) -> list[StepFigure]:
    figures = []
    for name, limit in (("loss", bound), ("grad_norm", 10 * bound), ("lr", 1e-9)):
        difference = max(abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(found, expected, strict=True))
        figures.append(StepFigure(f"{label}: {name}, relative difference", difference, at_most=limit))
    return figures
