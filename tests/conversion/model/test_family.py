"""Model families: the built-in ones, one of somebody's own, and what is said of those that cannot be used."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conversion import hf_to_mcore, mcore_to_hf
from conversion.files.hf_checkpoint import HFCheckpoint
from conversion.model.architecture import Architecture
from conversion.model.attention_config import MambaSizes, normalise_latents
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.families import nemotron_h
from conversion.model.family import built_in_families, engine_class, find_family, known_to_transformers
from conversion.model.weight_map import WeightMap
from megatron_retool.config import ConfigError, load_config
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.planning.memory import parameter_count, routed_expert_parameters
from megatron_retool.planning.models import MODELS, model_of_each_family
from megatron_retool.registry import ExtensionError
from tests.conversion.conftest import assert_same_bits, read_all, save_tokenizer

SEED_OSS = """
from conversion.model.family import Family
from conversion.model.hf_config import decoder
from conversion.model.rules import ATTENTION, QKV_BIAS, SWIGLU, decoder_rules


def read(config):
    config.refuse("attention_out_bias")
    return {**decoder(config), "attention_bias": True}


FAMILY = Family("seed_oss", rules=decoder_rules(*ATTENTION, *QKV_BIAS, *SWIGLU), read=read)
"""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 101,
}

MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM: dict[str, Any] = {"model_type": "glm4_moe", "n_routed_experts": 4, **MOE}
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "num_key_value_heads": 2,
}
LATENT: dict[str, Any] = {
    **GLM,
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}

SPARSE: dict[str, Any] = {
    **LATENT,
    "model_type": "deepseek_v32",
    "q_lora_rank": 12,
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 16,
    "n_group": 1,
    "topk_group": 1,
}
GLM_5: dict[str, Any] = {**SPARSE, "model_type": "glm_moe_dsa", "indexer_rope_interleave": True}
DEEPSEEK_V2: dict[str, Any] = {**LATENT, "model_type": "deepseek_v2", "norm_topk_prob": False}
FLASH: dict[str, Any] = {**LATENT, "model_type": "glm4_moe_lite", "first_k_dense_replace": 1}
STRETCHED: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PHI: dict[str, Any] = {"model_type": "phi3", "max_position_embeddings": 8192}
LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
GROUPED = {"topk_method": "group_limited_greedy"}


@pytest.fixture
def seed_oss(tmp_path: Path) -> tuple[str, Path]:
    """A family's target, and a model directory of it as transformers writes it."""
    from transformers import SeedOssConfig, SeedOssForCausalLM

    torch.manual_seed(3)
    config = SeedOssConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=101,
        initializer_range=0.1,
        max_position_embeddings=128,
    )
    model = SeedOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "my_family.py").write_text(SEED_OSS)
    return f"{tmp_path / 'my_family.py'}:FAMILY", tmp_path / "model"


def test_a_family_of_ones_own_is_converted_there_and_back_by_several_workers(
    seed_oss: tuple[str, Path], tmp_path: Path
) -> None:
    """With --verify: the learner's logits are those of transformers."""
    target, source = seed_oss
    options = ["--hf-dir", str(source), "--mcore-dir", str(tmp_path / "mcore"), "--workers", "2"]
    assert hf_to_mcore.main([*options, "--tp", "2", "--verify", "--family", target]) == 0
    back = ["--mcore-dir", str(tmp_path / "mcore"), "--hf-dir", str(tmp_path / "hf"), "--workers", "2"]
    assert mcore_to_hf.main([*back, "--max-file-bytes", "30000", "--family", target]) == 0
    assert_same_bits(read_all(tmp_path / "hf"), read_all(source))


def test_the_learner_takes_it_from_the_configuration(seed_oss: tuple[str, Path]) -> None:
    from megatron_retool.config import Config, LearnerConfig, ModelConfig, OptimizerConfig
    from megatron_retool.learner.learner import Learner
    from megatron_retool.parity.admission.tiny_model import hf_log_probs, random_batch
    from megatron_retool.planning.models import resolve_architecture

    target, source = seed_oss
    config = Config(
        model=ModelConfig(path=str(source), families=[target]),
        learner=LearnerConfig(dtype="float32", max_tokens_per_micro_batch=64),
    )
    assert resolve_architecture(config.model, config.demo)[1].family == "seed_oss"
    learner = Learner(config, optimizer=OptimizerConfig(), total_optimizer_steps=1, hf_dir=source)
    batch = random_batch([(5, 20), (9, 3)])
    from transformers import AutoModelForCausalLM

    expected, _ = hf_log_probs(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), batch)
    found = torch.from_numpy(learner.log_probs(batch)["log_probs"])
    mask = torch.from_numpy(batch.loss_mask)
    torch.testing.assert_close(found[mask], expected.detach()[mask], rtol=1e-4, atol=1e-5)
    exported = {name: tensor for bucket in learner.export_weights() for name, tensor in bucket}
    assert_same_bits(exported, read_all(source))
    learner.close()


