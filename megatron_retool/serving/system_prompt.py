"""The system message that a run's model was trained under, which a conversation needs to be like its training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_retool.config import DataConfig

ROWS_READ = 64
"""Of each file: a run's prompts share their system message, or differ within the first rows."""


def of_training(config: DataConfig) -> tuple[str | None, str]:
    """(system message of the run's prompts or None, what to tell people about it).

    The first rows of data.train_files, or of data.val_files without them, are read; a file that is gone is passed over.
    """
    result: dict[str | None, None] = {}
    for file in config.train_files or config.val_files:
        for prompt in _first_prompts(Path(file), config.prompt_key):
            result[_system_message(prompt)] = None
    if not result:
        return None, "system message: none (the run's prompt files are not here): --system TEXT sets one"
    if len(result) > 1:
        return None, "system message: none (the run's prompts have different ones): --system TEXT sets one"
    (message,) = result
    if message is None:
        return None, "system message: none, as in the run's prompts"
    return message, f"system message: {_shown(message)} (the run's; --system TEXT or --no-system)"


def choose(config: DataConfig, given: str | None, without: bool) -> tuple[str | None, str]:
    """As ``of_training``, where the command line says nothing else.

    Args:
        given: --system.
        without: --no-system.
    """
    if without:
        return None, "system message: none (--no-system)"
    if given is not None:
        return given, f"system message: {_shown(given)}"
    if not config.train_files and not config.val_files:
        return None, "system message: none: --system TEXT sets one"
    return of_training(config)


def with_system(messages: list[Any], system: str | None) -> list[Any]:
    """``messages`` below ``system``, if they begin with no system message of their own."""
    if system is None or (messages and messages[0].get("role") in ("system", "developer")):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _first_prompts(file: Path, key: str) -> Iterator[Any]:
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(file) as opened:
                batch = next(opened.iter_batches(ROWS_READ, columns=[key]), None)
                yield from [] if batch is None else batch.column(0).to_pylist()
        elif file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                for line in itertools.islice(lines, ROWS_READ):
                    yield json.loads(line).get(key)
    except Exception:  # gone, damaged, or of another layout: serving does not need it
        return


def _system_message(prompt: Any) -> str | None:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, dict) and first.get("role") == "system":
        return str(first.get("content"))
    return None


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 100 else f"{line[:99]}…")
