"""Engines as Ray actors: each actor owns one engine on the node that holds its GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import ray

from megatron_retool.cluster.gpus import visible_devices
from megatron_retool.cluster.learner_failures import DEATHS
from megatron_retool.cluster.placement import Placement
from megatron_retool.cluster.runtime import node_address, redirect_output, resolved, stop_actors
from megatron_retool.config import Config
from sglang_rollout.engine.base import EngineServer, make_engine
from sglang_rollout.engine.key import engine_key, use_engine_key

ANSWER_SECONDS = 20.0
"""How long an actor may take to end its engine (10 of it are the engine's own limits) before it is replaced."""


class EngineWorker:
    """Owner of one engine. The engine dies with this actor, and this actor with the driver.

    Args:
        gpus: what the engine sees of its node's GPUs; its tensor-parallel ranks take the first of them.
        key: what the engine demands of requests; None: a key that this process makes.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        tokenizer: bool,
        weights_from_sync: bool,
        gpus: Sequence[int] = (),
        key: str | None = None,
    ) -> None:
        if key is not None:
            use_engine_key(key)
        self.config = config
        self.index = index
        self.tokenizer = tokenizer
        self.weights_from_sync = weights_from_sync
        self.gpus = gpus
        self.logs = config.run_dir.absolute() / "logs"
        redirect_output(self.logs / f"engine_{index}_actor.log")
        self.engine: EngineServer | None = None

    def start(self, model_path: str) -> str:
        """Start the engine, wait until it can generate, and return its base URL."""
        host = "127.0.0.1" if self.config.cluster.nodes == 1 else node_address()
        self.engine = make_engine(self.config).server(
            self.index,
            model_path=model_path,
            host=host,
            log_file=self.logs / f"engine_{self.index}.log",
            tokenizer=self.tokenizer,
            weights_from_sync=self.weights_from_sync,
            gpu_ids=visible_devices(self.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")) if self.gpus else None,
        )
        self.engine.start()
        return self.engine.base_url

    def stop(self) -> None:
        """End the engine's server."""
        if self.engine is not None:
            self.engine.stop()


class EngineGroup:
    """All engines of the run.

    Args:
        tokenizer: the engines look for strings in what they sample, and need the tokenizer for it.
        weights_from_sync: a learner gives them their weights before the first request.

    Attributes:
        engine: makes what speaks to them.
        urls: base URL of each engine, in order of index.
    """

    def __init__(
        self, config: Config, placement: Placement, *, tokenizer: bool = False, weights_from_sync: bool = False
    ) -> None:
        self.engine = make_engine(config)
        self._config, self._placement = config, placement
        self._tokenizer, self._weights_from_sync = tokenizer, weights_from_sync
        self._stopped = False
        self.workers: list[Any] = [self._new_worker(index) for index in range(config.rollout.engine.count)]
        self.urls: list[str] = []

    def _new_worker(self, index: int) -> Any:
        config, placement = self._config, self._placement
        options = placement.engine_options(index)
        gpus = placement.engine_gpus(index, config.weight_sync.method)
        worker = ray.remote(EngineWorker).options(**options)
        return worker.remote(config, index, self._tokenizer, self._weights_from_sync, gpus, engine_key())

    async def start(self, model_path: str) -> None:
        """Start every engine, all at once, and learn their URLs."""
        self.urls = list(await asyncio.gather(*(resolved(worker.start.remote(model_path)) for worker in self.workers)))

    def by_sender(self, urls: Sequence[str]) -> dict[int, list[str]]:
        """``urls`` of engines by the learner rank that gives them their weights (``Placement.sender``)."""
        senders: dict[int, list[str]] = {}
        for url in urls:
            rank = self._placement.sender(self.urls.index(url), self._config.weight_sync.method)
            senders.setdefault(rank, []).append(url)
        return senders

    async def restart(self, index: int, model_path: str) -> str:
        """Restart engine ``index`` (its weights are those of ``model_path`` until the next sync).

        An actor that is dead or does not answer is replaced, and what is left of its engine ends with it.
        """
        try:
            await asyncio.wait_for(resolved(self.workers[index].stop.remote()), ANSWER_SECONDS)
            self.urls[index] = await self.workers[index].start.remote(model_path)
        except (*DEATHS, TimeoutError):
            if self._stopped:
                raise
            ray.kill(self.workers[index])
            self.workers[index] = self._new_worker(index)
            self.urls[index] = await self.workers[index].start.remote(model_path)
        return self.urls[index]

    async def stop(self) -> None:
        """End every engine. An actor that is still busy starting one is killed, which ends its engine as well."""
        self._stopped = True
        await stop_actors(self.workers)
