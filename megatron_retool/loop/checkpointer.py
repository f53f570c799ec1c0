"""Checkpoints that appear complete or not at all, what a failed one means, and which are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from megatron_retool.config import Config
from megatron_retool.runs.checkpoints import (
    Checkpoint,
    SaveError,
    checkpoint_workspace,
    prune_checkpoints,
    publish_checkpoint,
    removed_on_failure,
    seal_checkpoint,
)


class Model(Protocol):
    """A learner group, as far as its checkpoints are concerned."""

    async def save(self, directory: Path, *, asynchronous: bool) -> None:
        """Raises SaveError."""

    async def finish_save(self) -> None:
        """Raises SaveError."""

    async def load(self, directory: Path) -> None: ...


@dataclass(frozen=True)
class Contents:
    """What lies in a checkpoint beside the models: JSON files by name, and what ``write`` puts into its directory."""

    files: Mapping[str, Mapping[str, Any]]
    write: Callable[[Path], None] | None = None


@dataclass
class _Pending:
    """A checkpoint without its name.

    Attributes:
        required: the run cannot go on without it.
        sealed: nothing but the name is missing.
    """

    step: int
    contents: Contents
    required: bool
    sealed: bool = False


class Checkpointer:
    """Writes a run's checkpoints, goes on without one that cannot be written, and deletes old ones.

    Args:
        models: the present models, by the name of their directory in a checkpoint.
        resume: the checkpoint that the run goes on from.
        saving: entered while the models copy or write their state.

    Attributes:
        newest: newest complete checkpoint of this run, which a learner that is built anew starts from.
    """

    def __init__(
        self,
        config: Config,
        console: Console,
        models: Callable[[], Mapping[str, Model]],
        resume: Checkpoint | None = None,
        saving: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.newest = resume
        self._config = config
        self._console = console
        self._models = models
        self._saving = saving
        self._pending: _Pending | None = None
        self._failed = 0

    @property
    def overdue(self) -> bool:
        """Whether a checkpoint is missing, so that each following step is to be saved until one is written."""
        return self._failed > 0

    async def save(self, step: int, contents: Contents, *, wait: bool) -> dict[str, float]:
        """``write`` and ``commit``, for what needs nothing in between."""
        metrics = await self.write(step, contents, wait=wait)
        await self.commit()
        return metrics

    async def write(self, step: int, contents: Contents, *, wait: bool) -> dict[str, float]:
        """Write the checkpoint of ``step`` but for its name; checkpoint/failed_saves, how many have failed in a row.

        With trainer.async_save the models only copy their state here and write it while the next step is generated;
        ``finish`` completes the checkpoint. ``wait`` writes it now, for ``commit`` to complete.

        Raises:
            SaveError: the disk is full, and the run waits for this one or ``trainer.on_failed_save`` is stop.
        """
        await self._tolerated(self._write(step, contents, wait), required=wait)
        return {"checkpoint/failed_saves": float(self._failed)}

    async def commit(self) -> None:
        """Give the checkpoint that is written its name, and delete what retention does not keep.

        A run resumes after a checkpoint's step: what belongs to that step has to be on disk before. One that is still
        being written stays for ``finish``.

        Raises:
            SaveError: as ``write``.
        """
        if self._pending is not None and self._pending.sealed:
            await self._tolerated(self._finish(), required=self._pending.required)

    async def finish(self) -> None:
        """Complete the checkpoint that is being written, if there is one, and delete what retention does not keep.

        Raises:
            SaveError: the disk is full, and ``trainer.on_failed_save`` is stop.
        """
        if self._pending is not None:
            await self._tolerated(self._finish(), required=False)

    async def load(self) -> Checkpoint | None:
        """Put the models where the newest checkpoint left them; None: there is none, and they are left as they are.

        What is being written is given up, since its writers may be gone, and failures are forgotten.
        """
        self._pending, self._failed = None, 0
        if self.newest is not None:
            for name, model in self._models().items():
                await model.load(self.newest.path / name)
        return self.newest

    async def _tolerated(self, work: Awaitable[None], *, required: bool) -> None:
        try:
            await work
            self._failed = 0
        except SaveError as error:
            if required or self._config.trainer.on_failed_save == "stop":
                raise
            self._failed += 1
            self._console.print(
                f"{error}. Training goes on (trainer.on_failed_save), and the next step tries again",
                style="bold red",
                markup=False,
                highlight=False,
            )

    async def _write(self, step: int, contents: Contents, wait: bool) -> None:
        await self._finish()
        asynchronous = self._config.trainer.async_save and not wait
        pending = _Pending(step, contents, required=wait)
        async with self._saving():
            with removed_on_failure(self._config.run_dir, step):
                workspace = checkpoint_workspace(self._config.run_dir, step)
                for name, model in self._models().items():
                    await model.save(workspace / name, asynchronous=asynchronous)
                if contents.write is not None:
                    contents.write(workspace)
        if not asynchronous:
            await self._seal(pending)
        self._pending = pending

    async def _seal(self, pending: _Pending) -> None:
        with removed_on_failure(self._config.run_dir, pending.step) as workspace:
            for model in self._models().values():
                await model.finish_save()
            seal_checkpoint(workspace, pending.contents.files)
        pending.sealed = True

    async def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not pending.sealed:
            await self._seal(pending)
        with removed_on_failure(self._config.run_dir, pending.step) as workspace:
            self.newest = publish_checkpoint(workspace, pending.step)
        prune_checkpoints(self._config, self.newest)
