"""What a server of the Tinker protocol keeps on disk, so that a new one knows sessions, runs and checkpoints.

    <directory>/
      sessions/<session>.json                  a session and the sampling sessions it opened
      runs/<run>/run.json                      a run: its settings, and how far it came
      runs/<run>/<kind>/<name>/                a checkpoint: the learner's or the adapter's files, and
      runs/<run>/<kind>/<name>/checkpoint.json   what is known of it, written last

Every function here waits for the disk: call them in threads.
"""

from __future__ import annotations

import dataclasses
import datetime
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megatron_retool.tinker.requests import KINDS, CheckpointPath, LoraSettings
from run_files.atomic_files import atomic_write
from untrusted import load_own_json

RECORD_NAME = "checkpoint.json"
"""What is known of a checkpoint; without it, it is none."""
_PARTIAL = ".partial"
_OLD = ".old"


def now() -> str:
    """The present time as the protocol writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat()


@dataclass(frozen=True)
class RunRecord:
    """A training run.

    Attributes:
        next_call: the number of its next call.
        saved: path of its last training checkpoint.
        unsaved_calls: calls since then that changed its weights, its optimizer or its gathered gradients.
        ended: it takes no further calls; its checkpoints stay.
        copied_from: path of the checkpoint that it holds a copy of, which is all that it is for; None: it was trained.
    """

    id: str
    session_id: str
    base_model: str
    lora: LoraSettings
    user_metadata: Mapping[str, str] | None
    last_request: str = field(default_factory=now)
    next_call: int = 1
    saved: str | None = None
    unsaved_calls: int = 0
    ended: bool = False
    copied_from: str | None = None


@dataclass(frozen=True)
class StoredCheckpoint:
    """
    Attributes:
        base_model, lora: of its run.
        with_optimizer: it holds the optimizer's state.
        unnamed: it was made only for a sampling session: it is in no list, and the oldest of them are deleted.
        inflight: it is what sampling sessions sample from that follow their run, until the next such one.
        expires_at: as ``time``; None: never.
    """

    path: CheckpointPath
    base_model: str
    lora: LoraSettings
    with_optimizer: bool = False
    unnamed: bool = False
    inflight: bool = False
    public: bool = False
    size_bytes: int = 0
    user_metadata: Mapping[str, str] | None = None
    expires_at: str | None = None
    time: str = field(default_factory=now)

    def described(self) -> dict[str, Any]:
        """As the protocol's lists have it."""
        return {
            "checkpoint_id": f"{self.path.kind}/{self.path.name}",
            "checkpoint_type": KINDS[self.path.kind],
            "time": self.time,
            "tinker_path": str(self.path),
            "size_bytes": self.size_bytes,
            "public": self.public,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }


@dataclass(frozen=True)
class SamplerRecord:
    """What a sampling session samples from.

    Attributes:
        path: of the checkpoint; None: the base model, or with ``follows`` the run's newest weights.
        follows: a run whose later weights it follows.
    """

    id: str
    base_model: str
    path: CheckpointPath | None = None
    follows: str | None = None


@dataclass(frozen=True)
class SessionRecord:
    """A session as it lies on disk."""

    id: str
    tags: list[str]
    user_metadata: dict[str, str] | None
    created: str = field(default_factory=now)
    finished: bool = False


class RunStore:
    """The files below ``directory``, which is made."""

    def __init__(self, directory: Path) -> None:
        self._runs, self._sessions = directory / "runs", directory / "sessions"
        for each in (self._runs, self._sessions):
            each.mkdir(parents=True, exist_ok=True)

    def directory(self, path: CheckpointPath) -> Path:
        """Where a checkpoint's files lie."""
        return self._run(path.run) / path.kind / path.name

    def write_run(self, record: RunRecord) -> None:
        """Write a run's record."""
        directory = self._run(record.id)
        directory.mkdir(exist_ok=True)
        _write(directory / "run.json", record)

    def write_session(self, record: SessionRecord, samplers: list[SamplerRecord]) -> None:
        """Write a session's record with its samplers."""
        _write(self._sessions / f"{record.id}.json", {"session": record, "samplers": samplers})

    def prepare(self, path: CheckpointPath) -> Path:
        """An empty directory for a checkpoint's files, which counts from ``commit`` on."""
        partial = self._partial(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        """Give the directory of ``prepare`` its name, in place of an older one; the checkpoint with its size."""
        partial, final = self._partial(checkpoint.path), self.directory(checkpoint.path)
        size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        checkpoint = dataclasses.replace(checkpoint, size_bytes=size)
        _write(partial / RECORD_NAME, checkpoint)
        old = final.with_name(f".{final.name}{_OLD}")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        return checkpoint

    def write_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Note what changed about a checkpoint."""
        _write(self.directory(checkpoint.path) / RECORD_NAME, checkpoint)

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint's files, the one that makes it a checkpoint first."""
        # Without this file it is no checkpoint, however much of it a kill leaves.
        (self.directory(path) / RECORD_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.directory(path), ignore_errors=True)

    def runs(self) -> Iterator[RunRecord]:
        """The records of all runs."""
        for file in sorted(self._runs.glob("*/run.json")):
            result = _read(file)
            yield RunRecord(**{**result, "lora": LoraSettings(**result["lora"])})

    def checkpoints(self) -> Iterator[StoredCheckpoint]:
        """All that are complete, the oldest first. What a kill left behind of others is removed."""
        result = []
        for directory in self._runs.glob("*/*/*"):
            if directory.name.endswith(_PARTIAL):
                shutil.rmtree(directory, ignore_errors=True)
            elif directory.name.endswith(_OLD):
                self._restore(directory)
        for file in self._runs.glob(f"*/*/*/{RECORD_NAME}"):
            read = _read(file)
            read |= {"path": CheckpointPath(**read["path"]), "lora": LoraSettings(**read["lora"])}
            result.append(StoredCheckpoint(**read))
        yield from sorted(result, key=lambda each: each.time)

    def sessions(self) -> Iterator[tuple[SessionRecord, list[SamplerRecord]]]:
        """The records of all sessions, with their samplers."""
        for file in sorted(self._sessions.glob("*.json")):
            result = _read(file)
            samplers = [
                SamplerRecord(**{**each, "path": None if each["path"] is None else CheckpointPath(**each["path"])})
                for each in result["samplers"]
            ]
            yield SessionRecord(**result["session"]), samplers

    def _restore(self, old: Path) -> None:
        """The older checkpoint, where a kill came before the new one took its place."""
        final = old.with_name(old.name.removesuffix(_OLD).removeprefix("."))
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(final)

    def _run(self, run: str) -> Path:
        # A colon in a file's name is no part of paths that scp, rsync and other systems take.
        return self._runs / run.replace(":", "_")

    def _partial(self, path: CheckpointPath) -> Path:
        final = self.directory(path)
        return final.with_name(f".{final.name}{_PARTIAL}")


def _write(path: Path, value: Any) -> None:
    with atomic_write(path) as handle:
        handle.write(orjson.dumps(value, option=orjson.OPT_INDENT_2))


def _read(path: Path) -> dict[str, Any]:
    """
    Raises:
        OSError: naming the file, which is not what this class writes.
    """
    try:
        result = load_own_json(path.read_bytes())
    except ValueError as error:
        raise OSError(f"{path}: {error}: remove it, or restore it from a copy") from error
    if not isinstance(result, dict):
        raise OSError(f"{path}: it holds no object: remove it, or restore it from a copy")
    return result
