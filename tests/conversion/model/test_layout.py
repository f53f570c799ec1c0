"""Layouts that do not fit a model are refused with the key that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conversion.model.architecture import Architecture
from conversion.model.attention_config import DeltaNetSizes, IndexerSizes, LatentSizes
from conversion.model.layout import padded_vocab_size
from megatron_retool.config import ConfigError, LearnerConfig
from megatron_retool.planning.models import MODELS

DENSE = Architecture(
    family="qwen2",
    num_layers=8,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=8,
    ffn_hidden_size=96,
    vocab_size=512,
)
EXPERTS = Architecture(
    family="qwen3_moe",
    num_layers=8,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=8,
    ffn_hidden_size=96,
    vocab_size=512,
    num_experts=8,
    num_experts_per_tok=2,
    moe_ffn_hidden_size=12,
)
SINKS = replace(EXPERTS, family="gpt_oss", linear_bias=True, attention_sinks=True)
LATENT = replace(EXPERTS, family="deepseek_v3", rotary_dim=4, latent=LatentSizes(None, 16, 8))
SPARSE = replace(LATENT, family="glm_moe_dsa", indexer=IndexerSizes(4, 8, 16), shared_choices=(1, 4, 5))
LINEAR = replace(
    EXPERTS, family="qwen3_next", attention_gate=True, qk_norm=True, linear_layers=(0, 1, 2, 4, 5, 6),
    delta_net=DeltaNetSizes(key_heads=4, value_heads=8, key_dim=8, value_dim=12, kernel=4),
)  # fmt: skip
MAMBA = Architecture.from_hf_config(MODELS["granite-4.0-h-micro"])
TP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def test_which_layers_a_chunk_has() -> None:
    layout = LearnerConfig(**{"world_size": 4, PP: 4, VPP: 2}).layout(DENSE)
    chunks = [(stage, chunk) for chunk in range(2) for stage in range(4)]
    assert [list(layout.layers(DENSE, *place)) for place in chunks] == [[layer] for layer in range(8)]
    two = LearnerConfig(**{"world_size": 2, PP: 2}).layout(DENSE)
    assert [list(two.layers(DENSE, stage)) for stage in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (
            LINEAR,
            {"world_size": 8, TP: 2, "sequence_parallel": True, CP: 4},
            r"linear_num_key_heads=4 is not divisible by TP x CP = 8, and context-parallel ranks share out",
        ),
        (
            replace(LINEAR, delta_net=replace(LINEAR.delta_net, key_heads=2)),
            {"world_size": 4, TP: 4, "sequence_parallel": True},
            r"tensor_model_parallel_size=4 does not divide the model's linear_num_key_heads=2",
        ),
        (MAMBA, {"world_size": 2, TP: 2}, r"tensor_model_parallel_size=2 does not divide .*mamba_n_groups=1"),
        (MAMBA, {"world_size": 128, CP: 128}, r"mamba_n_heads=64 is not divisible by TP x CP = 128"),
        (DENSE, {"world_size": 3, TP: 3}, r"tensor_model_parallel_size=3 does not divide .*num_attention_heads=8"),
        (DENSE, {"world_size": 6, TP: 4}, r"world_size=6 is not divisible by TP x PP x CP = 4"),
        (DENSE, {"world_size": 3, PP: 3}, r"num_hidden_layers=8 is not divisible by PP x VPP = 3"),
        (DENSE, {"world_size": 4, PP: 4, VPP: 4}, r"num_hidden_layers=8 is not divisible by PP x VPP = 16"),
        (DENSE, {VPP: 2}, r"virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1"),
        (DENSE, {"sequence_parallel": True}, r"sequence_parallel=true needs .*tensor_model_parallel_size > 1"),
        (DENSE, {"world_size": 2, EP: 2}, r"need a mixture-of-experts model, which qwen2 is not"),
        (DENSE, {CP: 0}, r"context_parallel_size=0 must be at least 1"),
        (
            DENSE,
            {"world_size": 4, CP: 4, "max_tokens_per_micro_batch": 7},
            r"smaller than the layout's padding unit, 8",
        ),
        (
            SPARSE,
            {"world_size": 2, PP: 2},
            r"layer 4 of the model sees the keys .*, and PP x VPP = 2 puts it on another",
        ),
        (SPARSE, {"world_size": 4, PP: 4, VPP: 2}, r"layer 1 of the model sees the keys .*, and PP x VPP = 8"),
        (EXPERTS, {"world_size": 2, TP: 2}, r"needs learner.sequence_parallel=true"),
        (EXPERTS, {"world_size": 3, EP: 3}, r"expert_model_parallel_size=3 does not divide .*num_experts=8"),
        (
            EXPERTS,
            {"world_size": 8, TP: 8, "sequence_parallel": True},
            r"expert_tensor_parallel_size=8 does not divide .*moe_intermediate_size=12",
        ),
        (
            SINKS,
            {"world_size": 2, TP: 2, "sequence_parallel": True},
            r"expert_tensor_parallel_size=2 would add the bias of an expert .* gpt_oss model has biased .* set it to 1",
        ),
        (
            EXPERTS,
            {"world_size": 4, TP: 2, EP: 4, "sequence_parallel": True},
            r"world_size=4 is not divisible by ETP x EP x PP = 8",
        ),
    ],
)
def test_what_does_not_fit_is_named(architecture: Architecture, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(**settings).layout(architecture)


def test_query_groups_may_be_fewer_than_ranks_but_not_uneven() -> None:
    assert LearnerConfig(world_size=8, tensor_model_parallel_size=8).layout(DENSE).tensor == 8
    uneven = replace(DENSE, num_attention_heads=24, num_query_groups=3, hidden_size=192)
    with pytest.raises(ConfigError, match=r"=2 neither divides .*num_key_value_heads=3 nor is a multiple"):
        LearnerConfig(world_size=2, tensor_model_parallel_size=2).layout(uneven)


def test_layout_of_products() -> None:
    layout = LearnerConfig(
        world_size=32,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        context_parallel_size=2,
    ).layout(DENSE)
    assert (layout.data, layout.sequence_multiple, layout.micro_batch_multiple) == (2, 4, 8)


def test_vocabulary_padding_is_the_same_for_common_layouts() -> None:
    assert [padded_vocab_size(151936, tp) for tp in (1, 2, 4, 8)] == [151936] * 4
    assert [padded_vocab_size(101, tp) for tp in (1, 2, 4)] == [104, 112, 128]


def test_everything_that_does_not_divide_is_said_at_once() -> None:
    sizes = {TP: 3, "pipeline_model_parallel_size": 3, EP: 3}
    words = ["world_size=8 is not divisible by TP x PP x CP = 9", "ETP x EP x PP = 27", "num_attention_heads=8",
             "num_hidden_layers", "num_experts=8"]  # fmt: skip
    with pytest.raises(ConfigError) as error:
        LearnerConfig(world_size=8, **sizes).layout(EXPERTS)
    for word in words:
        assert str(error.value).count(word) == 1
    with pytest.raises(ConfigError) as error:
        LearnerConfig(world_size=27, **{**sizes, "expert_tensor_parallel_size": 1}).layout(EXPERTS)
    for word in words[2:]:
        assert word in str(error.value)
