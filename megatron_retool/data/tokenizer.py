"""Loading the run's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_retool.config import ConfigError, ModelConfig
from megatron_retool.config.model import check_model_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model: ModelConfig) -> Any:
    """The Hugging Face tokenizer in ``model.tokenizer_path``, or else in ``model.path`` (a directory or a hub id).

    Raises:
        ConfigError: neither is set, the directory holds no tokenizer, or it cannot be loaded.
    """
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    path = model.tokenizer_path or model.path
    if not path:
        raise ConfigError("model.path is not set: give a Hugging Face directory or a hub id")
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key}={path}: the directory holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])}); copy the model's "
            "tokenizer there, or set model.tokenizer_path"
        )
    check_model_path(path, key)

    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}={path}: the tokenizer cannot be loaded: {reason}") from error
