"""Which operators a model has, and which of them ``learner.match_engine=exact`` knows."""

from __future__ import annotations

import pytest

from conversion.model.architecture import Architecture
from conversion.model.model_operators import OPERATORS, missing_operators, operators_of
from megatron_retool.planning.models import MODELS


@pytest.mark.parametrize(
    ("model", "absent"),
    [
        ("qwen3-8b", {"embedding", "delta_net", "mamba", "router", "experts"}),
        ("qwen3-30b-a3b", {"embedding", "delta_net", "mamba", "mlp_up", "activation", "mlp_down"}),
        ("deepseek-v3", {"embedding", "delta_net", "mamba"}),
        ("qwen1.5-moe-a2.7b", {"embedding", "delta_net", "mamba"}),
        ("qwen3.5-9b", {"embedding", "mamba", "router", "experts"}),
        ("qwen3-next-80b-a3b", {"embedding", "mamba"}),
        ("gemma-3-1b", {"delta_net", "mamba", "router", "experts"}),
        ("granite-3.2-2b", {"delta_net", "mamba", "router", "experts"}),
        ("granite-4.0-micro", {"delta_net", "mamba", "router", "experts"}),
        ("granite-4.0-h-micro", {"delta_net", "router", "experts"}),
        ("granite-4.0-h-tiny", {"delta_net"}),
    ],
)
def test_a_models_operators(model: str, absent: set[str]) -> None:
    architecture = Architecture.from_hf_config(MODELS[model])
    assert operators_of(architecture) == tuple(each for each in OPERATORS if each not in absent)
    assert missing_operators(architecture) == []


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("gpt-oss-20b", "attention sinks"),
        ("deepseek-v3.2", "sparse attention"),
        ("nemotron-h-8b", "layers of one half"),
    ],
)
def test_what_is_missing_is_said(model: str, missing: str) -> None:
    assert missing in missing_operators(Architecture.from_hf_config(MODELS[model]))
