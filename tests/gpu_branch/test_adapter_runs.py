"""Runs of adapters on a GPU: they take turns by pinned memory, and their files continue to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_retool.target_sequences import OptimizerStep
from tests.gpu_branch import fake_device
from tests.gpu_branch.conftest import Run
from tests.gpu_branch.test_phases import AWARE, OPTIMIZER, _learner
from tests.kit.target_reference import CROSS_ENTROPY, GSPO, PAIRS, PPO, WIDTHS, random_sequences

SETTINGS: dict[str, tuple[str, ...]] = {
    "bfloat16": (),
    "main parameters as remainders": (AWARE,),
    "moments in bfloat16": (AWARE, f"{OPTIMIZER}exp_avg_dtype=bfloat16", f"{OPTIMIZER}exp_avg_sq_dtype=bfloat16"),
    "plain optimizer": ("learner.use_distributed_optimizer=false",),
    "reductions overlap": ("learner.overlap_grad_reduce=true", "learner.overlap_param_gather=true"),
}


def _runs(directory: Path, settings: tuple[str, ...], world: int) -> Any:
    from megatron_retool.learner.adapter_runs import AdapterRuns

    return AdapterRuns(_learner(directory, "learner.lora.rank=4", *settings, world=world))


def _steps(runs: Any, run: str, number: int) -> list[float]:
    losses = []
    for seed in range(number, number + 2):
        for lengths, loss in ((WIDTHS, CROSS_ENTROPY), (PAIRS, PPO)):
            losses.append(runs.accumulate(run, random_sequences(lengths, seed), loss).metrics["loss"])
        losses.append(runs.apply(run, OptimizerStep(1e-2, eps=1e-6, grad_clip_norm=1.0))["grad_norm"])
    return losses


def _take_turns(directory: Path, place: Path, settings: tuple[str, ...], world: int) -> dict[str, Any]:
    alone = {}
    for name, alpha in (("one", 8.0), ("two", 32.0)):
        runs = _runs(directory, settings, world)
        runs.create_run(name, rank=4, alpha=alpha, seed=0)
        alone[name] = [_steps(runs, name, number) for number in (0, 2)]
    with fake_device.recorded() as record:
        runs = _runs(directory, settings, world)
        for name, alpha in (("one", 8.0), ("two", 32.0)):
            runs.create_run(name, rank=4, alpha=alpha, seed=0)
        found: dict[str, Any] = {"one": [], "two": []}
        for number in (0, 2):
            for name, losses in found.items():
                losses.append(_steps(runs, name, number))
        runs.save_run("one", place, with_optimizer=True)
        after = _steps(runs, "one", 4)
        runs.load_run("one", place, with_optimizer=True)
        again = [_steps(runs, "one", 4)]
        fresh = _runs(directory, settings, world)
        fresh.create_run("one", rank=4, alpha=8.0, seed=1)
        fresh.load_run("one", place, with_optimizer=True)
        again.append(_steps(fresh, "one", 4))
        runs.accumulate("two", random_sequences(PAIRS, 0), GSPO, forward_only=True)
        runs.accumulate("one", random_sequences(PAIRS, 0), GSPO)
        runs.activate("two")  # which makes the memory that is then used again
    with fake_device.recorded() as turns:
        for name in ("one", "two"):
            runs.activate(name)
    return {
        "differing": [name for name in alone if alone[name] != found[name]],
        "again": [float(np.abs(np.array(after) - np.array(found)).max()) for found in again],
        "mixed": [str(event) for event in record.mixed + turns.mixed],
        "waits": [str(event) for event in turns.waits + turns.copies],
        "pinned": len(turns.free_copies) > 0,
    }


@pytest.mark.parametrize(
    ("name", "family", "world"),
    [
        pytest.param("bfloat16", "qwen3_moe", 1, marks=pytest.mark.slow),
        pytest.param("main parameters as remainders", "qwen3", 1, marks=pytest.mark.rare),
        pytest.param("reductions overlap", "qwen3", 2, marks=pytest.mark.rare),
        pytest.param("bfloat16", "qwen3", 2, marks=pytest.mark.rare),
        pytest.param("moments in bfloat16", "qwen3", 1, marks=pytest.mark.rare),
        pytest.param("plain optimizer", "qwen3", 1, marks=pytest.mark.slow),
    ],
)
def test_runs_take_turns_on_a_gpu(
    name: str, family: str, world: int, models: Path, tmp_path: Path, on_gpus: Run
) -> None:
    found = on_gpus(_take_turns, models / f"{family}-2", tmp_path / "run", SETTINGS[name], world, world=world)
    assert found == {"differing": [], "again": [0.0, 0.0], "mixed": [], "waits": [], "pinned": True}