def test_an_architecture_carries_its_family(seed_oss: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is named relative to the working directory is found from another one."""
    target, source = seed_oss
    monkeypatch.chdir(source.parent)
    architecture = Architecture.from_pretrained(source, ["my_family.py:FAMILY"])
    monkeypatch.chdir("/")
    sent = pickle.loads(pickle.dumps(architecture))
    assert sent.family_target == target
    assert WeightMap(sent).hf_names == read_all(source).keys()


def test_the_built_in_families_are_found_by_their_files() -> None:
    directory = Path(__file__).parents[3] / "conversion" / "model" / "families"
    assert set(built_in_families()) == {path.stem for path in directory.glob("*.py")} - {"__init__"}
    assert engine_class("Qwen2ForCausalLM") == "sglang.srt.models.qwen2:Qwen2ForCausalLM"
    assert engine_class("GPT2LMHeadModel") is None


def test_an_alias_is_the_family_under_another_name(tmp_path: Path) -> None:
    named = {"model_type": "kimi_k2"}
    assert find_family("kimi_k2") == find_family("deepseek_v3") and "kimi_k2" not in built_in_families()
    assert find_family("mimo") == find_family("qwen2") and "mimo" not in built_in_families()
    found, expected = (Architecture.from_hf_config({**LLAMA, **LATENT, **change}) for change in (named, {}))
    assert found == expected and found.family == "deepseek_v3" and found.declaration == expected.declaration
    assert pickle.loads(pickle.dumps(found)).declaration.model_type == "deepseek_v3"
    assert known_to_transformers({**LATENT, **named}) == LATENT and known_to_transformers({"a": 1}) == {"a": 1}
    file = tmp_path / "mine.py"
    file.write_text(SEED_OSS.replace('"seed_oss", ', '"seed_oss", aliases=("kimi_k2", "other"), '))
    target = f"{file}:FAMILY"
    assert find_family("kimi_k2", [target]) == find_family("seed_oss", [target])
    assert known_to_transformers({"model_type": "other"}, [target]) == {"model_type": "seed_oss"}
    (tmp_path / "second.py").write_text(SEED_OSS.replace("seed_oss", "other"))
    with pytest.raises(ExtensionError, match="both declare model_type='other'"):
        find_family("llama", [target, f"{tmp_path / 'second.py'}:FAMILY"])


SMALL_TOWER = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3": {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16, **SMALL_TOWER},
    "gemma3": {"image_size": 28, "patch_size": 14, **SMALL_TOWER},
    "mistral3": {"image_size": 28, "patch_size": 14, "head_dim": 8, "model_type": "pixtral", **SMALL_TOWER},
}
"""Of tiny models, by the beginning of model_type."""


@pytest.mark.parametrize(
    ("name", "outer", "inner"),
    [
        ("qwen3.5-9b", "qwen3_5", "qwen3_5_text"),
        ("qwen3.5-35b-a3b", "qwen3_5_moe", "qwen3_5_moe_text"),
        ("qwen3-0.6b", "qwen3_vl", "qwen3_vl_text"),
        ("qwen3-30b-a3b", "qwen3_vl_moe", "qwen3_vl_moe_text"),
        ("gemma-3-1b", "gemma3", "gemma3_text"),
        ("mistral-7b-v0.1", "mistral3", "mistral"),
        ("ministral-3-8b", "mistral3", "ministral3"),
    ],
)
def test_the_language_model_of_a_model_that_sees_is_saved_alone(
    tmp_path: Path, name: str, outer: str, inner: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text = {**shrunk(MODELS[name], 4), "model_type": inner}
    if "_vl" in outer:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    tower = next(tower for beginning, tower in TOWERS.items() if outer.startswith(beginning))
    config = AutoConfig.for_model(
        outer, text_config=text, vision_config=tower, tie_word_embeddings=text.get("tie_word_embeddings", True)
    )
    torch.manual_seed(5)
    seeing = AutoModelForImageTextToText.from_config(config)
    seeing.save_pretrained(tmp_path / "both")
    with pytest.raises(UnsupportedArchitecture, match="tower for images") as refused:
        Architecture.from_pretrained(tmp_path / "both")
    command = re.search(r'python -c "(.*)"$', str(refused.value))
    assert command is not None
    # The tiny model has no tokenizer.
    code = command[1].replace("AutoTokenizer.from_pretrained(a).save_pretrained(b)", "0")
    exec(code.replace("DIR", f"{tmp_path}/both"), {})  # in this process, which has imported transformers
    saved = tmp_path / "both-text"
    architecture = Architecture.from_pretrained(saved)
    HFCheckpoint(saved).check(WeightMap(architecture))
    assert architecture.hf_config["model_type"] == MODELS[name]["model_type"] and "mrope" not in str(
        architecture.hf_config if "_vl" in outer else ""
    )
    assert not architecture.linear_layers or architecture.hf_config["full_attention_interval"] == 4
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, found = seeing(ids).logits, AutoModelForCausalLM.from_pretrained(saved)(ids).logits
    assert torch.equal(found, expected)


def test_a_family_with_names_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "renamed.py"
    file.write_text(
        "from conversion.model.family import Family\n"
        "from conversion.model.rules import ATTENTION, SWIGLU, decoder_rules, renamed\n"
        "NAMES = {'self_attn.o_proj': 'attention.dense', 'model.layers': 'h', 'model.embed_tokens': 'wte'}\n"
        "FAMILY = Family('mine', rules=renamed(decoder_rules(*ATTENTION, *SWIGLU), NAMES))\n"
    )
    config = {**LLAMA, "model_type": "mine", "tie_word_embeddings": True}
    weight_map = WeightMap(Architecture.from_hf_config(config, [f"{file}:FAMILY"]))
    assert weight_map["decoder.layers.1.self_attention.linear_proj.weight"].hf_names == ("h.1.attention.dense.weight",)
    assert weight_map["output_layer.weight"].hf_names == ("wte.weight",)
    assert weight_map.output_name == "lm_head.weight"
    assert len(weight_map) == len(WeightMap(Architecture.from_hf_config(LLAMA)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt5"}, "model_type='gpt5' is not one of .*llama.*name that in model.families, or with --fam"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 1.5}, "hidden_size=1.5 is not a positive integer"),
        ({"hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported'),
        ({"mlp_bias": True}, "mlp_bias=true is not supported for llama"),
        ({"attention_bias": True}, "attention_bias=true is not supported for llama"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantization_config is set: start from the full-precision weights",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            'quantization_config has quant_method="gptq", which is not',
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            'rope type "dynamic" is not one of default, linear, llama3, yarn, longrope',
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.original_max_position_embeddings is missing",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"rope_parameters.sliding_attention=.*: stretched positions under a window are missing",
        ),
        (
            {"model_type": "olmo3", "sliding_window": None},
            "layers are to have sliding_attention, but sliding_window is no",
        ),
        ({"rope_parameters": "linear"}, 'rope_parameters="linear" is no mapping'),
        ({"layer_types": ["full_attention"]}, "layer_types is no list of num_hidden_layers=2 kinds"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            r"layer_types\[1\]=.chunked_attention. is not one of",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\]='sliding_attention', but sliding_w",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            r"layer_types\[0\]='full_attention', but sliding_window=8 holds for every layer of a mistral model",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "layer_types asks for sliding_attention, but",
        ),
        (
            {**GLM, "norm_topk_prob": False},
            "norm_topk_prob=false: a router with sigmoid scores and norm_topk_prob=false",
        ),
        (
            {**GLM, "n_group": 4, "topk_group": 2},
            "topk_group=2 with num_experts_per_tok=2: a choice of groups by their",
        ),
        (
            {**PHI, "rope_scaling": {**LONGROPE, "long_factor": None}},
            "long_factor=.* of longrope positions is no list of positive numbers",
        ),
        (
            {**PHI, "rope_scaling": {**LONGROPE, "short_factor": [1.0] * 3}},
            "short_factor has 3 numbers, and positions rotate 4 pairs of a head's features",
        ),
        (
            {**PHI, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE},
            "short_factor has 4 numbers, and positions rotate 3 pairs of a head's features",
        ),
        (
            {**GLM, "rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.0]}},
            "longrope positions with partial_rotary_factor=0.5: a factor on only the rotated features is missing",
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {}}},
            "rope_parameters.full_attention: longrope positions beside a window's own are missing",
        ),
        (
            {**DEEPSEEK_V2, "scoring_func": "sigmoid"},
            'scoring_func="sigmoid" is not supported for deepseek_v2: only "s',
        ),
        (
            {**DEEPSEEK_V2, "norm_topk_prob": True},
            "norm_topk_prob=true is not supported for deepseek_v2: only false is",
        ),
        (
            {**DEEPSEEK_V2, "rope_interleave": False},
            "rope_interleave=false is not supported for deepseek_v2: only true",
        ),
        (
            {**DEEPSEEK_V2, "topk_method": "noaux_tc"},
            'topk_method="noaux_tc" is not supported for deepseek_v2: only gr',
        ),
        ({**DEEPSEEK_V2, "n_group": 2}, 'n_group=2 with topk_method="greedy": transformers chooses among all experts'),
        ({**DEEPSEEK_V2, **GROUPED, "n_group": 3}, "n_group=3 and topk_group=1: 2 of 4 experts cannot be chosen so"),
        ({**DEEPSEEK_V2, **GROUPED, "n_group": 4}, "n_group=4 and topk_group=1: 2 of 4 experts cannot be chosen so"),
        ({**MINIMAX, "use_qk_norm": False}, "use_qk_norm=false is not supported for minimax_m2: only true is"),
        ({**MINIMAX, "qk_norm_type": "per_head"}, 'qk_norm_type="per_head" is not supported for minimax_m2: only "per'),
        ({**MINIMAX, "use_routing_bias": False}, "use_routing_bias=false is not supported for minimax_m2"),
        ({**MINIMAX, "scoring_func": "softmax"}, 'scoring_func="softmax": a router with sigmoid scores and'),
        ({**MINIMAX, "shared_intermediate_size": 8}, "shared_intermediate_size=8 is not supported for minimax_m2"),
        ({**MINIMAX, "attn_type_list": [1, 0]}, "attn_type_list has other kinds of layers than 1: linear attention is"),
        ({**MINIMAX, "rotary_dim": 3}, "partial_rotary_factor=0.375: 3 of a head's 8 features are no pairs"),
        ({**LATENT, "num_key_value_heads": 2}, "num_key_value_heads differs from num_attention_heads"),
        ({**LATENT, "index_topk": 16}, "index_topk=16 is not supported for deepseek_v3"),
        (
            {**SPARSE, "indexer_rope_interleave": True},
            "indexer_rope_interleave=true: transformers rotates .* remove it",
        ),
        ({**GLM_5, "indexer_rope_interleave": None}, "indexer_rope_interleave=null: transformers .* set it to true"),
        ({**SPARSE, "rope_interleave": False}, "rope_interleave=false is not supported for deepseek_v32"),
        ({**SPARSE, "q_lora_rank": None}, "q_lora_rank is missing"),
        ({**SPARSE, "index_head_dim": 2}, "index_head_dim=2 is less than qk_rope_head_dim=4"),
        ({**SPARSE, "index_topk_freq": 4}, "index_topk_freq=4 is not supported for deepseek_v32"),
        ({**SPARSE, "indexer_types": ["full", "shared"]}, "indexer_types=.* is not supported for deepseek_v32"),
        ({**SPARSE, "index_local_tokens": 64}, "index_local_tokens=64 is not supported for deepseek_v32"),
        ({**SPARSE, "layer_types": ["full_attention"] * 2}, 'layer_types.0.="full_attention" is not one of indexed_'),
        ({**GLM_5, "indexer_types": ["full"]}, "indexer_types=.* does not say of each of 2 layers"),
        ({**GLM_5, "index_topk_pattern": "FX"}, 'index_topk_pattern="FX" does not say of each of 2 layers'),
        ({**GLM_5, "indexer_types": ["shared", "full"]}, "indexer_types: the first layer has no layer before it"),
        ({**FLASH, "mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types="),
        (
            {**FLASH, "first_k_dense_replace": 2},
            "first_k_dense_replace=2 is not supported for glm4_moe_l",
        ),
        ({"model_type": "olmoe", "num_experts": 4, "clip_qkv": 8.0}, "clip_qkv=8.0 is not supported for olmoe"),
        (
            {"model_type": "olmoe", "num_experts": 4, "norm_topk_prob": True},
            "norm_topk_prob=true is not supported for",
        ),
        (
            {"model_type": "olmoe", "num_experts": 4, "rms_norm_eps": 1e-6},
            "rms_norm_eps=1e-06 is not supported for",
        ),
        ({"model_type": "ernie4_5", "use_bias": True}, "use_bias=true is not supported for ernie4_5"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers="),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0], "rope_scaling": STRETCHED},
            "yarn positions with attention_factor=1.13",
        ),
        ({"model_type": "ministral3"}, "rope_parameters.llama_4_scaling_beta is missing"),
        (
            {**LATENT, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            "mscale=null with mscale_all_dim=null: a factor on only the rotated features is missing",
        ),
        (
            {**GLM, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            "yarn positions with partial_rotary_factor=0.5: a factor on only the rotated features is missing",
        ),
        ({**GLM, "first_k_dense_replace": 2}, "none of the layers of this glm4_moe model has experts"),
        ({**GLM, "partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4: 3 of a head's 8 features are no pairs"),
        (
            {**MOE, "model_type": "qwen3_moe", "mlp_only_layers": [2]},
            r"mlp_only_layers=\[2\] is no list of numbers below 2",
        ),
        (
            {**MOE, "model_type": "qwen3_moe", "decoder_sparse_step": 3},
            "none of the layers of this qwen3_moe model has experts",
        ),
    ],
)
def test_what_no_family_computes_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(UnsupportedArchitecture, match=rf"config\.json: {message}"):
        Architecture.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
@pytest.mark.parametrize("given", [{}, {"factor": 4.0}, {"attention_factor": 1.1}, {"original": 2048}])
def test_longrope_is_that_of_transformers_phi_3(kind: str, given: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    key, change = "original_max_position_embeddings", dict(given)
    outside = {key: change.pop("original")} if "original" in change else {}
    config = {**LLAMA, **PHI, **outside, "rope_scaling": {**LONGROPE, key: 1024, **change, "type": kind}}
    found = Architecture.from_hf_config(json.loads(json.dumps(config))).rope_scaling
    expected = Phi3RotaryEmbedding(AutoConfig.for_model(**config))
    assert found is not None and found.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-12)
    original = expected.config.rope_parameters[key]
    assert found.original_max_position_embeddings == original == outside.get(key, 4096)


def test_groups_by_their_best_expert_and_groups_that_limit_nothing() -> None:
    def groups(**change: Any) -> tuple[tuple[int, int] | None, str]:
        found = Architecture.from_hf_config({**LLAMA, **DEEPSEEK_V2, **change})
        assert (found.norm_topk_prob, found.router_scores, found.router_bias) == (False, "softmax", False)
        return found.router_groups, found.router_group_score

    assert groups(**GROUPED, n_group=2) == ((2, 1), "best")
    assert groups(**GROUPED, n_group=2, topk_group=2) == groups(n_group=1) == groups() == (None, "sum of two")
    assert Architecture.from_hf_config({**LLAMA, **DEEPSEEK_V2}).shared_expert_ffn_hidden_size == 2 * 24


def test_a_config_that_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UnsupportedArchitecture, match=r"config\.json: it holds a list, where a mapping"):
        Architecture.from_pretrained(tmp_path)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [1], {"a": "b"}])
def test_architectures_that_are_no_list_of_names(names: Any) -> None:
    with pytest.raises(UnsupportedArchitecture, match="architectures=.* is no list of class names"):
        Architecture.from_hf_config({**LLAMA, "architectures": names})


def test_every_layer_attends_as_in_transformers_or_the_model_is_refused() -> None:
    """Random settings of windows, absent keys among them, against what transformers makes of the same config.json."""
    from transformers import AutoConfig

    generator, accepted = random.Random(0), Counter[str]()
    kinds = ("full_attention", "sliding_attention")
    for _ in range(560):
        family = generator.choice(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "olmo3", "gemma3_text"))
        config: dict[str, Any] = {**LLAMA, "model_type": family, **MOE}
        for key, values in (
            ("sliding_window", (None, 8)),
            ("use_sliding_window", (False, True)),
            ("max_window_layers", (0, 1, 2)),
            ("layer_types", (None, *([first, second] for first in kinds for second in kinds))),
        ):
            if generator.random() < 0.6:
                config[key] = generator.choice(values)
        expected = AutoConfig.for_model(**config)
        window = None if family == "llama" else expected.sliding_window
        windows = [window] * 2
        if family in ("qwen2", "qwen3", "olmo3", "gemma3_text"):
            windows = [window if kind == kinds[1] else None for kind in expected.layer_types]
        try:
            found = Architecture.from_hf_config(config).windows
        except UnsupportedArchitecture:
            assert "layer_types" in config or config.get("sliding_window", 8) is None, config
            continue
        assert windows == list(found), config
        accepted[family] += 1
    assert len(accepted) == 7 and min(accepted.values()) > 20


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [3, 0]}, (0, 3)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 1, 2, 4)),
    ],
)
def test_dense_layers_are_those_of_transformers(change: dict[str, Any], dense: tuple[int, ...]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**LLAMA, **MOE, "num_hidden_layers": 6, **change, "model_type": "qwen3_moe"}
    architecture = Architecture.from_hf_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    experts = [number for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert architecture.dense_layers == dense and list(architecture.expert_layers) == experts


def test_rotated_features_are_those_of_transformers() -> None:
    """Of MiniMax-M2, which may name their number or their share, in several places."""
    from transformers import AutoConfig

    places = ({"rotary_dim": 4}, {"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": 0.5}})
    for chosen in itertools.product((False, True), repeat=3):
        config = {**LLAMA, **MINIMAX}
        for place, is_there in zip(places, chosen, strict=True):
            config |= copy.deepcopy(place) if is_there else {}
        found = Architecture.from_hf_config(copy.deepcopy(config))
        expected = AutoConfig.for_model(**config).rope_parameters
        assert expected["rope_theta"] == found.rope_theta == 5000000.0
        assert 8 * expected.get("partial_rotary_factor", 1.0) == (found.rotary_dim or 8), chosen


def test_sliding_windows() -> None:
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    for family, change, expected in (
        ("mistral", {}, 8),
        ("mistral", {"use_sliding_window": False}, 8),
        ("qwen3", {}, 8),
        ("qwen3", {"use_sliding_window": False}, None),
        ("qwen2", {"max_window_layers": 2}, None),
        ("llama", {}, None),
    ):
        config = {**LLAMA, **window, **change, "model_type": family}
        assert Architecture.from_hf_config(config).sliding_window == expected, (family, change)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("FAMILY = {}", "it is a dict, not a conversion.model.family.Family: write"),
        ("", "has no 'FAMILY'"),
        ("import nowhere_to_be_found", "importing .* failed at line 1: ModuleNotFoundError"),
        (SEED_OSS.replace("decoder_rules(*ATTENTION", "(*ATTENTION"), "rules lack embedding.*: use decoder_rules"),
        (SEED_OSS.replace("*SWIGLU)", '*swiglu("a", "b", "wide"))').replace("SWIGLU,", "swiglu,"), "wide in rules is"),
    ],
)
def test_a_family_that_cannot_be_used_is_refused_with_the_configuration(
    tmp_path: Path, source: str, message: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"model\.families=.*broken\.py:FAMILY: .*{message}"):
        load_config(None, [f"model.families=[{file}:FAMILY]"])


def test_two_families_of_one_model_type(seed_oss: tuple[str, Path]) -> None:
    target, _ = seed_oss
    with pytest.raises(ConfigError, match=r"model\.families: .* both declare model_type='seed_oss': name one"):
        load_config(None, [f"model.families=[{target},{target}]"])


@pytest.mark.parametrize("returned", ["None", "{'layers': 3}", "1 / 0"])
def test_a_reader_that_fails_is_named(tmp_path: Path, returned: str) -> None:
    file = tmp_path / "reader.py"
    file.write_text(SEED_OSS.replace('{**decoder(config), "attention_bias": True}', returned))
    with pytest.raises(ExtensionError, match=r"model\.families=.*reader\.py:FAMILY: its read\(config\) must return"):
        Architecture.from_hf_config({**LLAMA, "model_type": "seed_oss"}, [f"{file}:FAMILY"])


ODD: list[Any] = [
    True, 0, -1, 3, 10**400, 1.5, math.inf, math.nan, "", "1", [], [None], ["x"], {}, {"a": 1},
    {"rope_type": "yarn", "factor": "x"}, {"rope_type": []}, {"rope_theta": "x"}, {"full_attention": 3},
    {"rope_type": "longrope", "short_factor": [math.nan]},
]  # fmt: skip
READ_WITHOUT_A_VALUE = ("layer_types", "mlp_only_layers", "max_window_layers", "attn_type_list", "rope_parameters")


@pytest.mark.parametrize(("family", "name"), model_of_each_family().items())
def test_a_value_of_another_type_is_an_architecture_or_one_error(family: str, name: str) -> None:
    published = MODELS[name]
    changes = [{key: odd} for key in (*published, *READ_WITHOUT_A_VALUE) for odd in ODD]
    changes += [
        {key: {**within, inner: odd}}
        for key, within in published.items()
        if isinstance(within, dict)
        for inner in (*within, "factor", "mscale", "attention_factor")
        for odd in ODD
    ]
    for change in changes:
        try:
            found = Architecture.from_hf_config({**published, **change})
        except UnsupportedArchitecture as error:
            assert len(str(error)) < 1000, change
        else:
            assert len(found.windows) == found.num_layers, change


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FFSFSSFS"},
        {"indexer_types": ["full", "shared"] * 4, "index_topk_freq": 4},
        {"layer_types": ["indexed_attention"] * 8},
    ],
)
def test_layers_that_share_keys_are_transformers(schedule: dict[str, Any]) -> None:
    from transformers import GlmMoeDsaConfig

    expected = GlmMoeDsaConfig(num_hidden_layers=8, **schedule).indexer_types
    found = Architecture.from_hf_config({**LLAMA, **GLM_5, "num_hidden_layers": 8, **schedule})
    assert ["shared" if n in found.shared_choices else "full" for n in range(8)] == expected
    assert found.has_mixed_layers or schedule.keys() <= {"layer_types"}
    names = {mapping.mcore_name for mapping in WeightMap(found)}
    for layer, kind in enumerate(expected):
        own = [name for name in names if name.startswith(f"decoder.layers.{layer}.") and ".indexer." in name]
        assert len(own) == (5 if kind == "full" else 0)


def test_latents_are_normalised_with_rms_norm_eps() -> None:
    """As engines do it, where transformers takes 1e-6 whatever config.json says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = Architecture.from_hf_config({**LLAMA, **LATENT, "rms_norm_eps": 1e-5}).latent
    assert found is not None and found.norm_eps == 1e-5
    settings = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "n_routed_experts": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **settings, rms_norm_eps=1e-5))
    attention = model.model.layers[0].self_attn
    assert attention.kv_a_layernorm.variance_epsilon == 1e-6, "transformers follows config.json: remove the repair"
    assert normalise_latents(model) is model
    assert attention.kv_a_layernorm.variance_epsilon == attention.q_a_layernorm.variance_epsilon == 1e-5


