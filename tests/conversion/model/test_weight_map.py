"""The weight map's five functions as properties; tests/parity holds its names against transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conversion.model.architecture import Architecture
from conversion.model.attention_config import DeltaNetSizes, IndexerSizes, LatentSizes, MambaSizes
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.family import built_in_families
from conversion.model.mapping import Mapping, WeightMapError, hf_parts, merge, shard, shard_shape, to_hf, to_mcore
from conversion.model.weight_map import WeightMap, canonical_name, checkpoint_place
from megatron_retool.planning.models import preset

DELTA_NETS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
INDEXED = ("deepseek_v32", "glm_moe_dsa")
DENSE_AMONG_EXPERTS = (*INDEXED, "deepseek_v2", "deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_next", "qwen3_moe")
LATENT = (*INDEXED, "deepseek_v2", "deepseek_v3")


NEXT = Architecture(
    "qwen3_next", 2, 1, 4, 2, 1, 3, 5, attention_gate=True, qk_norm=True, linear_layers=(0,),
    delta_net=DeltaNetSizes(key_heads=2, value_heads=4, key_dim=1, value_dim=1, kernel=4),
)  # fmt: skip
"""A gated delta net, then gated attention with four heads in two groups."""


@st.composite
def architectures(draw: st.DrawFn, tp: int = 1) -> Architecture:
    """Small models whose sizes divide by ``tp``; the key/value heads may be fewer than TP."""
    family = draw(st.sampled_from(sorted(built_in_families())))
    layers = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 2, 4]))
    shared = family in ("granitemoehybrid", "nemotron_h", "qwen3_5_moe_text", *DENSE_AMONG_EXPERTS[:7])
    moe = shared or family in ("gpt_oss", "granitemoe", "minimax_m2", "mixtral", *DENSE_AMONG_EXPERTS)
    mamba = family in ("granitemoehybrid", "nemotron_h")
    halves = family == "nemotron_h" and layers == 2
    return Architecture(
        family=family,
        num_layers=layers,
        hidden_size=tp * draw(st.integers(1, 3)),
        num_attention_heads=groups * tp * draw(st.integers(1, 2)),
        num_query_groups=groups,
        head_dim=tp * draw(st.integers(1, 2)),
        ffn_hidden_size=tp * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 9)),
        tie_word_embeddings=draw(st.booleans()),
        num_experts=draw(st.integers(1, 3)) if moe else None,
        dense_layers=draw(st.sampled_from([(), (0,)])) if layers == 2 and family in DENSE_AMONG_EXPERTS else (),
        num_experts_per_tok=1 if moe else None,
        moe_ffn_hidden_size=tp * draw(st.integers(1, 3)) if moe else None,
        moe_latent_size=tp * draw(st.sampled_from([1, 2])) if family == "nemotron_h" and draw(st.booleans()) else None,
        shared_expert_ffn_hidden_size=tp * draw(st.integers(1, 3)) if shared else None,
        latent=LatentSizes(draw(st.sampled_from([None, 3])), 2, tp * 2) if family in LATENT else None,
        rotary_dim=1 if family in LATENT else None,
        indexer=IndexerSizes(2, 3, 4) if family in INDEXED else None,
        shared_choices=draw(st.sampled_from([(), (1,)])) if layers == 2 and family == "glm_moe_dsa" else (),
        attention_gate=family in DELTA_NETS,
        delta_net=DeltaNetSizes(tp * draw(st.integers(1, 2)), 4 * tp, 3, 2, 4) if family in DELTA_NETS else None,
        mamba=MambaSizes(4 * tp, 3, tp * draw(st.sampled_from([1, 2])), 2, 4) if mamba else None,
        linear_layers=(0,) if mamba or family in DELTA_NETS else (),
        layers_without_mlp=(0,) if halves else (),
        layers_without_mixer=(1,) if halves else (),
        predictors=draw(st.integers(0, most_predictors(family))),
    )


def most_predictors(family: str) -> int:
    if not built_in_families()[family].predictors:
        return 0
    return 1 if family in DELTA_NETS else 2


def padded_map(architecture: Architecture, tp: int) -> WeightMap:
    return WeightMap(architecture, -(-architecture.vocab_size // tp) * tp + tp)


def numbered(mapping: Mapping) -> list[Tensor]:
    """Hugging Face tensors in which every element has a number of its own: any misplacement shows."""
    start, tensors = 1, []
    for shape in mapping.hf_shapes:
        count = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + count, dtype=torch.float32).view(shape))
        start += count
    return tensors


@pytest.mark.parametrize("tp", [1, 2, 4])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_round_trip_through_shards_is_exact(tp: int, data: st.DataObject) -> None:
    for mapping in padded_map(data.draw(architectures(tp)), tp):
        tensors = numbered(mapping)
        full = to_mcore(mapping, tensors)
        assert tuple(full.shape) == mapping.mcore_shape
        shards = [shard(mapping, full, tp, rank) for rank in range(tp)]
        for rank, part in enumerate(shards):
            assert tuple(part.shape) == shard_shape(mapping, tp, rank)
        again = to_hf(mapping, merge(mapping, shards))
        assert list(again) == list(mapping.hf_names)
        for name, tensor in zip(mapping.hf_names, tensors, strict=True):
            assert torch.equal(again[name], tensor)


@pytest.mark.parametrize("tp", [1, 2, 4])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_parts_of_all_ranks_are_the_hugging_face_tensors(tp: int, data: st.DataObject) -> None:
    for mapping in padded_map(data.draw(architectures(tp)), tp):
        tensors = dict(zip(mapping.hf_names, numbered(mapping), strict=True))
        full = to_mcore(mapping, list(tensors.values()))
        ranks = range(tp if mapping.tp_dim is not None else 1)
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        written = 0
        for rank in ranks:
            for part, tensor in hf_parts(mapping, shard(mapping, full, len(ranks), rank), len(ranks), rank):
                assert part.shape == tuple(found[part.name].shape)
                found[part.name].narrow(part.dim, part.start, part.size).copy_(tensor)
                written += tensor.numel()
        assert written == sum(tensor.numel() for tensor in tensors.values())
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor), name


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_element_has_one_owner(data: st.DataObject) -> None:
    tp = 2
    for mapping in padded_map(data.draw(architectures(tp)), tp):
        full = to_mcore(mapping, numbered(mapping))
        held = torch.cat([shard(mapping, full, tp, rank).reshape(-1) for rank in range(tp)])
        copies = tp if mapping.tp_dim is None else 1
        assert torch.equal(held.sort().values, full.reshape(-1).repeat(copies).sort().values)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_to_hf_maps_gradients(data: st.DataObject) -> None:
    """d loss / d HF tensor = to_hf(d loss / d mcore tensor): the map only moves elements."""
    for mapping in padded_map(data.draw(architectures()), 4):
        leaves = [tensor.requires_grad_() for tensor in numbered(mapping)]
        full = to_mcore(mapping, leaves)
        weight = torch.randn(full.shape)
        (full * weight).sum().backward()
        for name, leaf in zip(mapping.hf_names, leaves, strict=True):
            assert leaf.grad is not None
            assert torch.equal(to_hf(mapping, weight)[name], leaf.grad)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_row_segments_read_what_to_mcore_builds(data: st.DataObject) -> None:
    for mapping in padded_map(data.draw(architectures()), 2):
        tensors = numbered(mapping)
        full = to_mcore(mapping, tensors)
        rows = mapping.mcore_shape[0]
        low = data.draw(st.integers(0, rows))
        high = data.draw(st.integers(low, rows))
        padding = torch.zeros_like(full)
        parts = [
            (padding if segment.source is None else tensors[segment.source])[segment.start : segment.stop]
            for segment in mapping.row_segments(low, high)
        ]
        assert torch.equal(torch.cat(parts) if parts else full[:0], full[low:high])


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_hf_runs_say_where_rows_went(data: st.DataObject) -> None:
    for mapping in padded_map(data.draw(architectures()), 2):
        tensors = numbered(mapping)
        full = to_mcore(mapping, tensors)
        for source, tensor in enumerate(tensors):
            runs = mapping.hf_runs(source)
            assert torch.equal(torch.cat([full[row : row + count] for _, row, count in runs]), tensor)
            assert [first for first, _, _ in runs] == sorted(first for first, _, _ in runs)


def test_query_groups_are_interleaved_as_attention_splits_them() -> None:
    architecture = Architecture("qwen2", 1, 2, 4, 2, 1, 3, 5, attention_bias=True)
    mapping = WeightMap(architecture)["decoder.layers.0.self_attention.linear_qkv.bias"]
    q, k, v = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])
    full = to_mcore(mapping, [q, k, v])
    assert full.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard(mapping, full, 2, 1).tolist() == [2, 3, 11, 21]


def test_gates_of_attention_are_interleaved_by_head_on_disk_and_by_group_here() -> None:
    """A query and its gate for each head; queries, gates, key and value for each group."""
    mapping = WeightMap(NEXT)["decoder.layers.1.self_attention.linear_qkv.weight"]
    q = torch.tensor([[0.0], [100.0], [1.0], [101.0], [2.0], [102.0], [3.0], [103.0]])
    full = to_mcore(mapping, [q, torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])])
    assert full.squeeze(1).tolist() == [0, 1, 100, 101, 10, 20, 2, 3, 102, 103, 11, 21]


def test_ranks_have_whole_key_heads_of_a_gated_delta_net() -> None:
    """Of two key heads with two value heads each; q, k, v, z and b, a of a key head lie together on disk."""
    weight_map = WeightMap(NEXT)
    mapping = weight_map["decoder.layers.0.self_attention.in_proj.weight"]
    names = [name.rpartition("linear_attn.")[2] for name in mapping.hf_names]
    assert names == ["in_proj_qkvz.weight", "in_proj_ba.weight"]
    full = to_mcore(mapping, [torch.arange(12.0)[:, None], 100 + torch.arange(8.0)[:, None]])
    assert shard(mapping, full, 2, 1).squeeze(1).tolist() == [6, 7, 8, 9, 10, 11, 104, 105, 106, 107]
    convolution = weight_map["decoder.layers.0.self_attention.conv1d.weight"]
    # Queries of all heads, then keys, then values.
    full = to_mcore(convolution, [torch.arange(8.0)[:, None, None].expand(8, 1, 4)])
    assert shard(convolution, full, 2, 0)[:, 0, 0].tolist() == [0, 2, 4, 5]
    assert shard(convolution, full, 2, 1)[:, 0, 0].tolist() == [1, 3, 6, 7]
    present = {mapping.mcore_name for mapping in weight_map}
    assert "decoder.layers.0.self_attention.linear_qkv.weight" not in present
    assert "decoder.layers.1.self_attention.A_log" not in present


def test_ranks_have_whole_groups_of_mamba() -> None:
    """Of two groups with two heads of one feature each; on disk gates, values, two vectors of each group, steps."""
    sizes = MambaSizes(heads=4, head_dim=1, groups=2, state_dim=1, kernel=4)
    hybrid = Architecture("granitemoehybrid", 2, 1, 4, 2, 1, 4, 5, mamba=sizes, linear_layers=(0,))
    weight_map = WeightMap(hybrid)
    mapping = weight_map["decoder.layers.0.self_attention.in_proj.weight"]
    full = to_mcore(mapping, [torch.arange(16.0)[:, None]])
    assert shard(mapping, full, 2, 0).squeeze(1).tolist() == [0, 1, 4, 5, 8, 10, 12, 13]
    assert shard(mapping, full, 2, 1).squeeze(1).tolist() == [2, 3, 6, 7, 9, 11, 14, 15]
    for name, shape in (("weight", (8, 1, 4)), ("bias", (8,))):
        convolution = weight_map[f"decoder.layers.0.self_attention.conv1d.{name}"]
        full = to_mcore(convolution, [torch.arange(8.0).view(8, *[1] * (len(shape) - 1)).expand(shape)])
        assert shard(convolution, full, 2, 1).reshape(4, -1)[:, 0].tolist() == [2, 3, 5, 7]
    present = {mapping.mcore_name for mapping in weight_map}
    assert "decoder.layers.0.self_attention.linear_qkv.weight" not in present
    assert "decoder.layers.1.self_attention.D" not in present
    assert {f"decoder.layers.{layer}.pre_mlp_layernorm.weight" for layer in (0, 1)} <= present


def test_a_half_layer_has_one_norm_and_what_it_norms() -> None:
    architecture = preset("nemotron-3-nano-30b-a3b")
    per_layer: dict[int, set[str]] = {}
    for mapping in WeightMap(architecture):
        if mapping.layer is not None and mapping.expert in (None, 0):
            name = mapping.mcore_name.removeprefix(f"decoder.layers.{mapping.layer}.")
            per_layer.setdefault(mapping.layer, set()).add(name.partition(".")[0])
            assert all(hf.startswith(f"backbone.layers.{mapping.layer}.") for hf in mapping.hf_names)
    mixer, mlp = {"input_layernorm", "self_attention"}, {"pre_mlp_layernorm", "mlp"}
    pattern = architecture.hf_config["hybrid_override_pattern"]
    assert [per_layer[layer] for layer in range(52)] == [mlp if kind == "E" else mixer for kind in pattern]


def test_gate_and_up_are_split_each_by_itself() -> None:
    mapping = WeightMap(Architecture("llama", 1, 1, 1, 1, 1, 4, 5))["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    full = to_mcore(mapping, [gate, up])
    assert shard(mapping, full, 2, 0).squeeze(1).tolist() == [0, 1, 10, 11]
    assert shard(mapping, full, 2, 1).squeeze(1).tolist() == [2, 3, 12, 13]


def test_vocabulary_padding_is_zero_and_is_dropped() -> None:
    mapping = WeightMap(Architecture("llama", 1, 2, 1, 1, 1, 4, 3), 8)["embedding.word_embeddings.weight"]
    full = to_mcore(mapping, [torch.ones(3, 2)])
    assert full.shape == (8, 2) and full[3:].eq(0).all()
    full[3:] = 7
    assert torch.equal(to_hf(mapping, full)["model.embed_tokens.weight"], torch.ones(3, 2))


def test_tied_output_layer_reads_the_embedding_and_is_not_exported() -> None:
    untied = Architecture("qwen2", 1, 2, 1, 1, 2, 4, 6, attention_bias=True)
    tied = WeightMap(dataclasses.replace(untied, tie_word_embeddings=True))
    assert tied["output_layer.weight"].hf_names == ("model.embed_tokens.weight",)
    assert "output_layer.weight" not in [mapping.mcore_name for mapping in tied.exported()]
    assert WeightMap(untied)["output_layer.weight"].hf_names == ("lm_head.weight",)


def test_names_of_the_transformer_engine_spec() -> None:
    layer = "decoder.layers.7."
    assert canonical_name(layer + "self_attention.linear_qkv.layer_norm_weight") == layer + "input_layernorm.weight"
    assert canonical_name(layer + "mlp.linear_fc1.layer_norm_weight") == layer + "pre_mlp_layernorm.weight"
    assert (
        canonical_name(layer + "mlp.experts.linear_fc2.weight13")
        == layer + "mlp.experts.local_experts.13.linear_fc2.weight"
    )
    for name in (layer + "mlp.linear_fc1.weight", "output_layer.weight", layer + "self_attention.q_layernorm.weight"):
        assert canonical_name(name) == name


def test_checkpoint_places() -> None:
    moe = Architecture("qwen3_moe", 3, 2, 1, 1, 2, 4, 6, num_experts=2, num_experts_per_tok=1, moe_ffn_hidden_size=4)
    weight_map = WeightMap(moe)
    place = checkpoint_place(weight_map["decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"], moe)
    assert place.key == "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert (place.index, place.axes) == ((2, 1), (3, 2))
    norm = weight_map["decoder.layers.1.pre_mlp_layernorm.weight"]
    assert checkpoint_place(norm, moe).key == "decoder.layers.pre_mlp_layernorm.weight"
    mixed = dataclasses.replace(moe, dense_layers=(0,))
    place = checkpoint_place(WeightMap(mixed)["decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"], mixed)
    assert place.key == "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"
    assert (place.index, place.axes) == ((1,), (2,))
    keys = [checkpoint_place(WeightMap(mixed)[f"decoder.layers.{n}.pre_mlp_layernorm.weight"], mixed) for n in (0, 1)]
    assert [each.key for each in keys] == [
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
    ]
    dense = Architecture("qwen3", 3, 2, 1, 1, 2, 4, 6)
    assert checkpoint_place(norm, dense).key == "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    tied = dataclasses.replace(dense, tie_word_embeddings=True)
    output = WeightMap(tied)["output_layer.weight"]
    assert checkpoint_place(output, tied).key == "embedding.word_embeddings.weight"


MIMO = {
    "model_type": "mimo",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 4,
    "vocab_size": 16,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 2,
}


def test_layers_for_multi_token_prediction_are_parameters_where_they_are_asked_for() -> None:
    architecture = Architecture.from_hf_config(MIMO)
    alone, model = WeightMap(architecture), WeightMap(architecture.with_predictors())
    added = [mapping for mapping in model if mapping.mcore_name not in alone]
    assert len(added) == 2 * 11 and all(name.startswith("model.mtp_layers.") for m in added for name in m.hf_names)
    projection = model["mtp.layers.1.eh_proj.weight"]
    assert projection.hf_names == ("model.mtp_layers.1.input_proj.weight",) and projection.mcore_shape == (8, 16)
    # Of a layer that projects the hidden state first, the first of Megatron-Core's norms is that of the hidden state.
    assert model["mtp.layers.0.enorm.weight"].hf_names == ("model.mtp_layers.0.hidden_layernorm.weight",)
    norm = model["mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.layer_norm_weight"]
    assert norm.hf_names == ("model.mtp_layers.0.input_layernorm.weight",)
    place = checkpoint_place(norm, model.architecture)
    assert place.key == "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 0}, r"no layers for multi-token prediction \(num_nextn_predict_layers\)"),
        ({"model_type": "llama"}, "of family llama are carried along and not trained"),
    ],
)
def test_layers_for_multi_token_prediction_that_a_model_lacks(change, message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        Architecture.from_hf_config(MIMO | change).with_predictors()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [t[0][:, :1], *t[1:]], r"layers\.0\.self_attn\.q_proj\.weight has shape \(4, 1\).*implies \(4, 2\)"),
        (lambda t: [t[0], t[1].bfloat16(), t[2]], r"k_proj\.weight has dtype torch.bfloat16, but .*q_proj\.weight has"),
        (lambda t: [x.to(torch.int8) for x in t], r"q_proj\.weight has dtype torch.int8"),
    ],
)
def test_unfit_tensors_are_named(change, message: str) -> None:
    mapping = WeightMap(Architecture("llama", 1, 2, 4, 2, 1, 4, 5))["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(WeightMapError, match=message):
        to_mcore(mapping, change(numbered(mapping)))


def test_other_errors_name_the_parameter() -> None:
    architecture = Architecture("llama", 1, 3, 1, 1, 3, 5, 5)
    weight_map = WeightMap(architecture)
    mapping = weight_map["decoder.layers.0.mlp.linear_fc1.weight"]
    full = to_mcore(mapping, numbered(mapping))
    with pytest.raises(WeightMapError, match=r"layers\.0\.mlp\.linear_fc1\.weight: 5 rows do not divide by TP 2"):
        shard(mapping, full, 2, 0)
    with pytest.raises(WeightMapError, match=r"linear_fc1\.weight has shape \(9, 3\), expected \(10, 3\)"):
        to_hf(mapping, full[:9])
    with pytest.raises(WeightMapError, match=r"linear_fc1\.weight: the part of tensor parallel rank 0 of 1"):
        merge(mapping, [full[:9]])
    with pytest.raises(WeightMapError, match=r"decoder\.layers\.0\.self_attention\.q_layernorm\.weight is not in"):
        weight_map["decoder.layers.0.self_attention.q_layernorm.weight"]
    with pytest.raises(WeightMapError, match="padded vocabulary size 4 is smaller than vocab_size=5"):
        WeightMap(architecture, 4)
