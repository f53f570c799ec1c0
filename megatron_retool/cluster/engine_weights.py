"""The weights that the engines serve: sent after every step, and to an engine that was restarted or added since.

An engine that does not start again is left out, as long as there is another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from rich.console import Console

from megatron_retool.cluster.engine_group import GONE, EngineGroup
from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.cluster.learner_failures import LearnerDied
from megatron_retool.cluster.log_prob_check import LogProbCheck, ScoringLearner
from megatron_retool.runs.step_timer import StepTimer
from run_files.phases import Phase
from sglang_rollout.engine.base import AdapterEngine, EngineStartError
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

SYNC_ATTEMPTS = 3
"""More than two: while one engine is restarted, another may die."""


class WeightSource(ScoringLearner, Protocol):
    """A learner group, as far as engines are concerned."""

    async def sync_weights(self, senders: dict[int, list[str]], version: int) -> dict[str, float]:
        """Send the weights to the engines at ``senders`` (base URLs by learner rank); weight_sync/* metrics."""


class EngineWeights:
    """Keeps every engine on the learner's weights, across restarts of engines.

    Args:
        source: the present learner; None: the engines serve ``model_path`` for good.
        replaced: told of an engine that was restarted during a sync, by its old and its new URL.
        starting: timer of phases in which processes start.
        check: compares each engine with the learner once, at the first ``sync`` that it takes part in.

    Attributes:
        version: of the weights that the engines serve: the number of the last completed step.
    """

    def __init__(
        self,
        engines: EngineGroup,
        model_path: str,
        source: Callable[[], WeightSource] | None,
        gpu_phases: GpuPhases,
        replaced: Callable[[str, str], Awaitable[None]],
        starting: StepTimer,
        console: Console,
        check: LogProbCheck | None = None,
    ) -> None:
        self.version = 0
        self._starts: dict[str, asyncio.Future[str | None]] = {}
        """Engines that are being restarted, by the URL of the dead one."""
        self._sending = asyncio.Lock()
        self._settled = asyncio.Event()
        """The learner's weights are those of ``version``."""
        self._settled.set()
        self._current: set[str] = set()
        """Engines that serve ``version``."""
        self._engines = engines
        self._model_path = model_path
        self._source = source
        self._gpu_phases = gpu_phases
        self._replaced = replaced
        self._starting = starting
        self._console = console
        self._check = check

    async def before_update(self) -> None:
        """The learner is about to change its weights: until the next ``sync`` no engine gets them in between."""
        async with self._sending:
            self._settled.clear()

    async def sync(self, version: int) -> dict[str, float]:
        """Give every engine the learner's weights; returns when each of them serves ``version``.

        Engines that fail to take them are restarted and get them once more; the last of SYNC_ATTEMPTS is raised.

        Raises:
            LogProbMismatch: an engine that takes part for the first time computes another model.
        """
        assert self._source is not None
        if self._starts:
            # Engines that died while the learner trained: they take part.
            await asyncio.wait(set(self._starts.values()))
        replaced: dict[str, str] = {}
        async with self._sending:
            async with self._gpu_phases.syncing():
                for left in reversed(range(SYNC_ATTEMPTS)):
                    urls = self._engines.urls
                    try:
                        metrics = await self._send(urls, version)
                        break
                    except WeightSyncError as error:
                        if not left:
                            raise
                        await self._restart_culprits(error, replaced)
                self.version = version
                self._current = set(urls)
                self._settled.set()
                for url, new_url in replaced.items():
                    # Not before: until here they had no weights, and in async they would generate at once.
                    await self._replaced(url, new_url)
                # The learner leaves the GPUs with this block, and only then the engines can generate.
                if self._check is not None:
                    await self._check.score_by(self._source(), urls)
            if self._check is not None:
                # Those of earlier comparisons: the first sync of a run belongs to no step.
                metrics = metrics | self._check.take_metrics()
                await self._check.compare()
        return metrics

    async def _send(self, urls: Sequence[str], version: int) -> dict[str, float]:
        assert self._source is not None
        metrics = await self._source().sync_weights(self._engines.by_sender(urls), version)
        if isinstance(self._engines.engine, AdapterEngine):
            await self._engines.engine.serve(version, urls)
        return metrics

    async def _restart_culprits(self, error: WeightSyncError, replaced: dict[str, str]) -> None:
        """Start the engines that ``error`` names again; ``replaced`` gets the new URL of each, by the URL at which
        rollout knows it."""
        culprits = getattr(error, "cause", error).engines
        self._warn(f"weight sync failed, restarting {', '.join(culprits)}: {error}")
        if not culprits:
            raise error
        known = {new_url: url for url, new_url in replaced.items()}
        new_urls = await asyncio.gather(*(self._start_again(url) for url in culprits))
        for url, new_url in zip(culprits, new_urls, strict=True):
            replaced.pop(known.get(url, url), None)
            if new_url is not None:
                replaced[known.get(url, url)] = new_url

    async def restart(self, url: str) -> str | None:
        """Bring a dead engine back with the current weights, at the URL returned; the others continue meanwhile.

        Returns:
            None: it was replaced already, by a weight sync that met its death first, or does not start again.
        """
        new_url = await self._start_again(url)
        if new_url is None:
            async with self._sending:  # the sync that replaced it says so at its end: there is an engine then
                return None
        return await self._bring_up(new_url)

    async def add(self) -> int | None:
        """Start one more engine, with the current weights; its number. The others continue meanwhile.

        Returns:
            None: it died before it had them, and did not start again.

        Raises:
            ConfigError: there is no place for it.
            EngineStartError: it did not start.
        """
        with self._starting.phase(Phase.START_ENGINE_AGAIN):
            number = await self._engines.add(self._model_path)
        url = self._engines.url(number)
        self._is_new(url)
        return None if await self._bring_up(url) is None else number

    async def remove(self, number: int) -> None:
        """End an engine that has no requests any more."""
        async with self._sending:
            await self._engines.remove(number)

    async def _bring_up(self, url: str) -> str | None:
        """Give the current weights to an engine that has just started; its URL, which changes where it dies meanwhile.

        None: it did not start again.
        """
        if self._source is None:
            return url
        for left in reversed(range(SYNC_ATTEMPTS)):
            try:
                await self._send_to_one(url)
                break
            except LearnerDied as error:
                # The loop meets the same death at its next call, and what this engine samples until then is dropped.
                self._warn(f"engine {url} is there without the current weights: {error}")
                break
            except WeightSyncError:
                # It died once more, before it served anybody.
                if not left:
                    raise
                new_url = await self._start_again(url)
                if new_url is None:
                    return None
                url = new_url
        return url

    async def _send_to_one(self, url: str) -> None:
        """Send the weights of ``version``, once the learner has no others, unless a sync comes first."""
        while url not in self._current:
            await self._settled.wait()
            # Compared at the next sync: until then the learner may be changing its weights, or have no room.
            async with self._sending, self._gpu_phases.sending_to_one():
                if self._engines.number(url) is None:
                    raise WeightSyncError(f"{url} was given up by a weight sync that met its death", [url])
                if self._settled.is_set() and url not in self._current:
                    await self._send([url], self.version)
                    self._current.add(url)

    async def _start_again(self, url: str) -> str | None:
        """The new URL; rollout and a weight sync may meet the same death, and share one start."""
        if url not in self._starts:
            number = self._engines.number(url)
            if number is None:
                return None
            start = self._starts[url] = asyncio.ensure_future(self._start(number, url))
            start.add_done_callback(lambda _: self._starts.pop(url))
        # One who asks may be cancelled; the other still waits.
        return await asyncio.shield(self._starts[url])

    async def _start(self, number: int, url: str) -> str | None:
        with self._starting.phase(Phase.START_ENGINE_AGAIN):
            new_url = await self._started(number, url)
        if new_url is not None:
            self._is_new(new_url)
        return new_url

    async def _started(self, number: int, url: str) -> str | None:
        """The new URL; None where the engine does not start and others continue without it."""
        try:
            try:
                return await self._engines.restart(number, self._model_path)
            except EngineStartError as error:
                # What kills an engine may kill it while it starts, too: once more is worth its time.
                self._warn(f"engine {url} did not restart, trying once more: {error}")
                return await self._engines.restart(number, self._model_path)
        except (EngineStartError, *GONE) as error:
            if self._engines.stopped or len(self._engines.urls) == 1:
                raise
            self._engines.give_up(number)
            count = len(self._engines.urls)
            left = "1 engine" if count == 1 else f"{count} engines"
            self._warn(f"engine {url} does not start again, the run continues with {left}: {error}")
            return None

    def _is_new(self, url: str) -> None:
        """Forget what an engine that had this URL before was known to have."""
        self._current.discard(url)
        self._gpu_phases.restarted(url)
        if isinstance(self._engines.engine, AdapterEngine):
            self._engines.engine.restarted(url)
        if self._check is not None:
            self._check.restarted(url)

    def _warn(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False)
