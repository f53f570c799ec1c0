"""Engines as Ray actors: each actor owns one engine on the node that holds its GPUs.

An engine has a number for as long as it belongs to the run, over restarts too; one that is added gets the next number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError

from megatron_retool.cluster.gpus import visible_devices
from megatron_retool.cluster.learner_failures import DEATHS
from megatron_retool.cluster.placement import Placement, Slot
from megatron_retool.cluster.runtime import (
    driver_node,
    node_address,
    nodes_to_use,
    redirect_output,
    resolved,
    stop_actors,
)
from megatron_retool.config import Config
from sglang_rollout.engine.base import EngineServer, make_engine
from sglang_rollout.engine.key import engine_key, use_engine_key

ANSWER_SECONDS = 20.0
"""How long an actor may take to end its engine (10 of it are the engine's own limits) before it is replaced."""
GONE = (*DEATHS, ActorUnschedulableError)
"""What Ray raises for an actor that is gone, or whose node is."""


class EngineWorker:
    """Owner of one engine. The engine dies with this actor, and this actor with the driver.

    Args:
        gpus: what the engine sees of its node's GPUs; its tensor-parallel ranks take the first of them.
        other_nodes: processes of other nodes speak to it.
        key: what the engine demands of requests; None: a key that this process makes.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        tokenizer: bool,
        weights_from_sync: bool,
        gpus: Sequence[int] = (),
        other_nodes: bool = False,
        key: str | None = None,
    ) -> None:
        if key is not None:
            use_engine_key(key)
        self.config = config
        self.index = index
        self.tokenizer = tokenizer
        self.weights_from_sync = weights_from_sync
        self.gpus = gpus
        self.other_nodes = other_nodes
        self.logs = config.run_dir.absolute() / "logs"
        redirect_output(self.logs / f"engine_{index}_actor.log")
        self.engine: EngineServer | None = None

    def start(self, model_path: str) -> str:
        """Start the engine, wait until it can generate, and return its base URL."""
        host = node_address() if self.other_nodes else "127.0.0.1"
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
        stopped: the run ends, and its engines with it.
    """

    def __init__(
        self, config: Config, placement: Placement, *, tokenizer: bool = False, weights_from_sync: bool = False
    ) -> None:
        self.engine = make_engine(config)
        self._config, self._placement = config, placement
        self._tokenizer, self._weights_from_sync = tokenizer, weights_from_sync
        self.stopped = False
        self._workers = {number: self._new_worker(number) for number in range(config.rollout.engine.count)}
        self._next = len(self._workers)
        self._urls: dict[int, str] = {}

    def _new_worker(self, number: int) -> Any:
        config, placement = self._config, self._placement
        options = placement.engine_options(number)
        gpus = placement.engine_gpus(number, config.weight_sync.method)
        other_nodes = config.cluster.nodes > 1 or len(placement.node_ids) > 1
        worker = ray.remote(EngineWorker).options(**options)
        return worker.remote(config, number, self._tokenizer, self._weights_from_sync, gpus, other_nodes, engine_key())

    @property
    def urls(self) -> list[str]:
        """Base URL of each engine that was started, in order of their numbers."""
        return [self._urls[number] for number in sorted(self._urls)]

    @property
    def by_number(self) -> dict[int, str]:
        """Base URL of each engine that was started, by its number."""
        return dict(self._urls)

    async def start(self, model_path: str) -> None:
        """Start every engine, all at once, and learn their URLs."""
        urls = await asyncio.gather(*(resolved(worker.start.remote(model_path)) for worker in self._workers.values()))
        self._urls = dict(zip(self._workers, urls, strict=True))

    def place(self, number: int) -> Slot:
        """Node of an engine, and its GPUs as places there."""
        slot = self._placement.slot("engine", number)
        return dataclasses.replace(slot, gpus=self._placement.gpus("engine", number))

    def url(self, number: int) -> str:
        """Base URL of an engine that was started."""
        return self._urls[number]

    def number(self, url: str) -> int | None:
        """Number of the engine at ``url``; None: there is none any more."""
        return next((number for number, own in self._urls.items() if own == url), None)

    def by_sender(self, urls: Sequence[str]) -> dict[int, list[str]]:
        """``urls`` of engines by the learner rank that gives them their weights (``Placement.sender``), or by each."""
        if self._config.weight_sync.method == "sharded":
            return {rank: list(urls) for rank in range(self._config.learner.world_size)}
        numbers = {url: number for number, url in self._urls.items()}
        senders: dict[int, list[str]] = {}
        for url in urls:
            rank = self._placement.sender(numbers[url], self._config.weight_sync.method)
            senders.setdefault(rank, []).append(url)
        return senders

    async def restart(self, number: int, model_path: str) -> str:
        """Restart an engine (its weights are those of ``model_path`` until the next sync); its URL.

        An actor that is dead or does not answer is replaced, and what is left of its engine ends with it.
        """
        try:
            await asyncio.wait_for(resolved(self._workers[number].stop.remote()), ANSWER_SECONDS)
            url = await self._workers[number].start.remote(model_path)
        except (*GONE, TimeoutError):
            if self.stopped:
                raise
            ray.kill(self._workers[number])
            self._workers[number] = self._new_worker(number)
            url = await self._workers[number].start.remote(model_path)
        self._urls[number] = url
        return str(url)

    async def add(self, model_path: str) -> int:
        """Start one more engine on GPUs that no process of the run has, also of a node that has joined Ray since the
        run began (its weights are those of ``model_path`` until the next sync); its number.

        Raises:
            ConfigError: there is no place for it.
            EngineStartError: it did not start.
        """
        number, placement = self._next, self._placement
        known = placement.node_ids or (driver_node(),)
        usable = nodes_to_use(known, placement.gpus_per_node)
        ids = [*known, *(node for node in usable if node not in known)]
        if len(ids) > 1:
            placement = placement.on_nodes(ids)
        nodes = [ids.index(node) for node in usable]
        method = self._config.weight_sync.method
        if method == "tensor":
            nodes = [node for node in nodes if node in placement.nodes_of("learner")]
        elif method == "disk" and len(known) == 1:
            nodes = [node for node in nodes if node == 0]  # another may not see this one's files
        gpus = self._config.rollout.engine.tensor_parallel_size
        self._placement, self._next = placement.with_engine(number, gpus, nodes), number + 1
        worker = self._workers[number] = self._new_worker(number)
        try:
            self._urls[number] = await worker.start.remote(model_path)
        except BaseException:
            self.give_up(number)
            raise
        return number

    async def remove(self, number: int) -> None:
        """End an engine, whose GPUs are free then."""
        worker = self._drop(number)
        await stop_actors([worker])
        ray.kill(worker)

    def give_up(self, number: int) -> None:
        """Forget an engine that does not start any more."""
        ray.kill(self._drop(number))

    def _drop(self, number: int) -> Any:
        self._urls.pop(number, None)
        self._placement = self._placement.without_engine(number)
        return self._workers.pop(number)

    async def stop(self) -> None:
        """End every engine. An actor that is still busy starting one is killed, which ends its engine as well."""
        self.stopped = True
        await stop_actors(list(self._workers.values()))
