"""The tokenizers of runs, the last few of them kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_retool.config import ConfigError, ModelConfig, load_config
from megatron_retool.data.tokenizer import TOKENIZER_FILES, load_tokenizer

_MOST = 2
"""Kept: one with 150,000 tokens takes 100 MB and more."""
Decode = Callable[[list[int]], str]


class Tokenizers:
    """Of the folders that a run keeps, so that a copied run can be read; of older ones the model's."""

    def __init__(self) -> None:
        self._found: OrderedDict[Path, Decode] = OrderedDict()
        self._lock = threading.Lock()

    def of_run(self, run_dir: Path) -> tuple[Decode | None, str]:
        """How its token ids become text, and "", or None and why not."""
        with self._lock:
            if run_dir not in self._found:
                decode, problem = _load(run_dir)
                if decode is None:  # looked for again: a run that has just begun may get one
                    return None, problem
                self._found[run_dir] = decode
            self._found.move_to_end(run_dir)
            if len(self._found) > _MOST:
                self._found.popitem(last=False)
            return self._found[run_dir], ""


def own_files(run_dir: Path) -> list[Path]:
    """Where a run may keep a tokenizer, the first of them that is there counts."""
    return [
        run_dir / name / file for name in ("tokenizer", "export", "sft_hf", "data/model") for file in TOKENIZER_FILES
    ]


def tokenizer_directory(run_dir: Path) -> ModelConfig:
    """Where the tokenizer of a run lies: in its own folders, else where its config.yaml says.

    Raises:
        ConfigError: the run has none, and its config.yaml cannot be read.
    """
    for path in own_files(run_dir):
        if path.is_file():
            return ModelConfig(path=str(path.parent))
    return load_config(run_dir / "config.yaml").model


def _load(run_dir: Path) -> tuple[Decode | None, str]:
    try:
        model = tokenizer_directory(run_dir)
        file = Path(model.tokenizer_path or model.path or "") / "tokenizer.json"
        if file.is_file():
            # The part of transformers that decodes: all of it would bring torch and 400 MB along.
            fast: Any = Tokenizer.from_file(str(file))
            return lambda ids: str(fast.decode(ids, skip_special_tokens=False)), ""
        tokenizer = load_tokenizer(model)
    except (ConfigError, ValueError) as error:
        return None, f"tokens are shown as numbers, since the run's tokenizer is missing: {error}"
    except Exception as error:  # tokenizers' own, of a damaged file, which are Exception itself
        return None, f"tokens are shown as numbers, since the run's tokenizer cannot be read: {error}"
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), ""
