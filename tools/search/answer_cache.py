"""Answers of servers on disk, one JSON file for each question, so that a query costs once."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_files.atomic_files import write_text

logger = logging.getLogger(__name__)

_SECONDS_A_DAY = 86400.0


class SearchCache:
    """Keeps JSON values under a question, a mapping of JSON types.

    Several runs may share a directory: a file appears whole, or not at all, and a damaged one counts as none.

    Args:
        directory: None keeps nothing.
        days: age after which a value is forgotten; None: never.
    """

    def __init__(self, directory: str | None, days: float | None) -> None:
        self._directory = Path(directory) if directory else None
        self._seconds = None if days is None else days * _SECONDS_A_DAY
        self._complained = False

    def get(self, question: Mapping[str, Any]) -> Any | None:
        """The value, or None."""
        if self._directory is None:
            return None
        try:
            kept = json.loads(self._path(self._directory, question).read_bytes())
            if kept["question"] != dict(question):
                return None
            fresh = self._seconds is None or time.time() - kept["time"] < self._seconds
            return kept["answer"] if fresh else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, question: Mapping[str, Any], answer: Any) -> None:
        """Keep a value. A disk that cannot is named once in the log."""
        if self._directory is None:
            return
        path = self._path(self._directory, question)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"question": dict(question), "time": time.time(), "answer": answer}))
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("%s was not written, and what cannot be written there after it neither: %s", path, error)

    @staticmethod
    def _path(directory: Path, question: Mapping[str, Any]) -> Path:
        name = digest(question)
        return directory / name[:2] / f"{name}.json"


def digest(question: Mapping[str, Any]) -> str:
    """A name for a question."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