def test_granite() -> None:
    dense = Architecture.from_hf_config({**LLAMA, "model_type": "granite", "residual_multiplier": 0.22})
    assert (dense.residual_multiplier, dense.logits_scaling, dense.embedding_scale) == (0.22, 1.0, 1.0)
    assert dense.softmax_scale == 1.0, "transformers' default, whatever a head's size is"
    hybrid = Architecture.from_hf_config(MODELS["granite-4.0-h-micro"])
    assert hybrid.recurrent == hybrid.mamba == MambaSizes(heads=64, head_dim=64, groups=1, state_dim=128, kernel=4)
    assert set(range(40)) - {*hybrid.linear_layers} == {5, 15, 25, 35} and len(hybrid.unrotated_layers) == 40
    assert (hybrid.softmax_scale, hybrid.logits_scaling, hybrid.ffn_hidden_size) == (0.015625, 8.0, 8192)
    experts = Architecture.from_hf_config(MODELS["granite-4.0-h-tiny"])
    assert (experts.num_experts, experts.moe_ffn_hidden_size, experts.shared_expert_ffn_hidden_size) == (64, 512, 1024)
    attention = Architecture.from_hf_config(MODELS["granite-4.0-micro"])
    assert attention.mamba is None and attention.unrotated_layers == () == attention.linear_layers
    alone = {key: value for key, value in MODELS["granite-4.0-h-micro"].items() if key != "layer_types"}
    assert Architecture.from_hf_config(alone).linear_layers == tuple(range(40))
    renamed = {**alone, "layers_block_type": MODELS["granite-4.0-h-micro"]["layer_types"]}
    assert Architecture.from_hf_config(renamed) == hybrid


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mamba_n_groups": 2}, "mamba_n_groups=2 is not supported for granitemoehybrid: only 1 is"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias=false is not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=true is not supported"),
        ({"mamba_d_head": 32}, "mamba_n_heads=64 of mamba_d_head=32 have to make .* = 4096"),
        ({"mamba_n_heads": 63, "mamba_d_head": "auto"}, "mamba_n_heads=63 of mamba_d_head=65 have to make"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit=\[0.001, 0.1\]: only steps from 0"),
        ({"position_embedding_type": "alibi"}, 'position_embedding_type="alibi" is neither rope nor nope'),
        ({"layer_types": ["mamba"]}, "layer_types is no list of num_hidden_layers=40"),
        ({"residual_multiplier": -1.0}, "residual_multiplier=-1.0 is not a positive number"),
    ],
)
def test_what_granite_may_not_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        Architecture.from_hf_config({**MODELS["granite-4.0-h-micro"], **change})


