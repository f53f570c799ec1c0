"""The tokenizers of runs, the last few of them kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from run_files import CONFIG_FILE
from run_viewer.runs_table import settings_of
from untrusted.errors import InputError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

_MOST = 2
"""Kept: one with 150,000 tokens takes 100 MB and more."""
Decode = Callable[[list[int]], str]


class Tokenizers:
    """A run's own tokenizer, so that a copied run can be read; where it keeps none, its model's."""

    def __init__(self) -> None:
        self._found: OrderedDict[Path, Decode] = OrderedDict()
        self._lock = threading.Lock()

    def of_run(self, run_dir: Path) -> tuple[Decode | None, str]:
        """How its token ids become text, and "", or None and why not."""
        with self._lock:
            if run_dir not in self._found:
                try:
                    self._found[run_dir] = load_decoder(tokenizer_path(run_dir))
                except InputError as error:  # looked for again: a run that has just begun may get one
                    return None, f"tokens are shown as numbers, since the run's tokenizer is missing: {error}"
            self._found.move_to_end(run_dir)
            if len(self._found) > _MOST:
                self._found.popitem(last=False)
            return self._found[run_dir], ""


def own_files(run_dir: Path) -> list[Path]:
    """Where a run may keep a tokenizer, the first of them that is there counts."""
    return [
        run_dir / name / file for name in ("tokenizer", "export", "sft_hf", "data/model") for file in TOKENIZER_FILES
    ]


def tokenizer_path(run_dir: Path) -> str:
    """Where the tokenizer of a run lies: in its own folders, else where its config.yaml says.

    Raises:
        InputError: the run has none, and its config.yaml names none or cannot be read.
    """
    for path in own_files(run_dir):
        if path.is_file():
            return str(path.parent)
    problems: list[str] = []
    settings = settings_of(run_dir, problems)
    for key in ("model.tokenizer_path", "model.path"):
        if isinstance(settings.get(key), str) and settings[key]:
            return str(settings[key])
    raise InputError(*problems or [f"{run_dir / CONFIG_FILE} names no model.path"])


def load_decoder(path: str) -> Decode:
    """How a tokenizer makes text of token ids.

    Args:
        path: a Hugging Face directory, or the name of one on the hub whose files are in the cache.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    directory, file = Path(path), Path(path) / "tokenizer.json"
    if file.is_file():
        # The part of transformers that decodes: all of it would bring torch and 400 MB along.
        try:
            fast: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers' own, of a damaged file, which are Exception itself
            raise InputError(f"{file} cannot be read: {error}") from error
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    if directory.is_dir() and not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise InputError(f"{path} holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])}): copy the model's there")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(f"{path} has no tokenizer.json; `pip install transformers` reads other tokenizers") from error
    try:
        # Neither the network nor code of the directory, nor a question whether to run it.
        slow = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' and tokenizers' own
        raise InputError(f"{path}: the tokenizer cannot be loaded: {(str(error).splitlines() or [''])[0]}") from error
    return lambda ids: str(slow.decode(ids, skip_special_tokens=False))
