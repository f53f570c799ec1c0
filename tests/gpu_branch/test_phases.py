"""What a run on GPUs does with a learner beside steps: checkpoints, leaving the GPU and coming back, number formats.

Also with optimizers and formats that only a GPU has. Devices must not mix, and numbers are the same before and
after, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_retool.config import load_config
from megatron_retool.parity.admission.comparison import mini_batch
from megatron_retool.parity.admission.forced_routing import on_host
from tests.gpu_branch import fake_device
from tests.gpu_branch.conftest import Run

OPTIMIZER = "learner.optimizer."
AWARE = f"{OPTIMIZER}use_precision_aware_optimizer=true"
SETTINGS: dict[str, tuple[str, ...]] = {
    "bfloat16": (),
    "float16": ("learner.dtype=float16",),
    "Adam on the host": (f"{OPTIMIZER}cpu_offload=true",),
    "main parameters as remainders": (AWARE,),
    "Adam on the host, products in FP8": (f"{OPTIMIZER}cpu_offload=true", "learner.fp8.recipe=tensorwise"),
    "weights in FP8": (
        "learner.fp8.recipe=tensorwise",
        "learner.fp8.parameters=true",
        "learner.fp8.keep_first_last_bf16=false",
    ),
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


def _save(directory: Path, place: Path, settings: tuple[str, ...]) -> None:
    """After a step."""
    learner = _learner(directory, *settings)
    learner.update(mini_batch())
    learner.save(place)


def _load(directory: Path, place: Path, settings: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights after a checkpoint and one more step."""
    learner = _learner(directory, *settings)
    learner.load(place)
    learner.update(mini_batch())
    return _weights(learner)


@pytest.mark.parametrize(("saved", "loaded"), [((AWARE,), ()), ((), (AWARE,))])
def test_optimizers_go_on_from_one_another(
    saved: tuple[str, ...], loaded: tuple[str, ...], models: Path, tmp_path: Path, on_gpus: Run
) -> None:
    """Of main parameters in float32 one keeps all bits, the other those that weights lack."""
    place = tmp_path / "checkpoint"
    on_gpus(_save, models / "qwen3-2", place, saved)
    assert _differing(*(on_gpus(_load, models / "qwen3-2", place, settings) for settings in (saved, loaded))) == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "moments in bfloat16" else ()) for name in SETTINGS],
)
def test_a_checkpoint_goes_on_to_the_bit(name: str, models: Path, tmp_path: Path, on_gpus: Run) -> None:
    found = on_gpus(_checkpoints, models / "qwen3-2", tmp_path, SETTINGS[name])
    assert {key: value for key, value in found.items() if value} == {}


def _away_and_back(directory: Path) -> dict[str, Any]:
    """A step, everything to the host and back, a step; against a learner that stays."""
    batch, found = mini_batch(), dict[str, Any]()
    learner, stays = _learner(directory), _learner(directory)
    with fake_device.recorded() as steps:
        stays.update(batch)
        learner.update(batch)
    with fake_device.recorded() as moves:
        learner.offload("weights", "optimizer", "gradients")
        found["left"] = sum(p.untyped_storage().nbytes() for chunk in learner.model_chunks for p in chunk.parameters())
        learner.reload("weights", "optimizer", "gradients")
    found["differing"] = _differing(_weights(learner), _weights(stays))
    stays.update(batch)
    learner.update(batch)
    found["went on"] = _differing(_weights(learner), _weights(stays))
    found["mixed"] = [str(event) for event in steps.mixed + moves.mixed]
    found["moves"] = {event.what for event in moves.waits + moves.copies}, len(moves.free_copies) > 0
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_leaves_the_gpu_and_comes_back(family: str, models: Path, on_gpus: Run) -> None:
    found = on_gpus(_away_and_back, models / f"{family}-2")
    assert (found["differing"], found["went on"], found["mixed"], found["left"]) == ([], [], [], 0)
    # Copies go by pinned memory, of which the host waits for the last one.
    assert found["moves"] == ({"cuda.synchronize"}, True)


