"""Multi-head latent attention against transformers' module; tests/parity has whole models and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conversion.model.attention_config import LatentSizes
from conversion.model.layout import ParallelLayout
from megatron_retool.learner import cpu
from megatron_retool.learner.attention import LocalPackedSequences, RotaryTable
from megatron_retool.learner.attention_pieces import Bucket

TOKENS, HIDDEN, HEADS = 11, 32, 4
NAMES = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}


def transformers_attention(**sizes: Any) -> tuple[Any, Any]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=20,
        qk_rope_head_dim=8, qk_nope_head_dim=16, **sizes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("query_rank", [None, 24])
@pytest.mark.parametrize(("value_dim", "interleaved"), [(12, True), (40, False)])
def test_it_is_transformers(query_rank: int | None, value_dim: int, interleaved: bool) -> None:
    cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner import parallel
    from megatron_retool.learner.latent_attention import LatentAttention

    torch.manual_seed(0)
    theirs, rotary = transformers_attention(q_lora_rank=query_rank, v_head_dim=value_dim, rope_interleave=interleaved)
    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=24, use_cpu_initialization=True
    )
    ours = LatentAttention(config, 1, LatentSizes(query_rank, 20, value_dim, interleaved), rotated=8)
    weights = dict(theirs.named_parameters())
    names = {name: f"{NAMES[name.removesuffix('.weight')]}.weight" for name, _ in ours.named_parameters()}
    assert sorted(names.values()) == sorted(weights)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            weights[names[name]].normal_(1.0 if "norm" in name else 0.0, 0.2)
            parameter.copy_(weights[names[name]])

    hidden = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    positions = torch.arange(TOKENS)
    cos, sin = RotaryTable(rotary.inv_freq).at(positions, TOKENS, torch.float32)
    packed = LocalPackedSequences(buckets=(Bucket(TOKENS, 1, TOKENS, None, None),), cos=cos, sin=sin)
    found, _ = ours(hidden.transpose(0, 1), packed_seq_params=packed)
    causal = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(hidden, rotary(hidden, positions[None]), causal)
    torch.testing.assert_close(found.transpose(0, 1), expected)
    upstream = torch.randn(expected.shape)
    asked = [hidden, *(weights[name] for name in names.values())]
    gradients = torch.autograd.grad(expected, asked, upstream)
    own = torch.autograd.grad(found.transpose(0, 1), [hidden, *ours.parameters()], upstream)
    for name, mine, other in zip(["hidden", *names], own, gradients, strict=True):
        assert float((mine - other).norm() / other.norm()) < 1e-5, name
