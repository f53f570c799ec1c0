"""Weights on Transformer Engine's layer spec: names, shapes, Hugging Face and back to the bit, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.hf_to_mcore import convert
from conversion.model.architecture import Architecture
from conversion.model.rules import MCORE_BUFFER_SUFFIXES
from conversion.model.weight_map import checkpoint_place
from megatron_retool.config import Config, LearnerConfig
from megatron_retool.parity.admission.comparison import OPTIMIZER, TEMPERATURE, mini_batch
from megatron_retool.parity.admission.tiny_model import save_model
from tests.kit.adapter_reference import SHRUNK, small_model
from tests.kit.tiny_models import FAMILIES, WITH_PARTS, hf_model
from tests.learner.transformer_engine.conftest import Run

TP, SP, PP, EP, ETP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {TP: 2}),
    ("llama", {TP: 2, SP: True}),
    ("qwen2", {PP: 2}),
    ("olmo2", {TP: 2, SP: True}),
    ("qwen3_moe", {PP: 2}),
    ("qwen3_moe", {EP: 2}),
    ("qwen3_moe", {TP: 2, SP: True, ETP: 2}),
    ("qwen3_moe", {TP: 2, SP: True, EP: 2, ETP: 1}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in (*FAMILIES, *WITH_PARTS):
        save_model(hf_model(family, num_hidden_layers=2), directory / family)
    for family in SHRUNK:
        save_model(small_model(family), directory / family)
    return directory


def _build(directory: Path, world: int = 1, *, local_spec: bool = False, **settings: Any) -> tuple[list[Any], Any]:
    """This rank's chunks as the learner builds them, with parameters that are no numbers; and the architecture."""
    from megatron_retool.learner import parallel
    from megatron_retool.learner.model import build_model_chunks
    from megatron_retool.learner.precision import Acceleration
    from megatron_retool.learner.specs import build_transformer_config

    learner = LearnerConfig(world_size=world, **settings)
    architecture = Architecture.from_pretrained(directory)
    layout = learner.layout(architecture)
    parallel.initialize(layout, torch.device("cpu"), seed=1)
    acceleration = Acceleration(cuda=False) if local_spec else Acceleration.detect()
    config = build_transformer_config(architecture, learner, layout, acceleration)
    chunks: list[Any] = build_model_chunks(architecture, config, acceleration)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    return chunks, architecture


def _differences(chunks: list[Any], architecture: Architecture, directory: Path) -> list[str]:
    """Names under which an export of the model is not what lies in the Hugging Face directory; [] on other ranks."""
    from megatron_retool.learner.weights import export_hf_weights

    exported = {name: tensor for bucket in export_hf_weights(chunks, architecture) for name, tensor in bucket}
    if torch.distributed.get_rank():
        return []
    dtype = chunks[0].config.params_dtype
    expected = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    if architecture.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    differing = [name for name in exported if not torch.equal(exported[name], expected.get(name, exported[name] + 1))]
    return [*differing, *(expected.keys() - exported.keys())]


def _one_rank(models: Path) -> dict[str, dict[str, Any]]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from megatron_retool.learner.checkpoint.state import model_state, sharded_items
    from megatron_retool.learner.weights import global_parameters, load_hf_weights, local_weight_map

    found: dict[str, dict[str, Any]] = {}
    for family in (*FAMILIES, *WITH_PARTS, *SHRUNK):
        for dtype in ("float32", "bfloat16"):
            chunks, architecture = _build(models / family, dtype=dtype)
            load_hf_weights(chunks, architecture, models / family)
            found.setdefault(family, {})[dtype] = _differences(chunks, architecture, models / family)
        weight_map = local_weight_map(chunks, architecture)
        stored = list(sharded_items(model_state(chunks, architecture)))
        no_parameters = {m.mcore_name for m in weight_map if m.tied or m.mcore_name.endswith(MCORE_BUFFER_SUFFIXES)}
        found[family] |= {
            "modules": {type(module).__name__ for module in chunks[0].decoder.layers.modules()},
            "in_model": {name: tuple(parameter.shape) for name, parameter in global_parameters(chunks)},
            "in_map": {m.mcore_name: tuple(m.mcore_shape) for m in weight_map if m.mcore_name not in no_parameters},
            "stored": {item.key for item in stored if not isinstance(item, ShardedObject)},
            "places": {checkpoint_place(mapping, architecture).key for mapping in weight_map},
            "objects": {item.key.rpartition(".")[2] for item in stored if isinstance(item, ShardedObject)},
        }
    return found


