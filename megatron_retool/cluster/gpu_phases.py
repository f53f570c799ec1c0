"""Who is on the GPUs when learner and engines share them (cluster.placement=colocated).

| phase | engines | learner | critic |
|---|---|---|---|
| generation | awake | away | away |
| training | weights and KV cache released | all there | all there |
| weight sync | KV cache released | weights there | away |
| saving | KV cache released | weights and optimizer there | the same |

"away" is in host memory. After training the engines' weights are empty, so a weight sync always comes before the next
generation; with learner.lora.sync=adapter a copy of them waits in host memory too, and the sync brings the adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from sglang_rollout.engine.base import EngineClient, EngineUnavailable, Memory

_WEIGHTS, _CACHE = Memory.WEIGHTS, Memory.KV_CACHE


class PhasedModel(Protocol):
    """A learner group, as far as its memory is concerned."""

    async def offload(self, *parts: str) -> None:
        """Move parts of the model to host memory."""

    async def reload(self, *parts: str) -> None:
        """Bring parts of the model back."""


class GpuPhases:
    """Whose memory is on the GPUs. Every method does nothing where ``enabled`` is false.

    It starts in training: the learner there, no engine yet.

    Args:
        models: the present learner and critic, in this order.
        engines: the engines' URLs.
        client: makes a client of the engine at a URL; needed where ``enabled``.
    """

    def __init__(
        self,
        enabled: bool,
        models: Callable[[], Sequence[PhasedModel]],
        engines: Callable[[], Sequence[str]],
        client: Callable[[str], EngineClient] | None = None,
    ) -> None:
        if enabled and client is None:
            raise ValueError("learner and engines that share GPUs need a client of each engine")
        self.enabled = enabled
        self._models = models
        self._engines = engines
        self._client = client
        self._asleep: dict[str, set[Memory]] = {}
        """What each engine has released, by URL; a restarted one is not in it."""

    async def training(self) -> None:
        """The learner's phase: log-probs, values, updates, loading."""
        await self.engines_leave()
        await self._reload("weights", "optimizer", "gradients")

    async def engines_leave(self) -> None:
        """The engines release everything, also where there is no learner just now."""
        await self._sleep(_CACHE, _WEIGHTS)

    def restarted(self, url: str) -> None:
        """The engine at ``url`` is a new one, which has all its memory."""
        self._asleep.pop(url, None)

    async def engines_only(self) -> None:
        """Learner and critic leave, before the engines start or the next generation."""
        await self._offload("weights", "optimizer", "gradients")
        await self._wake(_WEIGHTS, _CACHE)

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """For a weight sync, from wherever it was; afterwards the engines generate."""
        if not self.enabled:
            yield
            return
        learner, *critics = self._models()
        await self._sleep(_CACHE)
        await self._offload("optimizer", "gradients")
        for critic in critics:
            await critic.offload("weights")
        await self._wake(_WEIGHTS)
        await learner.reload("weights")
        yield
        await self.engines_only()

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """For a checkpoint between two generations. The engines keep their weights."""
        await self._sleep(_CACHE)
        await self._reload("weights", "optimizer")
        try:
            yield
        finally:
            await self.engines_only()

    @asynccontextmanager
    async def sending_to_one(self) -> AsyncIterator[None]:
        """For bringing one restarted engine up to date while the others continue."""
        if self.enabled:
            await self._models()[0].reload("weights")
        yield
        if self.enabled:
            await self._models()[0].offload("weights")

    async def _reload(self, *parts: str) -> None:
        if self.enabled:
            await asyncio.gather(*(model.reload(*parts) for model in self._models()))

    async def _offload(self, *parts: str) -> None:
        if self.enabled:
            await asyncio.gather(*(model.offload(*parts) for model in self._models()))

    async def _sleep(self, *memory: Memory) -> None:
        if self.enabled:
            await asyncio.gather(*(self._sleep_one(url, memory) for url in self._engines()))

    async def _wake(self, *memory: Memory) -> None:
        if self.enabled:
            await asyncio.gather(*(self._wake_one(url, memory) for url in self._engines()))

    async def _sleep_one(self, url: str, memory: Sequence[Memory]) -> None:
        assert self._client is not None
        asleep = self._asleep.setdefault(url, set())
        missing = [part for part in memory if part not in asleep]
        if not missing:
            return
        # One that is gone has released everything; the next weight sync finds it and starts it again.
        with contextlib.suppress(EngineUnavailable):
            async with self._client(url) as client:
                await client.sleep(missing)
        asleep.update(missing)

    async def _wake_one(self, url: str, memory: Sequence[Memory]) -> None:
        assert self._client is not None
        asleep = self._asleep.get(url, set())
        missing = [part for part in memory if part in asleep]
        if missing:
            with contextlib.suppress(EngineUnavailable):
                async with self._client(url) as client:
                    await client.wake(missing)
            asleep.difference_update(missing)
