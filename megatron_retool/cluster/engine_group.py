"""Engines as Ray actors: each actor owns one engine on the node that holds its GPUs.

An engine has a number for as long as it belongs to the run, over restarts too; one that is added gets the next number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import ActorUnschedulableError

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
from megatron_retool.config.cluster import visible_devices
from megatron_retool.ports import free_port
from sglang_rollout.engine.base import EnginePart, EngineServer, PartServer
from sglang_rollout.engine.configured import make_engine
from sglang_rollout.engine.key import engine_key, use_engine_key

ANSWER_SECONDS = 20.0
"""How long an actor may take to end its engine (10 of it are the engine's own limits) before it is replaced."""
PART_LOOK_SECONDS = 2.0
"""How often the parts of an engine on several nodes are looked at."""
GONE = (*DEATHS, ActorUnschedulableError)
"""What Ray raises for an actor that is gone, or whose node is."""


class EngineWorker:
    """Owner of one engine, or of one node's part of it. It dies with this actor, and this actor with the driver.

    Args:
        part: of an engine on several nodes.
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
        part: int = 0,
    ) -> None:
        if key is not None:
            use_engine_key(key)
        self.config = config
        self.index = index
        self.tokenizer = tokenizer
        self.weights_from_sync = weights_from_sync
        self.gpus = gpus
        self.other_nodes = other_nodes
        self.part = part
        self.logs = config.trainer.run_dir.absolute() / "logs"
        self.name = f"engine_{index}" + (f"_node_{part}" if part else "")
        redirect_output(self.logs / f"{self.name}_actor.log")
        self.engine: EngineServer | None = None

    def meeting_place(self) -> str:
        """An address of this node, host:port, that nothing listens at."""
        return f"{node_address()}:{free_port(node_address())}"

    def start(self, model_path: str, parts: int = 1, address: str = "") -> str:
        """Start the engine, wait until it can generate, and return its base URL.

        Args:
            parts: nodes that it is on.
            address: of the first node, where its parts meet.
        """
        host = node_address() if self.other_nodes else "127.0.0.1"
        part: dict[str, Any] = {"part": EnginePart(self.part, parts, address)} if parts > 1 else {}
        self.engine = make_engine(self.config).server(
            self.index,
            model_path=model_path,
            host=host,
            log_file=self.logs / f"{self.name}.log",
            tokenizer=self.tokenizer,
            weights_from_sync=self.weights_from_sync,
            gpu_ids=visible_devices(self.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")) if self.gpus else None,
            **part,
        )
        self.engine.start()
        return self.engine.base_url

    def is_alive(self) -> bool:
        """Whether this part of an engine on several nodes runs."""
        return self.engine is not None and cast(PartServer, self.engine).is_alive()

    def stop(self) -> None:
        """End the engine's server."""
        if self.engine is not None:
            self.engine.stop()


class EngineGroup:
    """All engines of the run.

    An engine on several nodes has an actor on each of them. Its parts start and end together: where one has ended, the
    others are ended too, and the engine is restarted as any dead one.

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
        self._workers = {number: self._new_workers(number) for number in range(config.rollout.engine.count)}
        self._next = len(self._workers)
        self._urls: dict[int, str] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}

    def _new_workers(self, number: int) -> list[Any]:
        """Actors of an engine, one for each of its nodes."""
        config, placement = self._config, self._placement
        method = config.weight_sync.method
        other_nodes = config.cluster.nodes > 1 or len(placement.node_ids) > 1
        common = (self._tokenizer, self._weights_from_sync)
        workers = []
        for part in range(len(placement.parts(number))):
            actor = ray.remote(EngineWorker).options(**placement.engine_options(number, part))
            gpus = placement.engine_gpus(number, method, part)
            workers.append(actor.remote(config, number, *common, gpus, other_nodes, engine_key(), part))
        return workers

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
        urls = await asyncio.gather(*(self._start(number, model_path) for number in self._workers))
        self._urls = dict(zip(self._workers, urls, strict=True))

    async def _start(self, number: int, model_path: str) -> str:
        """Start an engine, on all of its nodes at once; its URL."""
        workers = self._workers[number]
        if len(workers) == 1:
            return str(await workers[0].start.remote(model_path))
        address = await workers[0].meeting_place.remote()
        starts = [resolved(worker.start.remote(model_path, len(workers), address)) for worker in workers]
        url, *_ = await asyncio.gather(*starts)
        self._watches[number] = asyncio.create_task(self._watch(workers))
        return str(url)

    @staticmethod
    async def _watch(workers: Sequence[Any]) -> None:
        """End an engine on several nodes once a part of it has ended: its server might wait for that part for long."""
        alive = True
        while alive:
            await asyncio.sleep(PART_LOOK_SECONDS)
            try:
                alive = all(await asyncio.gather(*(resolved(worker.is_alive.remote()) for worker in workers)))
            except GONE:
                alive = False
        await stop_actors(workers)

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
        self._stop_watching(number)
        workers = self._workers[number]
        try:
            stops = (resolved(worker.stop.remote()) for worker in workers)
            await asyncio.wait_for(asyncio.gather(*stops), ANSWER_SECONDS)
            url = await self._start(number, model_path)
        except (*GONE, TimeoutError):
            if self.stopped:
                raise
            for worker in workers:
                ray.kill(worker)
            self._workers[number] = self._new_workers(number)
            url = await self._start(number, model_path)
        self._urls[number] = url
        return url

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
        self._workers[number] = self._new_workers(number)
        try:
            self._urls[number] = await self._start(number, model_path)
        except BaseException:
            self.give_up(number)
            raise
        return number

    async def remove(self, number: int) -> None:
        """End an engine, whose GPUs are free then."""
        workers = self._drop(number)
        await stop_actors(workers)
        for worker in workers:
            ray.kill(worker)

    def give_up(self, number: int) -> None:
        """Forget an engine that does not start any more."""
        for worker in self._drop(number):
            ray.kill(worker)

    def _drop(self, number: int) -> list[Any]:
        self._stop_watching(number)
        self._urls.pop(number, None)
        self._placement = self._placement.without_engine(number)
        return self._workers.pop(number)

    def _stop_watching(self, number: int) -> None:
        if watch := self._watches.pop(number, None):
            watch.cancel()

    async def stop(self) -> None:
        """End every engine. An actor that is still busy starting one is killed, which ends its engine as well."""
        self.stopped = True
        for number in list(self._watches):
            self._stop_watching(number)
        await stop_actors([worker for workers in self._workers.values() for worker in workers])
