"""Public models by name, so that a plan needs no download: the keys of their config.json that decide sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from megatron_retool.config import Config, ConfigError


def _qwen2_5(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
    }


def _qwen3(
    layers: int, hidden: int, heads: int, ffn: int, tied: bool = False, experts: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": ffn,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        **(experts or {}),
    }


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
    }


def _experts(width: int) -> dict[str, Any]:
    return {
        "num_key_value_heads": 4,
        "moe_intermediate_size": width,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }


def _mistral(
    model_type: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """Eight key-value heads, as all of them have."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        **more,
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
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, experts=_experts(768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12288, experts=_experts(1536)),
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
    "mixtral-8x7b": _mistral(
        "mixtral", 32, 4096, 32, 14336, 32000, num_local_experts=8, num_experts_per_tok=2, rope_theta=1000000.0
    ),
    "phi-4": {
        "model_type": "phi3",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17920,
        "vocab_size": 100352,
        "tie_word_embeddings": False,
        "rope_theta": 250000.0,
        "max_position_embeddings": 16384,
    },
    "seed-oss-36b": {
        "model_type": "seed_oss",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 27648,
        "vocab_size": 155136,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 524288,
    },
    "mistral-7b-v0.1": _mistral("mistral", 32, 4096, 32, 14336, 32000, sliding_window=4096, rope_theta=10000.0),
}
"""Values of the config.json files on the Hugging Face hub, for instance Qwen/Qwen2.5-32B-Instruct."""


def model_of_each_family() -> dict[str, str]:
    """model_type -> the first of ``MODELS`` that has it."""
    return {config["model_type"]: name for name, config in reversed(MODELS.items())}


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
