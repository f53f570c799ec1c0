"""FP8 on Transformer Engine's Python alone: recipes, what a checkpoint holds of them, and block scales.

Products in FP8 are not computed here. What the learner assumes about the pinned versions is: each of these tests says
which assumption it holds, and fails when a new version drops it.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import block_scales
from megatron_retool.config import ConfigError, Fp8Config, LearnerConfig
from megatron_retool.learner.precision import FP8_RECIPES
from megatron_retool.parity.admission.tiny_model import save_model
from tests.kit.tiny_models import hf_model
from tests.learner.transformer_engine.conftest import Run

HOPPER, BLACKWELL = (9, 0), (10, 0)
CONFIGURATIONS = [
    Fp8Config(recipe=recipe, format=format, keep_first_last_bf16=keep)
    for recipe in FP8_RECIPES
    for format, keep in ((None, True), ("hybrid", False), ("e4m3", True))
    if recipe != "nvfp4" or format is None
]


def _on(capability: tuple[int, int]) -> list[Fp8Config]:
    return [fp8 for fp8 in CONFIGURATIONS if fp8.recipe and FP8_RECIPES[fp8.recipe].minimum_capability <= capability]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf_model("qwen3_moe", num_hidden_layers=3, moe_intermediate_size=32)
    return save_model(model, tmp_path_factory.mktemp("fp8") / "experts")


def _build(
    directory: Path, fp8: Fp8Config, capability: tuple[int, int] = HOPPER
) -> tuple[list[Any], Architecture, Any]:
    from megatron_retool.learner import parallel
    from megatron_retool.learner.model import build_model_chunks
    from megatron_retool.learner.precision import Acceleration
    from megatron_retool.learner.specs import build_transformer_config

    learner = LearnerConfig(dtype="bfloat16", fp8=fp8)
    architecture = Architecture.from_pretrained(directory)
    layout = learner.layout(architecture)
    parallel.initialize(layout, torch.device("cpu"), seed=1)
    acceleration = dataclasses.replace(Acceleration.detect(), capability=capability)
    config = build_transformer_config(architecture, learner, layout, acceleration)
    return build_model_chunks(architecture, config, acceleration), architecture, config


def _context(config: Any, layer: int) -> Any:
    from megatron.core.fp4_utils import get_fp4_context
    from megatron.core.fp8_utils import get_fp8_context

    return (get_fp4_context if config.fp4 else get_fp8_context)(config, layer)


def _format(recipe: Any) -> str:
    return (recipe.fp4_format if recipe.nvfp4() else recipe.fp8_format).name


def _recipes(directory: Path, capability: tuple[int, int]) -> list[tuple[str, str, list[bool]]]:
    """Each configuration's recipe and format, and which of three layers compute in FP8; of those that the GPU has."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from tests.learner.transformer_engine.kernels import as_if_gpu

    found = []
    for fp8 in _on(capability):
        _, _, config = _build(directory, fp8, capability)
        in_fp8 = []
        with as_if_gpu(capability):
            for layer in range(3):
                with _context(config, layer):
                    in_fp8.append(FP8GlobalStateManager.is_fp8_enabled())
                    if in_fp8[-1]:
                        recipe = FP8GlobalStateManager.get_fp8_recipe()
        found.append((type(recipe).__name__, _format(recipe), in_fp8))
    return found


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_every_configuration_builds_and_enters_its_context(
    capability: tuple[int, int], experts: Path, with_transformer_engine: Run
) -> None:
    names = {
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    found = with_transformer_engine(_recipes, 1, experts, capability)
    for fp8, answer in zip(_on(capability), found, strict=True):
        format = fp8.format or FP8_RECIPES[fp8.recipe].format
        outer = not fp8.keep_first_last_bf16
        assert answer == (names[fp8.recipe], format.upper(), [outer, True, outer])


def _refused(directory: Path) -> dict[str, str]:
    """What each recipe says of a model."""
    found = {}
    for recipe in FP8_RECIPES:
        try:
            _build(directory, Fp8Config(recipe=recipe), BLACKWELL)
        except ConfigError as error:
            found[recipe] = str(error)
    return found


@pytest.mark.parametrize(
    ("size", "recipes", "named"),
    [
        (24, {"tensorwise": 16, "blockwise": 16, "nvfp4": 16}, "linear_fc2 has 32 x 24"),
        (24, {"mxfp8": 32}, "linear_fc1 has 48 x 32"),
        (48, {"mxfp8": 32}, "linear_fc2 has 32 x 48"),
    ],
)
def test_matrices_that_a_recipe_does_not_multiply_are_named(
    size: int, recipes: dict[str, int], named: str, tmp_path: Path, with_transformer_engine: Run
) -> None:
    save_model(hf_model("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=size), tmp_path / "model")
    found = with_transformer_engine(_refused, 1, tmp_path / "model")
    assert len(found) == (4 if size == 24 else 1)
    for recipe, multiple in recipes.items():
        assert f"recipe={recipe} multiplies matrices whose sizes are multiples of {multiple}, and " in found[recipe]
        assert f"decoder.layers.0.mlp.experts.{named} on a rank: lower " in found[recipe]


def _claims() -> dict[str, Any]:
    """What the pinned Transformer Engine says of its recipes."""
    import pickle

    from megatron.core.extensions.transformer_engine import te_general_gemm
    from transformer_engine.common import recipe
    from transformer_engine.pytorch import Linear
    from transformer_engine.pytorch._extra_state import is_stateless_recipe

    from tests.learner.transformer_engine.kernels import as_if_gpu

    os.environ.pop("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", None)
    delayed = pickle.dumps({"recipe": recipe.DelayedScaling(), "scale_fwd": torch.ones(3), "extra_fp8_variables": {}})
    with as_if_gpu():
        module = Linear(16, 16, device="cpu")
    refused = ""
    try:
        module.set_extra_state(torch.frombuffer(bytearray(delayed), dtype=torch.uint8))
    except RuntimeError as error:
        refused = str(error)
    own = {
        "tensorwise": recipe.Float8CurrentScaling,
        "blockwise": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
    }
    return {
        "formats": {name: _format(of()).lower() for name, of in own.items()},
        "stateless": {name: is_stateless_recipe(of()) for name, of in own.items()},
        "delayed": refused,
        "router_kernel": te_general_gemm is not None,
    }


def test_what_is_said_of_the_pinned_version_holds(with_transformer_engine: Run) -> None:
    found = with_transformer_engine(_claims, 1)
    assert found["formats"] == {name: recipe.format for name, recipe in FP8_RECIPES.items()}
    assert found["stateless"] == dict.fromkeys(FP8_RECIPES, True)
    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE" in found["delayed"], "delayed scaling could be resumed"
    assert found["router_kernel"] is True


def test_delayed_scaling_is_refused_by_name() -> None:
    from megatron_retool.config import load_config

    with pytest.raises(ConfigError, match=r"learner\.fp8\.recipe=delayed must be one of null, tensorwise"):
        load_config(None, ["learner.fp8.recipe=delayed"])


def _first_checkpoint(directory: Path, target: Path) -> dict[str, Any]:
    """As after a first forward under FP8: every module knows its recipe, and is asked for its extra state."""
    from megatron.core import dist_checkpointing
    from megatron.core.extensions.transformer_engine import TEGroupedLinear
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    from megatron_retool.learner.checkpoint.state import model_state
    from megatron_retool.learner.weights import load_hf_weights
    from tests.learner.transformer_engine.kernels import as_if_gpu

    answers: dict[str, Any] = {}
    for recipe in FP8_RECIPES:
        fp8 = Fp8Config(recipe=recipe, keep_first_last_bf16=False)
        chunks, architecture, config = _build(directory, fp8, BLACKWELL)
        load_hf_weights(chunks, architecture, directory)
        (model,) = chunks
        with as_if_gpu(BLACKWELL), _context(config, 0):
            for module in model.modules():
                if isinstance(module, TransformerEngineBaseModule):
                    module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))
        grouped = [module for module in model.modules() if isinstance(module, TEGroupedLinear)]
        assert all(module.fp8 for module in grouped)
        state = model_state(chunks, architecture)["model"]
        extra = [key for key in state if "_extra_state" in key]
        (target / recipe).mkdir()
        dist_checkpointing.save({"model": state}, str(target / recipe))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        loaded = dist_checkpointing.load({"model": model_state(chunks, architecture)["model"]}, str(target / recipe))
        model.load_state_dict(loaded["model"])
        same = all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
        answers[recipe] = {"extra": len(extra) > 0, "same": same}
    return answers


def test_the_first_checkpoint_of_experts_under_fp8(experts: Path, tmp_path: Path, with_transformer_engine: Run) -> None:
    found = with_transformer_engine(_first_checkpoint, 1, experts, tmp_path)
    assert found == dict.fromkeys(FP8_RECIPES, {"extra": True, "same": True})


def _marks(directory: Path) -> list[bool]:
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    (model,), _, _ = _build(directory, Fp8Config())
    grouped = [module for module in model.modules() if isinstance(module, TEGroupedLinear)]
    return [getattr(p, "tensor_model_parallel", False) for module in grouped for p in module.parameters()]


def test_experts_count_on_every_tensor_parallel_rank(experts: Path, with_transformer_engine: Run) -> None:
    found = with_transformer_engine(_marks, 1, experts)
    assert all(found) and len(found) == 3 * 2 * 4


def _block_scales(directory: Path) -> dict[str, Any]:
    from megatron.core.fp8_utils import get_fp8_recipe
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import _scale_from_amax_tensor
    from transformer_engine.pytorch.quantization import Float8BlockScalingRecipeState

    chosen = {}
    for capability in (HOPPER, BLACKWELL):
        _, _, config = _build(directory, Fp8Config(recipe="blockwise"), capability)
        recipe = get_fp8_recipe(config)
        quantizers = [
            quantizer
            for mode, count in (("forward", 3), ("backward", 2))
            for quantizer in Float8BlockScalingRecipeState(recipe, mode=mode, num_quantizers=count).make_quantizers()
        ]
        chosen[capability] = {quantizer.force_pow_2_scales for quantizer in quantizers}
    generator = torch.Generator().manual_seed(0)
    largest = torch.exp(torch.randn(4096, generator=generator) * 12)
    largest = torch.cat([largest, torch.tensor([0.0, 1e-38, 448.0, 224.0, 1.0, 0.0625])])
    differing = {}
    for power_of_two in (False, True):
        theirs, inverse, _ = _scale_from_amax_tensor(
            torch.float32, largest, torch.float8_e4m3fn, eps=0.0, pow_2_scales=power_of_two
        )
        ours = block_scales(largest, power_of_two=power_of_two)
        differing[power_of_two] = int((ours != theirs).sum() + (ours.reciprocal() != inverse).sum())
    return {"chosen": chosen, "differing": differing}


def test_learner_and_weights_for_engines_have_the_same_block_scales(
    experts: Path, with_transformer_engine: Run
) -> None:
    found = with_transformer_engine(_block_scales, 1, experts)
    assert found["chosen"] == {HOPPER: {False}, BLACKWELL: {True}}
    assert found["differing"] == {False: 0, True: 0}
