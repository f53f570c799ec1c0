"""What lies beside a model's weights: tokenizer, chat templates, generation settings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from conversion.files.checksums import COMPLETE_NAME
from conversion.files.safetensors_headers import HFCheckpointError

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
CHAT_TEMPLATES = "additional_chat_templates"
"""Where transformers keeps a tokenizer's chat templates beside the first one."""
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""A directory has a tokenizer when it has every file of one of these."""


def check_tokenizer(directory: Path) -> None:
    """Make sure that a tokenizer lies beside the weights.

    Raises:
        HFCheckpointError: naming the files that would make one.
    """
    if not any(all((directory / file).is_file() for file in files) for files in TOKENIZER_FILES):
        wanted = ", or ".join(" with ".join(files) for files in TOKENIZER_FILES)
        raise HFCheckpointError(
            f"{directory} has no tokenizer ({wanted}): copy its files there, or pass --allow-missing-tokenizer"
        )


def copy_companions(source: Path, target: Path, keep: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Copy config, generation config, tokenizer, chat templates and the like: every plain file that holds no weights.

    Returns:
        The names that were copied.
    """
    copied = []
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name.endswith(WEIGHT_SUFFIXES):
            continue
        if path.name == COMPLETE_NAME:
            continue  # of the directory that it lies in, and of no other
        if keep(path.name):
            shutil.copyfile(path, target / path.name)
            copied.append(path.name)
    for path in sorted((source / CHAT_TEMPLATES).glob("*.jinja")):
        (target / CHAT_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, target / CHAT_TEMPLATES / path.name)
        copied.append(f"{CHAT_TEMPLATES}/{path.name}")
    return copied
