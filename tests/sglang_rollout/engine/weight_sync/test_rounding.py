"""Weights that engines get rounded. That a real engine then computes with them is test_real_engine's."""

from contextlib import closing

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import dequantize_blockwise, quantize_blockwise
from megatron_retool.config import ConfigError, ModelConfig, load_config
from megatron_retool.parity.referee.referee_model import engine_format
from sglang_rollout.engine.transformers_engine import TransformersEngine
from sglang_rollout.engine.weight_sync.base import ServerWeightSync
from sglang_rollout.engine.weight_sync.push import make_weight_sync
from sglang_rollout.engine.weight_sync.quantization import Rounding, round_to_integers, weight_conversion

ROW = [7.0, 3.4, -1.2, 0.4, 14.0]


@pytest.mark.parametrize(
    ("bits", "group_size", "expected"),
    [
        # Scales 7/7, 1.2/7 and, of the last input alone, 14/7.
        (4, 2, [7.0, 3.0, -1.2, 0.4 * 6 / 7, 14.0]),
        (4, 4, [7.0, 3.0, -1.0, 0.0, 14.0]),
        # One scale, 14/7 and 14/3 and 14/127.
        (4, 32, [8.0, 4.0, -2.0, 0.0, 14.0]),
        (3, 32, [14 / 3 * 2, 14 / 3, 0.0, 0.0, 14.0]),
        (8, 32, [14 / 127 * 64, 14 / 127 * 31, 14 / 127 * -11, 14 / 127 * 4, 14.0]),
    ],
)
def test_integers_of_each_group_of_inputs(bits, group_size, expected):
    weight = torch.tensor([ROW, [-value for value in ROW], [0.0] * 5])
    rounded = round_to_integers(weight, bits, group_size)
    torch.testing.assert_close(rounded, torch.tensor([expected, [-value for value in expected], [0.0] * 5]))
    assert round_to_integers(weight.bfloat16(), bits, group_size).dtype == torch.bfloat16