NEMOTRON, NEMOTRON_MOE = MODELS["nemotron-h-8b"], MODELS["nemotron-3-nano-30b-a3b"]


def test_nemotron_h() -> None:
    dense = Architecture.from_hf_config(NEMOTRON)
    assert dense.mamba == MambaSizes(heads=128, head_dim=64, groups=8, state_dim=128, kernel=4)
    assert (dense.activation, dense.gated_mlp, dense.is_moe, dense.rms_norm_eps) == ("relu2", False, False, 1e-5)
    kinds = (dense.attention_layers, len(dense.linear_layers), dense.dense_mlps, dense.sublayers)
    assert kinds == (4, 24, 24, 52) and len(dense.unrotated_layers) == 52
    experts = Architecture.from_hf_config(NEMOTRON_MOE)
    assert (experts.attention_layers, len(experts.linear_layers), len(experts.expert_layers)) == (6, 23, 23)
    assert (experts.num_experts, experts.num_experts_per_tok, experts.shared_expert_ffn_hidden_size) == (128, 6, 3712)
    assert (experts.router_scores, experts.router_bias, experts.routed_scaling_factor) == ("sigmoid", True, 2.5)
    assert experts.dense_mlps == 0 and parameter_count(experts) == 31_577_937_344
    assert experts.moe_latent_size is None and experts.expert_hidden_size == 2688
    latent = Architecture.from_hf_config(MODELS["nemotron-3-super-120b-a12b"])
    assert latent.moe_latent_size == latent.expert_hidden_size == 1024
    matrices = 40 * (512 * 2 * 1024 * 2688 + 2 * 4096 * (1024 + 5376))
    assert matrices == routed_expert_parameters(latent) + 40 * 2 * 4096 * (1024 + 5376)
    assert parameter_count(latent) > matrices
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    for names in (words, nemotron_h.PATTERN):
        listed = [names[letter] for letter in NEMOTRON_MOE["hybrid_override_pattern"]]
        config = {**NEMOTRON_MOE, "hybrid_override_pattern": None, "layers_block_type": listed}
        assert Architecture.from_hf_config(config) == experts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "M" * 52, "layers_block_type": ["mlp"] * 52}, "says something else than layers_b"),
        ({"hybrid_override_pattern": "MX" * 26}, "one of them has to say what each layer is"),
        ({"hybrid_override_pattern": ""}, "one of them has to say what each layer is"),
        ({"hybrid_override_pattern": "ME*-"}, "num_hidden_layers=52 with 4 kinds of layers"),
        ({"layers_block_type": [["mamba"]] * 52}, "one of them has to say what each layer is"),
        ({"mlp_hidden_act": "silu"}, 'mlp_hidden_act="silu" is not supported for nemotron_h: only "relu2" is'),
        ({"n_groups": 7}, "mamba_num_heads=64 is no multiple of n_groups=7"),
        ({"attention_head_dim": 64}, "attention_head_dim=64 is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false"),
        ({"n_group": 4, "topk_group": 2}, "only for num_experts_per_tok = 2 topk_group"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit=\[0.001, 0.1\]: only steps from 0"),
    ],
)
def test_what_nemotron_h_may_not_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        Architecture.from_hf_config({**NEMOTRON_MOE, **change})


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0.0, {"__float__": "Infinity"}]])
def test_steps_without_an_end_are_read(limit: list[Any]) -> None:
    config = {**MODELS["granite-4.0-h-micro"], "time_step_limit": limit}
    assert Architecture.from_hf_config(config) == Architecture.from_hf_config(MODELS["granite-4.0-h-micro"])


