"""What became of each trace, in a file that grows by a line for each: a command that starts again reads it first."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_retool.runs.append_file import AppendFile
from untrusted import load_own_json


def key_of(*parts: Any) -> str:
    """Equal for the same question asked of the same model in the same words."""
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Entry:
    start: int
    length: int
    reason: str | None
    calls: int
    replaced: int


class Ledger:
    """Records by key. In memory are their places in the file, and what is counted.

    A line that a killed command left unfinished is taken off the file's end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, _Entry] = {}
        self._end = 0
        self._file = AppendFile(path)
        if path.exists():
            self._read()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def append(self, key: str, record: dict[str, Any]) -> None:
        """``record`` has a reason (None: accepted), calls and replaced, and what else is to be kept.

        Raises:
            OSError: it was not written.
        """
        line = json.dumps({"key": key, **record}, ensure_ascii=False).encode() + b"\n"
        self._file.append(line)
        self._note(key, record, len(line))

    def forget_rejected(self) -> None:
        """Have rejected traces asked again."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry.reason is None}

    def records(self, keys: Iterable[str], accepted: bool) -> Iterator[dict[str, Any]]:
        """The accepted or the rejected ones of ``keys``, in their order."""
        if not self._entries:
            return
        with self.path.open("rb") as file:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and (entry.reason is None) == accepted:
                    file.seek(entry.start)
                    yield load_own_json(file.read(entry.length))

    def counts(self, keys: Iterable[str]) -> Counter[str]:
        """Of ``keys``: "accepted", "calls" and "replaced" of these, and each reason."""
        counter: Counter[str] = Counter()
        for entry in (self._entries[key] for key in keys if key in self._entries):
            if entry.reason is not None:
                counter[f"rejected: {entry.reason}"] += 1
            else:
                counter.update(accepted=1, calls=entry.calls, replaced=entry.replaced)
        return counter

    def _read(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                try:
                    record = load_own_json(line)
                    key = record["key"]
                except (ValueError, KeyError, TypeError):
                    if line.endswith(b"\n"):
                        self._end += len(line)  # damaged: its trace is asked again
                        continue
                    os.truncate(self.path, self._end)
                    return
                if not line.endswith(b"\n"):
                    os.truncate(self.path, self._end)
                    return
                self._note(key, record, len(line))

    def _note(self, key: str, record: dict[str, Any], length: int) -> None:
        reason = record.get("reason")
        self._entries[key] = _Entry(
            self._end,
            length,
            None if reason is None else str(reason),
            int(record.get("calls") or 0),
            int(record.get("replaced") or 0),
        )
        self._end += length
