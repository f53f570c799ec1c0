"""Where the model and its tokenizer come from."""

from __future__ import annotations

from dataclasses import dataclass, field

from conversion.model.family import load_families
from megatron_retool.config.base import ConfigError
from megatron_retool.registry import ExtensionError


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""
    """Hugging Face directory (config.json, safetensors, tokenizer) or hub id. Tokenizer and engines read it."""
    mcore_path: str | None = None
    """Output of conversion/hf_to_mcore.py. None: the learner reads the Hugging Face weights directly."""
    tokenizer_path: str | None = None
    """Where the tokenizer is when it does not lie in ``path``."""
    families: list[str] = field(default_factory=list)
    """Model families beside the built-in ones: package.module:FAMILY or path/to/file.py:FAMILY."""

    def check(self) -> None:
        """Raise ConfigError where one of ``families`` cannot be used."""
        try:
            load_families(self.families)
        except ExtensionError as error:
            raise ConfigError(str(error)) from error
