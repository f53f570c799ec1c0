"""Everything behind the routes: sessions, runs, checkpoints, samples, and what keeps them going."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from megatron_retool.config.tinker import TinkerConfig
from megatron_retool.tinker.checkpoints import Checkpoints
from megatron_retool.tinker.external_weights import DownloadUrls
from megatron_retool.tinker.loaded_adapters import LoadedAdapters
from megatron_retool.tinker.promises import Promises
from megatron_retool.tinker.requests import CheckpointPath
from megatron_retool.tinker.run_store import RunStore
from megatron_retool.tinker.sampler import PromptSampler
from megatron_retool.tinker.sampling import Sampling
from megatron_retool.tinker.served_model import ServedModel
from megatron_retool.tinker.sessions import ClientSession, ClientSessions
from megatron_retool.tinker.trainer import Trainer
from megatron_retool.tinker.training import Training

SWEEP_SECONDS = 5.0
logger = logging.getLogger(__name__)


class TinkerService:
    """An asynchronous context manager, of one event loop, in which it is made.

    Args:
        directory: what the server keeps (``run_store``); a server that ran there before is continued.
        fatal: errors of the trainer after which it cannot be asked again.
        sweep_seconds: between looks for what has expired.

    Raises:
        OSError: on entering, the directory cannot be read or written.
    """

    def __init__(
        self,
        config: TinkerConfig,
        model: ServedModel,
        trainer: Trainer,
        sampler: PromptSampler,
        directory: Path,
        *,
        fatal: tuple[type[Exception], ...] = (),
        sweep_seconds: float = SWEEP_SECONDS,
    ) -> None:
        self.model = model
        store = RunStore(directory)
        self.promises = Promises()
        self.sessions = ClientSessions(store, config.session_timeout_seconds)
        self._adapters = LoadedAdapters(sampler, config.loaded_adapters)
        self.checkpoints = Checkpoints(store, self._forget_adapter)
        self.training = Training(config, model, trainer, store, self.checkpoints, self.sessions, self.promises, fatal)
        self.sampling = Sampling(model, sampler, self._adapters, self.checkpoints, self.sessions, self.promises)
        self.downloads = DownloadUrls()
        self._sweep_seconds = sweep_seconds
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> TinkerService:
        for part in (self.sessions, self.checkpoints, self.training):
            await asyncio.to_thread(part.restore)
        self._stack.push_async_callback(self.sampling.close)
        for work in (self.training.queue.work(), self._keep_tidy()):
            self._stack.push_async_callback(_ended, asyncio.create_task(work))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def until_it_dies(self) -> None:
        """Return never, but raise what ended the trainer.

        Raises:
            Exception: one of ``fatal``.
        """
        raise await self.training.died

    async def finish(self, session: ClientSession) -> None:
        """End a session and close its runs."""
        await self.sessions.finish(session)
        await self.training.end(session.record.id)

    async def _forget_adapter(self, path: CheckpointPath) -> None:
        if path.kind == "sampler_weights":
            await self._adapters.forget(path)

    async def _keep_tidy(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_seconds)
            try:
                self.promises.sweep()
                self.training.skip_missing()
                for session in self.sessions.expired():
                    await self.finish(session)
                await self.checkpoints.delete_expired()
            except Exception:
                logger.exception("tinker: what has expired could not be put away; it is tried again")


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
