"""Rotary positions by themselves: frequencies against transformers', windows and scales by layer."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conversion.model.architecture import Architecture
from megatron_retool.planning.models import MODELS
from tests.kit.model_variants import FACTOR, LONG_TEXTS, PHI_3_5_MINI, PHI_4_MINI

STRETCHED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, narrow": {"factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 2.0, "truncate": False},
    "yarn, mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "longrope": {
        "short_factor": [1.0 + 0.01 * pair for pair in range(64)],
        "long_factor": [1.0 + pair for pair in range(64)],
        "original_max_position_embeddings": 8192,
    },
    "yarn, attention_factor": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.8},
}


@pytest.mark.parametrize("name", STRETCHED)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_frequencies_are_those_of_transformers(name: str, key: str) -> None:
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    from conversion.model.rotary import inverse_frequencies, softmax_scale

    scaling = {"rope_type": name.partition(",")[0], **STRETCHED[name]}
    base = {"rope_theta": 1000000.0}
    config = {
        **MODELS["qwen2.5-7b"],
        **({key: scaling, **base} if key == "rope_scaling" else {key: {**scaling, **base}}),
    }
    expected = Qwen2RotaryEmbedding(AutoConfig.for_model(**config))
    architecture = Architecture.from_hf_config(config)
    torch.testing.assert_close(inverse_frequencies(architecture), expected.inv_freq, rtol=2e-6, atol=0)
    factor = expected.attention_scaling**2 / math.sqrt(architecture.head_dim)
    assert softmax_scale(architecture) == pytest.approx(factor, rel=1e-12)


def test_layers_with_a_window_have_plain_positions() -> None:
    from conversion.model.rotary import inverse_frequencies, softmax_scale

    architecture = Architecture.from_hf_config(MODELS["olmo-3-7b"])
    plain = Architecture.from_hf_config({**MODELS["olmo-3-7b"], "rope_scaling": None})
    assert torch.equal(inverse_frequencies(architecture, local=True), inverse_frequencies(plain))
    assert not torch.equal(inverse_frequencies(architecture), inverse_frequencies(plain))
    assert softmax_scale(architecture, local=True) == softmax_scale(plain) == 1 / math.sqrt(128)
    assert architecture.windows == (4096, 4096, 4096, None) * 8


def test_a_factor_on_a_part_of_each_head_is_the_queries() -> None:
    from conversion.model.rotary import query_factor, softmax_scale

    whole, part = Architecture.from_hf_config(PHI_3_5_MINI), Architecture.from_hf_config(PHI_4_MINI)
    squared = 1 + math.log(32) / math.log(4096)
    assert softmax_scale(whole) == pytest.approx(squared / math.sqrt(96)) and query_factor(whole) == 1.0
    assert softmax_scale(part) == 1 / math.sqrt(128) and query_factor(part) == pytest.approx(squared)
    assert (whole.longest_text, part.longest_text) == (4096, 4096)
    assert Architecture.from_hf_config(LONG_TEXTS).longest_text == 131072
    assert query_factor(Architecture.from_hf_config(LONG_TEXTS)) == pytest.approx(FACTOR**2)


def test_each_layer_has_its_own_window() -> None:
    from megatron_retool.learner.attention import PackedAttention

    settings: Any = SimpleNamespace(
        kv_channels=8, window_size=(15, 0), window_attn_skip_freq=[1, 1, 0, 1], softmax_type="vanilla"
    )
    group = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    layers = [PackedAttention(settings, number, None, "self", pg_collection=group) for number in (1, 2, 3, 4)]
    assert [layer.window for layer in layers] == [16, 16, None, 16]


def test_queries_grow_with_their_position() -> None:
    from megatron_retool.learner.positions import query_growth

    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
    config = {**MODELS["ministral-3-8b"], "rope_parameters": rope}
    found = query_growth(Architecture.from_hf_config(config), torch.tensor([0, 3, 4, 11]))
    assert found is not None and found.shape == (4, 1, 1, 1)
    assert found.flatten().tolist() == pytest.approx([1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)])
    assert query_growth(Architecture.from_hf_config(MODELS["qwen3-0.6b"]), torch.tensor([9])) is None
