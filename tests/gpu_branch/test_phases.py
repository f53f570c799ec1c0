"""What a run on GPUs does with a learner beside steps: checkpoints, leaving the GPU and coming back, number formats.

Also with optimizers and formats that there are on a GPU alone. Devices must not mix; of numbers the tests say that
they are the same before and after, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_retool.admission.forced_routing import on_host
from megatron_retool.admission.parity import mini_batch
from megatron_retool.config import load_config
from tests.gpu_branch import fake_device
from tests.gpu_branch.conftest import Run

OPTIMIZER = "learner.optimizer."
AWARE = f"{OPTIMIZER}use_precision_aware_optimizer=true"
SETTINGS: dict[str, tuple[str, ...]] = {
    "bfloat16": (),
    "float16": ("learner.dtype=float16",),
    "Adam on the host": (f"{OPTIMIZER}cpu_offload=true",),
    "main parameters as remainders": (AWARE,),
    "moments in bfloat16": (AWARE, f"{OPTIMIZER}exp_avg_dtype=bfloat16", f"{OPTIMIZER}exp_avg_sq_dtype=bfloat16"),
}


def _learner(directory: Path, *settings: str, world: int = 1) -> Any:
    from megatron_retool.learner.learner import Learner

    own = (f"model.path={directory}", f"learner.world_size={world}", "learner.dtype=bfloat16")
    sizes = ("learner.max_tokens_per_micro_batch=112", f"{OPTIMIZER}lr=1e-3")
    config = load_config(None, [*own, *sizes, *settings])
    return Learner(config, optimizer=config.learner.optimizer, total_optimizer_steps=10, hf_dir=directory)


def _weights(learner: Any) -> dict[str, torch.Tensor]:
    return on_host({name: tensor for bucket in learner.export_weights() for name, tensor in bucket})


def _differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def _checkpoints(directory: Path, place: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    """Saves before the first step and after one; whether another learner goes on from there as this one does."""
    batch, found = mini_batch(), dict[str, Any]()
    with fake_device.recorded() as record:
        learner = _learner(directory, *settings)
        for name in ("at the start", "after a step"):
            before = _weights(learner)
            learner.save(place / name)
            learner.update(batch)
            other = _learner(directory, *settings)
            other.load(place / name)
            found[f"loaded {name}"] = _differing(_weights(other), before)
            other.update(batch)
            found[f"went on {name}"] = _differing(_weights(other), _weights(learner))
    return {**found, "mixed": [str(event) for event in record.mixed]}


def _load(directory: Path, place: Path, settings: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights after a checkpoint and one more step."""
    learner = _learner(directory, *settings)
    learner.load(place / "after a step")
    learner.update(mini_batch())
    return _weights(learner)


@pytest.mark.parametrize(("saved", "loaded"), [((AWARE,), ()), ((), (AWARE,))])
def test_optimizers_go_on_from_one_another(
    saved: tuple[str, ...], loaded: tuple[str, ...], models: Path, tmp_path: Path, on_gpus: Run
) -> None:
    """Of main parameters in float32 one keeps all bits, the other those that weights lack."""
    on_gpus(_checkpoints, models / "qwen3-2", tmp_path, saved)
    assert _differing(*(on_gpus(_load, models / "qwen3-2", tmp_path, settings) for settings in (saved, loaded))) == []


@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_goes_on_to_the_bit(name: str, models: Path, tmp_path: Path, on_gpus: Run) -> None:
    found = on_gpus(_checkpoints, models / "qwen3-2", tmp_path, SETTINGS[name])
    assert {key: value for key, value in found.items() if value} == {}