def test_every_family_is_what_the_weight_map_says(models: Path, with_transformer_engine: Run) -> None:
    found = with_transformer_engine(_one_rank, 1, models)
    assert found.keys() == {*FAMILIES, *WITH_PARTS, *SHRUNK}
    for family, of in found.items():
        model = Architecture.from_pretrained(models / family)
        experts = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"} if model.is_moe else set()
        row = {"WithPostNorm" if model.post_norm else "TERowParallelLinear"}
        column = {"TELayerNormColumnParallelLinear"} if model.pre_norm else {"TEColumnParallelLinear"}
        kinds = {"TEColumnParallelLinear"} if model.latent is not None or model.linear_layers else column
        assert of["modules"] >= {*experts, *row, *kinds}
        assert of["modules"].isdisjoint({"ColumnParallelLinear", "RowParallelLinear", "SequentialMLP"}), family
        assert ("TEDotProductAttention" in of["modules"]) is not model.needs_packed_attention(), family
        assert of["in_model"] == of["in_map"], family
        assert of["stored"] == of["places"], family
        assert of["objects"] == {"_extra_state"}, family
        assert (of["float32"], of["bfloat16"]) == ([], []), family


def _two_ranks(models: Path) -> list[list[str]]:
    from megatron_retool.learner.weights import load_hf_weights

    answers = []
    for family, layout in LAYOUTS:
        chunks, architecture = _build(models / family, 2, dtype="bfloat16", **layout)
        load_hf_weights(chunks, architecture, models / family)
        answers.append(_differences(chunks, architecture, models / family))
    return answers


def test_two_ranks_read_and_give_back_the_same_bits(models: Path, with_transformer_engine: Run) -> None:
    assert with_transformer_engine(_two_ranks, 2, models) == [[]] * len(LAYOUTS)


CHECKPOINTS = {"qwen3": {TP: 2, SP: True}} | dict.fromkeys(
    ("qwen3_moe", "deepseek_v3", "qwen3_next"), {TP: 2, SP: True, EP: 2, ETP: 1}
)


def _learner(directory: Path, world: int, **settings: Any) -> Any:
    from megatron_retool.learner.learner import Learner

    config = Config(learner=LearnerConfig(world_size=world, dtype="float32", **settings))
    return Learner(config, optimizer=OPTIMIZER, total_optimizer_steps=9, hf_dir=directory)


def _save(models: Path) -> None:
    for family, layout in CHECKPOINTS.items():
        learner = _learner(models / family, 2, **layout)
        learner.update(mini_batch(), temperature=TEMPERATURE)
        learner.save(models / f"{family}-step")
        weights = {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}
        if weights:
            (models / f"{family}-trained").mkdir()
            save_file(weights, models / f"{family}-trained" / "model.safetensors")


def _load(models: Path) -> dict[str, Any]:
    """Into a whole learner, and the weights alone into both layer specs."""
    from megatron_retool.learner.checkpoint.load import load_model_weights

    answers: dict[str, Any] = {}
    for family in CHECKPOINTS:
        trained = models / f"{family}-trained"
        learner = _learner(models / family, 1)
        learner.load(models / f"{family}-step")
        models_read = {"learner": (learner.model_chunks, learner.architecture)}
        for name, local in (("fused", False), ("local", True)):
            models_read[name] = _build(models / family, dtype="float32", local_spec=local)
            load_model_weights(*models_read[name], models / f"{family}-step")
        answers[family] = {name: _differences(list(chunks), of, trained) for name, (chunks, of) in models_read.items()}
        answers[family]["step"] = learner.scheduler.num_steps
        chunks, architecture = _build(models / family, dtype="float32")
        load_model_weights(chunks, architecture, models / f"{family}-mcore")
        answers[family]["converted"] = _differences(chunks, architecture, models / family)
    return answers


@pytest.mark.slow
def test_checkpoints_are_read_in_another_layout_and_by_the_other_spec(
    models: Path, with_transformer_engine: Run
) -> None:
    with_transformer_engine(_save, 2, models)
    for family in CHECKPOINTS:
        convert(models / family, models / f"{family}-mcore", workers=1, require_tokenizer=False)
    for found in with_transformer_engine(_load, 1, models).values():
        assert found == {"learner": [], "fused": [], "local": [], "converted": [], "step": 1}
