"""Where the model and its tokenizer come from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from conversion.model.architecture import Architecture
from conversion.model.family import load_families
from megatron_retool.config.base import ConfigError
from megatron_retool.registry import ExtensionError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelConfig:
    """Where the model and its tokenizer come from."""

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

    def architecture(self) -> Architecture:
        """What the config.json of ``path``, a directory, says.

        Raises:
            MalformedConfig, UnsupportedArchitecture: as ``Architecture.from_pretrained``.
        """
        return Architecture.from_pretrained(self.path, self.families)


def check_model_path(path: str, key: str = "model.path") -> None:
    """Check that ``path`` is a directory or a hub id that may be fetched.

    A hub id is owner/name, where no directory of that owner's name is here, or one that is in the hub's cache.

    Raises:
        ConfigError: it is neither; the message names ``key``.
    """
    given = Path(path).expanduser()
    if not path or given.is_dir():
        return
    if given.exists():
        raise ConfigError(f"{key}={path} is a file: give the directory that holds it")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    if (cache.expanduser() / f"models--{path.replace('/', '--')}").is_dir():
        return
    if not _HUB_ID.fullmatch(path) or given.parent.is_dir():
        raise ConfigError(
            f"{key}={path}: the directory does not exist: give that of a Hugging Face model, or a hub id as owner/name"
        )
