"""Layouts that do not fit a model are refused with the key that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conversion.model.architecture import Architecture
from megatron_retool.config import ConfigError, LearnerConfig
from megatron_retool.learner import parallel
from megatron_retool.learner.parallel import padded_vocab_size, resolve_device, validate_layout

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
TP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (DENSE, {"world_size": 3, TP: 3}, r"tensor_model_parallel_size=3 does not divide .*num_attention_heads=8"),
        (DENSE, {"world_size": 6, TP: 4}, r"world_size=6 is not divisible by TP x PP x CP = 4"),
        (DENSE, {"world_size": 3, PP: 3}, r"num_hidden_layers=8 is not divisible by PP x VPP = 3"),
        (DENSE, {"world_size": 4, PP: 4, VPP: 4}, r"num_hidden_layers=8 is not divisible by PP x VPP = 16"),
        (DENSE, {"world_size": 2, PP: 2, VPP: 2}, r"wrong gradients.*use PP >= 4, or no VPP"),
        (DENSE, {VPP: 2}, r"virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1"),
        (DENSE, {"sequence_parallel": True}, r"sequence_parallel=true needs .*tensor_model_parallel_size > 1"),
        (DENSE, {"world_size": 2, EP: 2}, r"need a mixture-of-experts model, which qwen2 is not"),
        (DENSE, {CP: 0}, r"context_parallel_size=0 must be at least 1"),
        (
            DENSE,
            {"world_size": 4, CP: 4, "max_tokens_per_micro_batch": 7},
            r"smaller than the layout's padding unit, 8",
        ),
        (EXPERTS, {"world_size": 2, TP: 2}, r"needs learner.sequence_parallel=true"),
        (EXPERTS, {"world_size": 3, EP: 3}, r"expert_model_parallel_size=3 does not divide .*num_experts=8"),
        (
            EXPERTS,
            {"world_size": 8, TP: 8, "sequence_parallel": True},
            r"expert_tensor_parallel_size=8 does not divide .*moe_intermediate_size=12",
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
        validate_layout(LearnerConfig(**settings), architecture)


def test_query_groups_may_be_fewer_than_ranks_but_not_uneven() -> None:
    assert validate_layout(LearnerConfig(world_size=8, tensor_model_parallel_size=8), DENSE).tensor == 8
    uneven = Architecture(**{**vars(DENSE), "num_attention_heads": 24, "num_query_groups": 3, "hidden_size": 192})
    with pytest.raises(ConfigError, match=r"=2 neither divides .*num_key_value_heads=3 nor is a multiple"):
        validate_layout(LearnerConfig(world_size=2, tensor_model_parallel_size=2), uneven)


def test_layout_of_products() -> None:
    layout = validate_layout(
        LearnerConfig(
            world_size=32,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=2,
            context_parallel_size=2,
        ),
        DENSE,
    )
    assert (layout.data, layout.sequence_multiple, layout.micro_batch_multiple) == (2, 4, 8)


def test_vocabulary_padding_is_the_same_for_common_layouts() -> None:
    assert [padded_vocab_size(151936, tp) for tp in (1, 2, 4, 8)] == [151936] * 4
    assert [padded_vocab_size(101, tp) for tp in (1, 2, 4)] == [104, 112, 128]


def test_cuda_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner.device=cuda, but torch finds no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        resolve_device("cpu")


def test_nccl_connects_all_ranks_before_some_of_them_exchange_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = validate_layout(LearnerConfig(), DENSE)
    called: list[str] = []
    monkeypatch.setattr(parallel, "_active", None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("is_initialized", "init_process_group", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: called.append(name))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(parallel.parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        parallel.parallel_state, "initialize_model_parallel", lambda **_: called.append("initialize_model_parallel")
    )
    monkeypatch.setattr(parallel.tensor_parallel, "model_parallel_cuda_manual_seed", lambda *_, **__: None)
    parallel.initialize(layout, torch.device("cuda", 0), seed=0)
    assert [name for name in called if name != "is_initialized"] == [
        "init_process_group",
        "all_reduce",
        "initialize_model_parallel",
    ]
    called.clear()
    parallel._connect(torch.device("cpu"))
    assert not called
