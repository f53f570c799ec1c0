"""Checkpoints of all runs: found by path, listed, expired and deleted."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker.requests import CheckpointPath
from megatron_retool.tinker.run_store import RECORD_NAME, RunStore, StoredCheckpoint
from sglang_rollout.gateway.errors import ApiError

Deleted = Callable[[CheckpointPath], Awaitable[None]]


def expiry(seconds: int | None) -> str | None:
    """When something ends that lives for ``seconds`` from now on."""
    if seconds is None:
        return None
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()


class Checkpoints:
    """Checkpoints by path, the oldest first.

    Args:
        deleted: called with the path of each that is gone.
    """

    def __init__(self, store: RunStore, deleted: Deleted) -> None:
        self._store = store
        self._deleted = deleted
        self._checkpoints: dict[CheckpointPath, StoredCheckpoint] = {}

    def restore(self) -> None:
        """Take in what is on disk: in a thread, before anything else."""
        self._checkpoints = {each.path: each for each in self._store.checkpoints()}

    def __contains__(self, path: CheckpointPath) -> bool:
        return path in self._checkpoints

    def find(self, path: CheckpointPath, field_name: str = "path") -> StoredCheckpoint:
        """
        Raises:
            ApiError: 404, there is no such checkpoint.
        """
        result = self._checkpoints.get(path)
        if result is None or _has_expired(result):
            raise ApiError(404, f"{field_name}: there is no checkpoint {path}", code="not_found", param=field_name)
        return result

    def of(self, path: str | None) -> StoredCheckpoint | None:
        """The checkpoint of a path, where there is one."""
        return next((each for each in self._checkpoints.values() if str(each.path) == path), None)

    def directory(self, path: CheckpointPath) -> Path:
        """Where the checkpoint's files are."""
        return self._store.directory(path)

    def named(self, run: str | None = None) -> list[StoredCheckpoint]:
        """The newest first; those that sampling sessions made for themselves are left out."""
        result = [each for each in self._checkpoints.values() if run is None or each.path.run == run]
        return [each for each in reversed(result) if not each.unnamed and not _has_expired(each)]

    def unnamed(self, run: str) -> list[StoredCheckpoint]:
        """Those that sampling sessions made for themselves, the oldest first."""
        return [each for each in self._checkpoints.values() if each.unnamed and each.path.run == run]

    def followed(self, run: str) -> StoredCheckpoint | None:
        """What sampling sessions that follow a run sample from."""
        return next((each for each in reversed(self.unnamed(run)) if each.inflight), None)

    async def write(
        self, checkpoint: StoredCheckpoint, fill: Callable[[Path], Awaitable[None]], *, overwrite: bool = False
    ) -> StoredCheckpoint:
        """Make a checkpoint; ``fill`` writes its files into an empty directory.

        Raises:
            RequestRefused: there is one of that name.
        """
        if checkpoint.path in self._checkpoints and not overwrite:
            raise RequestRefused(f"path: {checkpoint.path} exists: choose another name, or save_state(overwrite=True)")
        directory = await asyncio.to_thread(self._store.prepare, checkpoint.path)
        try:
            await fill(directory)
            checkpoint = await asyncio.to_thread(self._store.commit, checkpoint)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        if self._checkpoints.pop(checkpoint.path, None) is not None:
            await self._deleted(checkpoint.path)
        self._checkpoints[checkpoint.path] = checkpoint
        return checkpoint

    async def copy(self, source: StoredCheckpoint, path: CheckpointPath, ttl_seconds: int | None) -> None:
        """Make a checkpoint of the files of another, which stay as long as either of them.

        Args:
            ttl_seconds: how long the copy lives; None: for ever.
        """

        async def fill(directory: Path) -> None:
            # Links take no space, and nothing writes into a checkpoint's files once they are there.
            await asyncio.to_thread(
                shutil.copytree,
                self.directory(source.path),
                directory,
                copy_function=os.link,
                ignore=shutil.ignore_patterns(RECORD_NAME),
                dirs_exist_ok=True,
            )

        copied = StoredCheckpoint(
            path,
            source.base_model,
            source.lora,
            source.with_optimizer,
            user_metadata=source.user_metadata,
            expires_at=expiry(ttl_seconds),
        )
        await self.write(copied, fill)

    async def change(
        self, checkpoint: StoredCheckpoint, *, public: bool | None = None, ttl: tuple[int | None] | None = None
    ) -> None:
        """Note that it was published or withdrawn, or how long it lives from now on.

        Raises:
            RequestRefused: it was deleted meanwhile.
        """
        changed = checkpoint
        if public is not None:
            changed = dataclasses.replace(changed, public=public)
        if ttl is not None:
            changed = dataclasses.replace(changed, expires_at=expiry(*ttl))
        # Noted here only once it is written: what has expired is deleted by then, with what would be written.
        try:
            await asyncio.to_thread(self._store.write_checkpoint, changed)
        except FileNotFoundError:
            raise RequestRefused(f"path: {checkpoint.path} was deleted meanwhile") from None
        if self._checkpoints.get(checkpoint.path) is checkpoint:
            self._checkpoints[checkpoint.path] = changed

    async def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint and its files."""
        self._checkpoints.pop(path, None)
        await self._deleted(path)
        await asyncio.to_thread(self._store.delete, path)

    async def delete_expired(self) -> None:
        """Delete every checkpoint whose lifetime is over."""
        for checkpoint in [each for each in self._checkpoints.values() if _has_expired(each)]:
            await self.delete(checkpoint.path)


def _has_expired(checkpoint: StoredCheckpoint) -> bool:
    end = checkpoint.expires_at
    return end is not None and datetime.datetime.fromisoformat(end) <= datetime.datetime.now(datetime.UTC)
