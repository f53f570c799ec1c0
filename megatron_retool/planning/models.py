"""Public models by name, so that a plan needs no download: the keys of their config.json that decide sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.family import find_family
from megatron_retool.config import Config, ConfigError


def _decoder(
    model_type: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen2_5(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _decoder("qwen2", *sizes, tie_word_embeddings=tied, rope_theta=1000000.0, max_position_embeddings=32768)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False, groups: int = 8) -> dict[str, Any]:
    return _decoder(
        "qwen3", layers, hidden, heads, groups, ffn, 151936,
        head_dim=128, tie_word_embeddings=tied, rope_theta=1000000.0, max_position_embeddings=40960,
    )  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    return {
        **_qwen3(layers, hidden, heads, ffn, groups=4),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": expert_ffn,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _decoder(
        "llama", layers, hidden, heads, 8, ffn, 128256,
        rope_theta=500000.0, rope_scaling=scaling, max_position_embeddings=131072,
    )  # fmt: skip


def _glm4_5(
    layers: int, hidden: int, ffn: int, expert_ffn: int, experts: int, dense: int, scaling: float, *, qk_norm: bool
) -> dict[str, Any]:
    return {
        **_decoder("glm4_moe", layers, hidden, 96, 8, ffn, 151552),
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": qk_norm,
        "moe_intermediate_size": expert_ffn,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": scaling,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    }


_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
}


_DEEPSEEK_V3_2: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}


def _deepseek_v2(
    layers: int, hidden: int, heads: int, ffn: int, expert_ffn: int, experts: int, query_rank: int | None, **more: Any
) -> dict[str, Any]:
    return {
        **_decoder("deepseek_v2", layers, hidden, heads, heads, ffn, 102400),
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": expert_ffn,
        "moe_layer_freq": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "first_k_dense_replace": 1,
        "rope_theta": 10000.0,
        "rope_scaling": {**_DEEPSEEK_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        **more,
    }


def _olmo(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "max_position_embeddings": 4096}
    return _decoder(model_type, *sizes, **{**common, **more})


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _decoder(
        "gpt_oss", layers, 2880, 64, 8, 2880, 201088,
        head_dim=64,
        attention_bias=True,
        num_local_experts=experts,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
    )  # fmt: skip


_OLMO_3: dict[str, Any] = {
    "max_position_embeddings": 65536,
    "sliding_window": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.2079441541679836,
        "original_max_position_embeddings": 8192,
    },
}
"""Every fourth layer sees the whole past."""

_GATED_DELTA_NETS: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
}
_QWEN3_5: dict[str, Any] = {
    **_GATED_DELTA_NETS,
    "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen2_5(24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2_5(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen2_5(36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _qwen2_5(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _qwen2_5(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _qwen2_5(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _qwen2_5(80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-4b-thinking-2507": {
        **_qwen3(36, 2560, 32, 9728, tied=True),
        "rope_theta": 5000000.0,
        "max_position_embeddings": 262144,
    },
    "qwen3-30b-a3b-thinking-2507": {
        **_qwen3_moe(48, 2048, 32, 6144, 768),
        "rope_theta": 10000000.0,
        "max_position_embeddings": 262144,
    },
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, 1536),
    "llama3.1-8b": _llama3(32, 4096, 32, 14336),
    "llama3.1-70b": _llama3(80, 8192, 64, 28672),
    "qwen1.5-moe-a2.7b": {
        **_qwen2_5(24, 2048, 16, 16, 5632, 151936),
        "model_type": "qwen2_moe",
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "max_position_embeddings": 8192,
    },
    "mixtral-8x7b": _decoder(
        "mixtral",
        32,
        4096,
        32,
        8,
        14336,
        32000,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
    ),  # fmt: skip
    "phi-4": _decoder("phi3", 40, 5120, 40, 10, 17920, 100352, rope_theta=250000.0, max_position_embeddings=16384),
    "seed-oss-36b": _decoder(
        "seed_oss",
        64,
        5120,
        80,
        8,
        27648,
        155136,
        head_dim=128,
        attention_bias=True,
        rope_theta=10000000.0,
        max_position_embeddings=524288,
    ),  # fmt: skip
    "deepseek-v2": _deepseek_v2(
        60,
        5120,
        128,
        12288,
        1536,
        160,
        1536,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
    ),  # fmt: skip
    "deepseek-v2-lite": _deepseek_v2(
        27,
        2048,
        16,
        10944,
        1408,
        64,
        None,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    ),  # fmt: skip
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.2": _DEEPSEEK_V3_2,
    "glm-5": {
        **_DEEPSEEK_V3_2,
        **_decoder("glm_moe_dsa", 78, 6144, 64, 64, 12288, 154880),
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "head_dim": 64,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": True,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    "kimi-k2": {
        **_DEEPSEEK_V3,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.827,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": 163840,
        "rope_theta": 50000.0,
        "rope_scaling": {**_DEEPSEEK_V3["rope_scaling"], "factor": 32.0, "beta_fast": 1.0},
        "max_position_embeddings": 131072,
    },
    "moonlight-16b-a3b": {
        **_DEEPSEEK_V3,
        **_decoder("deepseek_v3", 27, 2048, 16, 16, 11264, 163840),
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.446,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    "glm-4.7-flash": {
        **_DEEPSEEK_V3,
        **_decoder("glm4_moe_lite", 47, 2048, 20, 20, 10240, 154880),
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 1.0,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    "olmoe-1b-7b": _olmo(
        "olmoe",
        16,
        2048,
        16,
        16,
        1024,
        50304,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        clip_qkv=None,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
    ),  # fmt: skip
    "dots.llm1": {
        **_glm4_5(62, 4096, 10944, 1408, 128, 1, 2.5, qk_norm=True),
        **_decoder("dots1", 62, 4096, 32, 32, 10944, 152064),
        "attention_bias": False,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "max_window_layers": 62,
    },
    "ernie-4.5-0.3b": _decoder(
        "ernie4_5",
        18,
        1024,
        16,
        2,
        3072,
        103424,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
    ),  # fmt: skip
    "smollm3-3b": _decoder(
        "smollm3",
        36,
        2048,
        16,
        4,
        11008,
        128256,
        tie_word_embeddings=True,
        no_rope_layers=[1, 1, 1, 0] * 9,
        rope_theta=5000000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=65536,
    ),  # fmt: skip
    "ministral-3-8b": _decoder(
        "ministral3",
        34,
        4096,
        32,
        8,
        14336,
        131072,
        head_dim=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        },
        rms_norm_eps=1e-5,
        max_position_embeddings=262144,
    ),  # fmt: skip
    "mimo-7b": {
        **_decoder("mimo", 36, 4096, 32, 8, 11008, 151680),
        "attention_bias": True,
        "head_dim": 128,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000.0,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
    "minimax-m2": {
        **_decoder("minimax_m2", 62, 3072, 48, 8, 1536, 200064),
        "head_dim": 128,
        "rotary_dim": 64,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "num_mtp_modules": 3,
        "mtp_transformer_layers": 1,
        "rope_theta": 5000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196608,
    },
    "glm-4.5": _glm4_5(92, 5120, 12288, 1536, 160, 3, 2.5, qk_norm=True),
    "glm-4.5-air": _glm4_5(46, 4096, 10944, 1408, 128, 1, 1.0, qk_norm=False),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "olmo-2-32b": _olmo("olmo2", 64, 5120, 40, 8, 27648, 100352),
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    },
    "olmo-3-7b": _olmo("olmo3", 32, 4096, 32, 32, 11008, 100278, **_OLMO_3),
    "olmo-3-32b": _olmo("olmo3", 64, 5120, 40, 8, 27648, 100278, **_OLMO_3),
    "olmo-2-7b": _olmo("olmo2", 32, 4096, 32, 32, 11008, 100352),
    "qwen3-next-80b-a3b": {
        **_decoder("qwen3_next", 48, 2048, 16, 2, 5120, 151936),
        **_GATED_DELTA_NETS,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
    },
    "qwen3.5-9b": {**_decoder("qwen3_5_text", 32, 4096, 16, 4, 12288, 248320), **_QWEN3_5},
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 248320,
        "tie_word_embeddings": False,
        **_QWEN3_5,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "mistral-7b-v0.1": _decoder(
        "mistral",
        32,
        4096,
        32,
        8,
        14336,
        32000,
        sliding_window=4096,
        rope_theta=10000.0,
        max_position_embeddings=32768,
    ),  # fmt: skip
}
"""Values of the config.json files on the Hugging Face hub, for instance Qwen/Qwen2.5-32B-Instruct."""


def model_of_each_family() -> dict[str, str]:
    """model_type of each family -> the first of ``MODELS`` that is one of it."""
    return {find_family(config["model_type"])[1].model_type: name for name, config in reversed(MODELS.items())}


def preset(name: str) -> Architecture:
    """Raises ConfigError naming the known models."""
    try:
        return Architecture.from_hf_config(MODELS[name.lower()])
    except KeyError:
        raise ConfigError(f"--model {name!r} is not one of {', '.join(MODELS)}") from None


def resolve_architecture(config: Config, model: str | None = None) -> tuple[str, Architecture]:
    """Name and shape of the model to plan for.

    Args:
        config: model.path is read where it holds a config.json; else its last component may name a known model
            ("models/Qwen3-30B-A3B", "models/retool_sft_qwen2.5_32b").
        model: a known model or a directory with a config.json, instead of model.path.

    Raises:
        ConfigError: there is neither a config.json nor a known name.
    """
    text = model or config.model.path
    if not text and config.demo.enable:
        raise ConfigError("model.path is empty: pass --model")
    if text and (Path(text) / "config.json").is_file():
        return Path(text).name, Architecture.from_pretrained(text, config.model.families)
    if config.demo.enable and model is None:
        return "demo", demo_architecture(config)
    wanted = _letters(Path(text).name)
    found = [name for name in MODELS if _letters(name) in wanted]
    if not found:
        key = f"--model {model!r}" if model else f"model.path={text!r}"
        raise ConfigError(
            f"{key} has no config.json and is not one of the known models: pass --model with one of {', '.join(MODELS)}"
        )
    name = max(found, key=len)
    return name, preset(name)


def demo_architecture(config: Config) -> Architecture:
    """The demo's model, which make-demo has not necessarily written yet."""
    return Architecture.from_hf_config(config.demo.hf_config)


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
