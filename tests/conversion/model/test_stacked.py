"""Names of experts' parts, and tensors that are put together from them."""

from __future__ import annotations

import random

import pytest
import torch

from conversion.model.adapter_map import why_not
from conversion.model.architecture import Architecture
from conversion.model.mapping import shard, to_hf, to_mcore
from conversion.model.stacked import Stacker, StackPart, part_of, stacked_shapes, tensor_of
from conversion.model.weight_map import WeightMap
from megatron_retool.planning.models import MODELS

LAYER = "model.layers.0.mlp.experts."
GPT_OSS = Architecture.from_hf_config(
    {**MODELS["gpt-oss-20b"], "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    | {"hidden_size": 4, "intermediate_size": 3, "num_local_experts": 5, "num_attention_heads": 8, "vocab_size": 7}
)

GRANITE = Architecture.from_hf_config(
    {**MODELS["granite-3.1-1b-a400m"], "num_hidden_layers": 2, "hidden_size": 4, "intermediate_size": 3}
    | {"num_local_experts": 5, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 7}
)


def test_names() -> None:
    assert part_of("a.gate_up_proj[3, 1::2]") == StackPart("a.gate_up_proj", 3, 1, 2)
    assert part_of("a.down_proj[12]") == StackPart("a.down_proj", 12)
    assert part_of("a.down_proj.weight") is None
    assert part_of("a.weight[3, :]") == StackPart("a.weight", 3, in_rows=True)
    assert tensor_of("a.x[{expert}, 0::2]") == "a.x" and tensor_of("a.x") == "a.x"
    assert tensor_of("a.x[{expert}, :]") == "a.x"


def test_shapes_are_those_of_the_whole_tensors() -> None:
    shapes = WeightMap(GPT_OSS).hf_shapes
    assert shapes[LAYER + "gate_up_proj"] == (5, 4, 6) and shapes[LAYER + "gate_up_proj_bias"] == (5, 6)
    assert shapes[LAYER + "down_proj"] == (5, 3, 4) and shapes[LAYER + "down_proj_bias"] == (5, 4)
    assert not any("[" in name for name in shapes)
    assert stacked_shapes([("x[0]", (2, 3)), ("x[1]", (2, 3)), ("y", (4,))]) == {"x": (2, 3, 2), "y": (4,)}


def test_gate_and_up_take_turns_in_columns() -> None:
    mapping = WeightMap(GPT_OSS)["decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"]
    stack = torch.randn(5, 4, 6)
    parts = [part_of(name) for name in mapping.hf_names]
    full = to_mcore(mapping, [part.of(stack[part.index]) for part in parts if part is not None])
    assert torch.equal(full, torch.cat([stack[3].T[0::2], stack[3].T[1::2]]))


def test_gate_lies_over_up_where_output_features_are_rows() -> None:
    weight_map = WeightMap(GRANITE)
    assert weight_map.hf_shapes["model.layers.0.block_sparse_moe.input_linear.weight"] == (5, 6, 4)
    assert weight_map.hf_shapes["model.layers.0.block_sparse_moe.output_linear.weight"] == (5, 4, 3)
    mapping = weight_map["decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"]
    (part,), stack = (part_of(name) for name in mapping.hf_names), torch.randn(5, 6, 4)
    assert part is not None and torch.equal(to_mcore(mapping, [part.of(stack[part.index])]), stack[3])
    assert torch.equal(shard(mapping, stack[3], 3, 1), stack[3][[1, 4]])


@pytest.mark.parametrize("architecture", [GPT_OSS, GRANITE], ids=lambda each: each.family)
def test_parts_in_any_order_make_the_tensors(architecture: Architecture) -> None:
    weight_map = WeightMap(architecture)
    tensors = {name: torch.randn(shape) for name, shape in weight_map.hf_shapes.items()}
    pieces = []
    for mapping in weight_map.exported():
        own = [part_of(name) for name in mapping.hf_names]
        sources = [
            tensors[name] if part is None else part.of(tensors[part.tensor][part.index])
            for name, part in zip(mapping.hf_names, own, strict=True)
        ]
        pieces += to_hf(mapping, to_mcore(mapping, sources)).items()
    random.Random(0).shuffle(pieces)
    found = dict(Stacker(weight_map.hf_shapes).add_all(pieces))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_whose_part_is_missing_does_not_come() -> None:
    stacker = Stacker({"x": (2, 3, 2)})
    assert list(stacker.add("x[1]", torch.ones(2, 3))) == []
    assert [name for name, _ in stacker.add("x[0]", torch.ones(2, 3))] == ["x"]


def test_groups_have_every_mapping_of_a_tensor() -> None:
    groups = dict(WeightMap(GPT_OSS).exported_groups())
    assert len(groups[LAYER + "gate_up_proj",]) == 5
    assert [mapping.expert for mapping in groups[LAYER + "down_proj_bias",]] == [0, 1, 2, 3, 4]
    assert sorted(name for names in groups for name in names) == sorted(WeightMap(GPT_OSS).hf_names)


@pytest.mark.parametrize("architecture", [GPT_OSS, GRANITE], ids=lambda each: each.family)
def test_adapters_do_not_know_such_experts(architecture: Architecture) -> None:
    assert "one tensor" in why_not(architecture, ["attention", "experts"])
    assert why_not(architecture, ["attention"]) == ""