def test_layers_without_positions() -> None:
    def read(**more: object) -> Architecture:
        return Architecture.from_hf_config({**LLAMA, "model_type": "smollm3", "num_hidden_layers": 8, **more})

    assert read().unrotated_layers == (3, 7)
    assert read(no_rope_layer_interval=3).unrotated_layers == (2, 5)
    assert read(no_rope_layers=[1, 0] * 4).unrotated_layers == (1, 3, 5, 7)
    assert read(no_rope_layers=[1] * 8, rope_scaling=STRETCHED).unrotated_layers == ()


def test_positions_of_ernie_and_ministral() -> None:
    pairs = Architecture.from_hf_config({**LLAMA, "model_type": "ernie4_5"})
    assert pairs.rotary_pairs and (pairs.rope_theta, pairs.head_dim, pairs.tie_word_embeddings) == (5e5, 128, True)
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    grown = Architecture.from_hf_config(
        {**LLAMA, "model_type": "ministral3", "num_key_value_heads": 4, "rope_parameters": rope}
    )
    assert grown.query_growth == (0.1, 64)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "dots1"])
def test_keys_that_config_json_lacks_are_what_transformers_takes(family: str) -> None:
    keys = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace")
    published = MODELS[model_of_each_family()[family]]
    lacking = {key: value for key, value in published.items() if key not in keys}
    assert lacking != published
    defaults = CONFIG_MAPPING[family]()
    known = {key: getattr(defaults, key) for key in keys if hasattr(defaults, key)}
    assert Architecture.from_hf_config(lacking) == Architecture.from_hf_config({**lacking, **known})