SAME: dict[str, tuple[str, str]] = {
    "latents' layers again": ("deepseek_v3", "learner.recompute.granularity=full"),
    "latents' norms and experts' activations again": ("deepseek_v3", "learner.recompute.modules=[layernorm,moe_act]"),
    "latents on the host": ("deepseek_v3", "learner.cpu_offloading_num_layers=1"),
    "determinism of latents": ("deepseek_v3", "trainer.deterministic=true"),
    "states again": ("qwen3_next", "learner.recompute.modules=[core_attn,layernorm,moe]"),
    "whole layers again": ("qwen3_moe", "learner.recompute.granularity=full"),
    "attention, norms and MLP again": ("qwen3", "learner.recompute.modules=[core_attn,layernorm,mlp]"),
    "experts again": ("qwen3_moe", "learner.recompute.modules=[core_attn,layernorm,moe]"),
    "experts' activations again": ("qwen3_moe", "learner.recompute.modules=[moe_act]"),
    "activations on the host": ("qwen3", "learner.cpu_offloading_num_layers=1"),
    "one kernel chooses experts": ("qwen3_moe", "learner.moe_router_fusion=true"),
    "torch permutes": ("qwen3_moe", "learner.moe_permute_fusion=false"),
    "reductions overlap": ("qwen3", "learner.overlap_grad_reduce=true"),
    "determinism": ("qwen3_moe", "trainer.deterministic=true"),
}
"""Settings that change no number."""


def updated(
    directory: Path, settings: list[str], everywhere: tuple[str, ...] = ()
) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Weights after an update with each setting beside those of ``everywhere``, and where devices were mixed."""
    with fake_device.recorded() as record:
        found = []
        for setting in settings:
            options = [setting] if setting else []
            if "recompute.modules" in setting:
                options.append("learner.recompute.granularity=selective")
            learner = _learner(directory, *everywhere, *options)
            learner.update(mini_batch())
            found.append(_weights(learner))
    return found, [str(event) for event in record.mixed]


@pytest.mark.parametrize(
    "family",
    ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_moe", "deepseek_v3", "qwen3_next"))],
)
def test_settings_that_change_no_number(family: str, models: Path, on_gpus: Run) -> None:
    settings = {name: setting for name, (of, setting) in SAME.items() if of == family}
    (plain, *others), mixed = on_gpus(updated, models / f"{family}-2", ["", *settings.values()])
    assert mixed == []
    assert {
        name: differing for name, found in zip(settings, others, strict=True) if (differing := _differing(found, plain))
    } == {}


def _contexts(directory: Path, recipe: str) -> dict[str, Any]:
    """Of each linear layer of Transformer Engine after an update: its recipe, and what would quantise its operands."""
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

    with fake_device.recorded() as record:
        again = ("learner.recompute.granularity=selective", "learner.recompute.modules=[layernorm]")
        learner = _learner(directory, f"learner.fp8.recipe={recipe}", *again)
        learner.log_probs(mini_batch())
        learner.update(mini_batch())
    (chunk,) = learner.model_chunks
    layers: dict[int, set[Any]] = {}
    for name, module in chunk.module.named_modules():
        if isinstance(module, (Linear, LayerNormLinear, GroupedLinear)):
            kinds = {type(each).__name__ for of in module.quantizers.values() for each in of if each is not None}
            number = int(name.split(".")[2])
            layers.setdefault(number, set()).add((module.fp8, *sorted(kinds if module.fp8 else ())))
    return {"layers": layers, "mixed": [str(event) for event in record.mixed]}


@pytest.mark.parametrize(
    ("family", "recipe", "capability", "quantizer"),
    [
        ("qwen3_moe", "tensorwise", fake_device.HOPPER, "Float8CurrentScalingQuantizer"),
        ("qwen3_moe", "blockwise", fake_device.HOPPER, "Float8BlockQuantizer"),
        ("deepseek_v3", "blockwise", fake_device.HOPPER, "Float8BlockQuantizer"),
        ("qwen3_next", "tensorwise", fake_device.HOPPER, "Float8CurrentScalingQuantizer"),
        ("granitemoehybrid", "blockwise", fake_device.HOPPER, "Float8BlockQuantizer"),
        # Another GPU is another process.
        pytest.param("qwen3_moe", "mxfp8", fake_device.BLACKWELL, "MXFP8Quantizer", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "nvfp4", fake_device.BLACKWELL, "NVFP4Quantizer", marks=pytest.mark.slow),
    ],
)
def test_layers_enter_the_contexts_of_fp8(
    family: str, recipe: str, capability: tuple[int, int], quantizer: str, models: Path, on_gpus: Run
) -> None:
    found = on_gpus(_contexts, models / f"{family}-4", recipe, capability=capability)
    assert found["mixed"] == []
    assert found["layers"] == {0: {(False,)}, 1: {(True, quantizer)}, 2: {(True, quantizer)}, 3: {(False,)}}