def test_rounding_twice_is_rounding_once_and_leaves_as_many_values_as_the_grid_has():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    for bits, values in ((3, 7), (4, 15)):
        rounded = round_to_integers(weight, bits, 32)
        torch.testing.assert_close(round_to_integers(rounded, bits, 32), rounded)
        groups = rounded.view(-1, 32)
        assert max(len(group.unique()) for group in groups) <= values
        scale = weight.view(-1, 32).abs().amax(-1, keepdim=True) / (values // 2)
        assert ((rounded - weight).view(-1, 32).abs() <= scale / 2 * (1 + 1e-5)).all()


def test_experts_are_rounded_and_embeddings_norms_routers_and_the_output_layer_are_not(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    Qwen3MoeConfig(vocab_size=64, num_experts=2, num_experts_per_tok=1, **sizes, **heads).save_pretrained(tmp_path)
    names = Rounding(ModelConfig(path=str(tmp_path)), "int4").names
    layer = "model.layers.0"
    attention = {f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo"}
    experts = {f"{layer}.mlp.experts.{e}.{part}_proj.weight" for e in (0, 1) for part in ("gate", "up", "down")}
    assert names == attention | experts


def test_a_blackwell_engine_is_imitated_on_any_machine(tmp_path):
    Qwen2Config(hidden_size=256, num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path)
    name, weight = "model.layers.0.self_attn.q_proj.weight", torch.randn(256, 256)
    sent = {}
    for scales in ("auto", "float32", "power_of_two"):
        config = load_config(
            None, [f"model.path={tmp_path}", "weight_sync.round_to=fp8", f"weight_sync.fp8_scales={scales}"]
        )
        ((_, sent[scales]),) = weight_conversion(config.weight_sync, config.model, config.rollout)([(name, weight)])
        # The real engine's, and what the referee takes for them, are the same numbers.
        real = load_config(
            None, [f"model.path={tmp_path}", "rollout.engine.quantization=fp8", f"weight_sync.fp8_scales={scales}"]
        )
        quantized, scale = (
            tensor for _, tensor in weight_conversion(real.weight_sync, real.model, real.rollout)([(name, weight)])
        )
        assert torch.equal(dequantize_blockwise(quantized, scale), sent[scales])
        architecture = Architecture.from_pretrained(tmp_path)
        for each in (config, real):
            assert torch.equal(
                engine_format(each.rollout, each.weight_sync, each.model, architecture).round(name, weight),
                sent[scales],
            )
    assert torch.equal(sent["auto"], sent["float32"]) and not torch.equal(sent["auto"], sent["power_of_two"])


@pytest.mark.parametrize("round_to", ["fp8", "int4"])
def test_linear_weights_alone_are_rounded_and_travel_in_the_engines_dtype(tmp_path, round_to):
    sizes = {"hidden_size": 160, "num_attention_heads": 12, "head_dim": 16, "num_key_value_heads": 4}
    Qwen2Config(**sizes).save_pretrained(tmp_path)
    config = load_config(
        None,
        [
            "weight_sync.method=tensor",
            f"weight_sync.round_to={round_to}",
            "weight_sync.round_group_size=64",
            f"model.path={tmp_path}",
            f"trainer.runs_dir={tmp_path}",
        ],
    )
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.self_attn.q_proj.weight"
    sent = {
        name: torch.randn(192, 160, generator=generator),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(192, generator=generator),
        "model.embed_tokens.weight": torch.randn(64, 160, generator=generator),
    }
    with closing(make_weight_sync(config, ["http://127.0.0.1:9"])) as sync:
        assert isinstance(sync, ServerWeightSync)
        sync._infos = {"http://127.0.0.1:9": {"dtype": "bfloat16"}}
        (bucket,) = sync._wire_buckets([list(sent.items())])
    received = dict(bucket)
    assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16}
    rounded = {
        "fp8": dequantize_blockwise(*quantize_blockwise(sent[name])),
        "int4": round_to_integers(sent[name], 4, 64),
    }[round_to]
    assert 0.01 < (rounded - sent[name]).abs().max() < 0.4
    assert torch.equal(received.pop(name), rounded.bfloat16())
    for other, tensor in received.items():
        assert torch.equal(tensor, sent[other].bfloat16())


def test_the_reference_engine_gets_them_rounded_too(tmp_path):
    Qwen2Config(hidden_size=32, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path)
    settings = [f"model.path={tmp_path}", f"trainer.runs_dir={tmp_path}", "weight_sync.round_to=int3"]
    engine = TransformersEngine(load_config(None, settings))
    name, weight = "model.layers.0.mlp.down_proj.weight", torch.randn(32, 64)
    with pytest.MonkeyPatch.context() as patched:
        left = []
        patched.setattr(engine._weights, "add", left.extend)
        patched.setattr(engine._weights, "finish", lambda *_: None)
        engine.weight_sync(["transformers://engine-0"]).push([[(name, weight)]], 1)
    assert torch.equal(dict(left)[name], round_to_integers(weight, 3, 32))


@pytest.mark.parametrize("round_to", ["fp8", "int4"])
def test_imitation_and_real_fp8_exclude_each_other(round_to):
    with pytest.raises(ConfigError, match=f"weight_sync.round_to={round_to} imitates .*quantization=fp8 is one"):
        load_config(None, [f"weight_sync.round_to={round_to}", "rollout.engine.quantization=fp8"])


def test_a_grid_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="weight_sync.round_to=int2 must be one of null, fp8, int8, int4, int3"):
        load_config(None, ["weight_sync.round_to=int2"])
    with pytest.raises(ConfigError, match="weight_sync.round_group_size=0 must be at least 1"):
        load_config(None, ["weight_sync.round_to=int4", "weight_sync.round_group_size=0"])
