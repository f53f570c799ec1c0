"""Sandbox servers as Ray actors: one on each node of a run, kept running, behind one client."""

from __future__ import annotations

import asyncio
import secrets
import socket
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from rich.console import Console
from rich.markup import escape

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import RETRY_SECONDS, SandboxServerError, SandboxServerProcess
from megatron_retool.cluster.placement import Placement
from megatron_retool.cluster.runtime import lost_nodes, node_address, redirect_output, resolved, stop_actors
from megatron_retool.config import CodeInterpreterConfig

CHECK_SECONDS = 1.0


class SandboxWorker:
    """Owner of a node's sandbox server. The server dies with this actor, and this actor with the driver and its node.

    The server listens only on the node's address in Ray's network, and demands ``token``.
    """

    def __init__(self, config: CodeInterpreterConfig, run_dir: Path, index: int, token: str) -> None:
        logs = run_dir.absolute() / "logs"
        redirect_output(logs / f"code_interpreter_{index}_actor.log")
        self.server = SandboxServerProcess(
            config,
            host=node_address(),
            port=config.port,
            token=token,
            log_file=logs / f"code_interpreter_{index}.log",
        )

    def keep_running(self) -> tuple[str, bool]:
        """Start the server if it does not run, after a death on its old port; its URL, and whether it was started."""
        started = not self.server.is_running()
        if started:
            try:
                self.server.start()
            except SandboxServerError as error:
                raise SandboxServerError(f"{socket.gethostname()}: {error}") from error
        return self.server.url, started

    def stop(self) -> None:
        """End the code interpreter's server."""
        self.server.stop()


class SandboxGroup:
    """A sandbox server on each node. Requests go through ``client``, from ``start`` on.

    A server that ends is started again; an actor that ends gets a successor. A node that leaves Ray takes its server
    with it, and the others continue.
    """

    def __init__(self, config: CodeInterpreterConfig, run_dir: Path, console: Console) -> None:
        self.config = config
        self.run_dir = run_dir
        self.console = console
        # Whoever reaches a port of the cluster's network could run code on its nodes.
        self._token = secrets.token_urlsafe(32)
        self.client = CodeInterpreterClient([], token=self._token)
        self.workers: list[Any] = []
        self._urls: dict[int, str] = {}
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, placement: Placement) -> None:
        """Start every server.

        Raises:
            SandboxServerError: one does not start. The message names the node.
        """
        self._placement = placement
        self.workers = [self._worker(slot.rank) for slot in placement.sandboxes]
        await asyncio.gather(*(self._ensure(index) for index in range(len(self.workers))))
        self._watches = [asyncio.create_task(self._keep_running(index)) for index in range(len(self.workers))]

    async def stop(self) -> None:
        """End every server, and stop watching them."""
        for watch in self._watches:
            watch.cancel()
        await stop_actors(self.workers)

    def _worker(self, index: int) -> Any:
        options = self._placement.sandbox_options(index)
        return ray.remote(SandboxWorker).options(**options).remote(self.config, self.run_dir, index, self._token)

    async def _ensure(self, index: int) -> bool:
        """Have server ``index`` run; whether it had to be started."""
        url, started = await resolved(self.workers[index].keep_running.remote())
        if self._urls.get(index) != url:
            self._urls[index] = url
            self.client.put_server(index, url)
        return started

    async def _keep_running(self, index: int) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            has_successor = index not in self._urls
            try:
                if await self._ensure(index) and not has_successor:
                    self._say(f"the code interpreter server {self._urls[index]} ended and was started again")
            except ActorUnavailableError:
                pass  # dead or only out of reach: Ray will tell, and the client has noticed by itself
            except SandboxServerError as error:
                self._say(f"the code interpreter server does not start again on {error}")
                await asyncio.sleep(RETRY_SECONDS)
            except RayError as error:
                self.client.drop_server(index)
                lost = lost_nodes([self._placement.node_ids[index]])
                if lost:
                    self._say(f"{lost[0]} left Ray: code runs in the sandboxes of the other nodes from now on")
                    return
                self._say(f"the owner of code interpreter server {index} ended ({type(error).__name__}): a new one")
                self._urls.pop(index, None)
                self.workers[index] = self._worker(index)

    def _say(self, text: str) -> None:
        self.console.print(f"[yellow]{escape(text)}[/]")
