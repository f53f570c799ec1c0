"""Public models by name, so that a plan needs no download: the keys of their config.json that decide sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.family import find_family
from megatron_retool.config import ConfigError, DemoConfig, ModelConfig

MODELS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published_models.json").read_text(encoding="utf-8")
)
"""Name -> what decides sizes in the config.json on the Hugging Face hub, for instance of Qwen/Qwen2.5-32B-Instruct."""


def model_of_each_family() -> dict[str, str]:
    """model_type of each family -> the first of ``MODELS`` that is one of it."""
    return {find_family(config["model_type"])[1].model_type: name for name, config in reversed(MODELS.items())}


def preset(name: str) -> Architecture:
    """Raises ConfigError naming the known models."""
    try:
        return Architecture.from_hf_config(MODELS[name.lower()])
    except KeyError:
        raise ConfigError(f"--model {name!r} is not one of {', '.join(MODELS)}") from None


def resolve_architecture(model: ModelConfig, demo: DemoConfig, named: str | None = None) -> tuple[str, Architecture]:
    """Name and shape of the model to plan for.

    Args:
        model: its path is read where it holds a config.json; else its last component may name a known model
            ("models/Qwen3-30B-A3B", "models/retool_sft_qwen2.5_32b").
        named: a known model or a directory with a config.json, instead of model.path.

    Raises:
        ConfigError: there is neither a config.json nor a known name.
    """
    text = named or model.path
    if not text and demo.enable:
        raise ConfigError("model.path is empty: pass --model")
    if text and (Path(text) / "config.json").is_file():
        return Path(text).name, Architecture.from_pretrained(text, model.families)
    if demo.enable and named is None:
        return "demo", demo_architecture(demo)
    wanted = _letters(Path(text).name)
    result = [name for name in MODELS if _letters(name) in wanted]
    if not result:
        key = f"--model {named!r}" if named else f"model.path={text!r}"
        raise ConfigError(
            f"{key} has no config.json and is not one of the known models: pass --model with one of {', '.join(MODELS)}"
        )
    name = max(result, key=len)
    return name, preset(name)


def demo_architecture(demo: DemoConfig) -> Architecture:
    """The demo's model, which make-demo has not necessarily written yet."""
    return Architecture.from_hf_config(demo.hf_config)


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
