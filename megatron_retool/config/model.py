"""Where the model and its tokenizer come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""
    """Hugging Face directory (config.json, safetensors, tokenizer) or hub id. Tokenizer and engines read it."""
    mcore_path: str | None = None
    """Output of conversion/hf_to_mcore.py. None: the learner reads the Hugging Face weights directly."""
    tokenizer_path: str | None = None
    """Where the tokenizer is when it does not lie in ``path``."""
