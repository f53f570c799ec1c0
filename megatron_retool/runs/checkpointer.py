"""Checkpoints that appear complete or not at all, what a failed one means, and which are kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from conversion.files.directory import size_text
from conversion.files.weights_alone import link_weights
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
from megatron_retool.runs.weights_checkpoints import (
    prune_weights,
    publish_weights,
    weights_workspace,
    weights_workspace_path,
)

_COMPLETE, _WEIGHTS = "complete", "weights"


class CheckpointedModel(Protocol):
    """A learner group, as far as its checkpoints are concerned."""

    async def save(self, directory: Path, *, asynchronous: bool, weights_only: bool = False) -> None:
        """Raises SaveError."""

    async def finish_save(self) -> None:
        """Raises SaveError."""

    async def load(self, directory: Path) -> None:
        """Continue from what ``save`` wrote."""


@dataclass(frozen=True)
class Contents:
    """What lies in a checkpoint beside the models: JSON files by name, and what ``write`` puts into its directory."""

    files: Mapping[str, Mapping[str, Any]]
    write: Callable[[Path], None] | None = None


@dataclass
class _Pending:
    """What is written of a step, without its name.

    Attributes:
        contents: None: only weights are written.
        weights: there is to be a checkpoint of only the weights, beside a complete one or by itself.
        required: the run cannot continue without it.
        sealed: nothing but the name is missing.
        seconds: that the run has waited for it.
        bytes: of the complete checkpoint, and of the one of only the weights.
    """

    step: int
    contents: Contents | None
    weights: bool
    required: bool
    sealed: bool = False
    seconds: float = 0.0
    bytes: tuple[int, int] = (0, 0)

    @property
    def kinds(self) -> set[str]:
        return ({_COMPLETE} if self.contents is not None else set()) | ({_WEIGHTS} if self.weights else set())


class Checkpointer:
    """Writes a run's checkpoints, continues without one that cannot be written, and deletes old ones.

    Args:
        models: the present models, by the name of their directory in a checkpoint.
        resume: the checkpoint that the run continues from.
        saving: entered while the models copy or write their state.

    Attributes:
        newest: newest complete checkpoint of this run, which a learner that is built again starts from.
    """

    def __init__(
        self,
        config: Config,
        console: Console,
        models: Callable[[], Mapping[str, CheckpointedModel]],
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
        self._missing: set[str] = set()
        self._report: dict[str, float] = {}

    @property
    def overdue(self) -> bool:
        """Whether a checkpoint is missing, so that each following step is to be saved until one is written."""
        return _COMPLETE in self._missing

    @property
    def weights_overdue(self) -> bool:
        """The same of only the weights."""
        return _WEIGHTS in self._missing

    async def save(self, step: int, contents: Contents, *, wait: bool) -> dict[str, float]:
        """``write`` and ``commit``, for what needs nothing in between."""
        metrics = await self.write(step, contents, wait=wait)
        await self.commit()
        return metrics

    async def write(
        self, step: int, contents: Contents | None, *, wait: bool, weights: bool = False
    ) -> dict[str, float]:
        """Write the checkpoint of ``step`` but for its name.

        With trainer.async_save the models only copy their state here and write it while the next step is generated;
        ``finish`` completes the checkpoint. ``wait`` writes it now, for ``commit`` to complete.

        Args:
            contents: None: there is to be none but that of ``weights``.
            weights: a checkpoint of only the weights; beside a complete one it shares that one's files.

        Returns:
            checkpoint/failed_saves, how many have failed in a row; size and seconds of what is complete but for its
            name (checkpoint/size_gb, checkpoint/weights_size_gb, checkpoint/seconds).

        Raises:
            SaveError: the disk is full, and the run waits for this one or ``trainer.on_failed_save`` is stop.
        """
        pending = _Pending(step, contents, weights, required=wait)
        await self._tolerated(self._write(pending), pending.kinds, required=wait)
        return {"checkpoint/failed_saves": float(self._failed), **self._take_report()}

    async def commit(self) -> None:
        """Give the checkpoint that is written its name, and delete what retention does not keep.

        A run resumes after a checkpoint's step: what belongs to that step has to be on disk before. One that is still
        being written stays for ``finish``.

        Raises:
            SaveError: as ``write``.
        """
        if self._pending is not None and self._pending.sealed:
            await self._tolerated(self._finish(), self._pending.kinds, required=self._pending.required)

    async def finish(self) -> dict[str, float]:
        """Complete the checkpoint that is being written, if there is one, and delete what retention does not keep.

        Returns:
            Its size and seconds, as of ``write``.

        Raises:
            SaveError: the disk is full, and ``trainer.on_failed_save`` is stop.
        """
        if self._pending is not None:
            await self._tolerated(self._finish(), self._pending.kinds, required=False)
        return self._take_report()

    async def load(self) -> Checkpoint | None:
        """Put the models where the newest checkpoint left them; None: there is none, and they are left as they are.

        What is being written is given up, since its writers may be gone, and failures are forgotten.
        """
        self._pending, self._failed, self._missing = None, 0, set()
        if self.newest is not None:
            for name, model in self._models().items():
                await model.load(self.newest.path / name)
        return self.newest

    async def _tolerated(self, work: Awaitable[None], kinds: set[str], *, required: bool) -> None:
        try:
            await work
            self._missing -= kinds
            if not self._missing:
                self._failed = 0
        except SaveError as error:
            if required or self._config.trainer.on_failed_save == "stop":
                raise
            self._failed += 1
            self._missing |= kinds
            text = f"{error}. Training continues (trainer.on_failed_save), and the next step tries again"
            self._say(text, "bold red")

    async def _write(self, pending: _Pending) -> None:
        await self._finish()
        began, run_dir, step = time.perf_counter(), self._config.trainer.run_dir, pending.step
        asynchronous = self._config.trainer.async_save and not pending.required
        async with self._saving():
            with removed_on_failure(run_dir, step):
                if pending.contents is None:
                    place = weights_workspace(run_dir, step)
                    await self._models()["learner"].save(place, asynchronous=asynchronous, weights_only=True)
                else:
                    workspace = checkpoint_workspace(run_dir, step)
                    for name, model in self._models().items():
                        await model.save(workspace / name, asynchronous=asynchronous)
                    if pending.contents.write is not None:
                        pending.contents.write(workspace)
        pending.seconds = time.perf_counter() - began
        if not asynchronous:
            await self._seal(pending)
        self._pending = pending

    async def _seal(self, pending: _Pending) -> None:
        began, run_dir, step = time.perf_counter(), self._config.trainer.run_dir, pending.step
        with removed_on_failure(run_dir, step) as workspace:
            for model in self._models().values():
                await model.finish_save()
            if pending.contents is not None:
                seal_checkpoint(workspace, pending.contents.files)
                if pending.weights:
                    link_weights(workspace / "learner", weights_workspace(run_dir, step))
            pending.bytes = bytes_below(workspace), bytes_below(weights_workspace_path(run_dir, step))
        pending.sealed = True
        pending.seconds += time.perf_counter() - began
        self._report["checkpoint/seconds"] = pending.seconds
        for kind, name, size in zip(
            (_COMPLETE, _WEIGHTS), ("checkpoint/size_gb", "checkpoint/weights_size_gb"), pending.bytes, strict=True
        ):
            if kind in pending.kinds:
                self._report[name] = size / 2**30

    async def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not pending.sealed:
            await self._seal(pending)
        run_dir, said = self._config.trainer.run_dir, []
        with removed_on_failure(run_dir, pending.step) as workspace:
            # Weights come first: a run that is killed between the two repeats the step, and writes both again.
            if pending.weights:
                weights = publish_weights(run_dir, pending.step)
                shared = f", in files of global_step_{pending.step}" if pending.contents else ""
                said.append(f"{weights.path}, {size_text(pending.bytes[1])} of only weights{shared}")
            if pending.contents is not None:
                self.newest = publish_checkpoint(workspace, pending.step)
                said.insert(0, f"{self.newest.path}, {size_text(pending.bytes[0])}")
        compression = self._config.trainer.checkpoint_compression
        how = f" (compressed by {compression})" if compression != "none" else ""
        self._say(f"saved {'; '.join(said)}{how}, in {pending.seconds:.1f} s", "dim")
        if pending.weights:
            prune_weights(self._config.trainer, self._config.model, weights)
        if pending.contents is not None and self.newest is not None:
            prune_checkpoints(self._config.trainer, self.newest)

    def _take_report(self) -> dict[str, float]:
        report, self._report = self._report, {}
        return report

    def _say(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def bytes_below(directory: Path) -> int:
    """Size of all files in and below ``directory``; 0 where it is not there."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
