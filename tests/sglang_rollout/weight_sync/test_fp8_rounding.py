import pytest
import torch
from transformers import Qwen2Config

from conversion.model.block_fp8 import dequantize_blockwise, quantize_blockwise
from megatron_retool.config import ConfigError, load_config
from sglang_rollout.weight_sync.push import make_weight_sync


def test_linear_weights_alone_are_rounded_and_travel_in_the_engines_dtype(tmp_path):
    Qwen2Config(hidden_size=160, num_attention_heads=12, head_dim=16, num_key_value_heads=4).save_pretrained(tmp_path)
    overrides = ["weight_sync.method=tensor", "weight_sync.round_to_fp8=true", f"model.path={tmp_path}"]
    config = load_config(None, overrides)
    generator = torch.Generator().manual_seed(0)
    sent = {
        "model.layers.0.self_attn.q_proj.weight": torch.randn(192, 160, generator=generator),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(192, generator=generator),
        "model.embed_tokens.weight": torch.randn(64, 160, generator=generator),
    }
    with make_weight_sync(config, ["http://127.0.0.1:9"]) as sync:
        sync._infos = {"http://127.0.0.1:9": {"dtype": "bfloat16"}}
        (bucket,) = sync._wire_buckets([list(sent.items())])
    received = dict(bucket)
    assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.q_proj.weight"
    rounded = dequantize_blockwise(*quantize_blockwise(sent[name]))
    assert 0.01 < (rounded - sent[name]).abs().max() < 0.3
    assert torch.equal(received.pop(name), rounded.bfloat16())
    for other, tensor in received.items():
        assert torch.equal(tensor, sent[other].bfloat16())


def test_imitation_and_real_fp8_exclude_each_other():
    with pytest.raises(ConfigError, match="round_to_fp8"):
        load_config(None, ["weight_sync.round_to_fp8=true", "rollout.engine.quantization=fp8"])
