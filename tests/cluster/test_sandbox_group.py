"""A sandbox on each of two Ray nodes, for real: deaths of a server, of its owner, and of a whole node."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerError
from megatron_retool.cluster import sandbox_group
from megatron_retool.cluster.placement import Placement, plan_placement
from megatron_retool.cluster.runtime import node_address, node_ids
from megatron_retool.cluster.sandbox_group import SandboxGroup
from megatron_retool.config import Config, load_config
from megatron_retool.ports import free_port
from tests.kit.processes import is_alive

pytestmark = pytest.mark.timeout(300)

_DEATH_IS_NOTICED_SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two Ray nodes on this machine, "first" (this process's) and "second", which the last test here kills."""
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=4, node_name="first", _system_config=_DEATH_IS_NOTICED_SOON, include_dashboard=False)
        nodes.add_node(num_cpus=4, node_name="second")
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def configuration(directory: Path, *overrides: str) -> Config:
    interpreter = [f"tools.code_interpreter.{key}" for key in ("workers=2", "preimport=[math]", *overrides)]
    return load_config(None, ["cluster.nodes=2", f"trainer.runs_dir={directory}", *interpreter])


def placement_of(config: Config) -> Placement:
    return plan_placement(config).on_nodes(node_ids(config.cluster))


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[SandboxGroup, io.StringIO]]:
    said = io.StringIO()
    group = SandboxGroup(config.tools.code_interpreter, config.trainer.run_dir, Console(file=said, width=300))
    try:
        async with group.client:
            await group.start(placement_of(config))
            yield group, said
    finally:
        await group.stop()


async def ask(group: SandboxGroup, index: int, question: Callable[[Any], Any]) -> Any:
    return await group.workers[index].__ray_call__.remote(question)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.05)


def used(client: CodeInterpreterClient) -> tuple[float, float]:
    """Requests that each server got since the last look."""
    metrics = client.take_metrics()
    return metrics["tool/sandbox_0/requests"], metrics["tool/sandbox_1/requests"]


async def squares(client: CodeInterpreterClient, count: int) -> None:
    """So many requests at once, each with the right answer."""

    async def one(i: int) -> str:
        return (await client.run_code(f"import time\ntime.sleep(0.05)\nprint({i} ** 2)", run_timeout=60)).stdout

    assert await asyncio.gather(*(one(i) for i in range(count))) == [f"{i * i}\n" for i in range(count)]


@pytest.mark.slow
def test_node_whose_sandbox_does_not_start_is_named(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        # One address and one port for two servers, as all nodes here are one machine.
        config = configuration(tmp_path, f"port={free_port()}")
        with pytest.raises(SandboxServerError, match=r": the sandbox server ended: .*choose another --port"):
            async with running(config):
                pass

    asyncio.run(scenario())


@pytest.mark.slow
def test_code_runs_on_while_servers_owners_and_a_node_die(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_group, "CHECK_SECONDS", 0.2)

    async def scenario() -> None:
        config = configuration(tmp_path)
        async with running(config) as (group, said):
            client, (first, second) = group.client, group.client.urls
            assert [await ask(group, i, lambda _: ray.get_runtime_context().get_node_id()) for i in (0, 1)] == list(
                placement_of(config).node_ids
            )
            assert first != second
            for url in (first, second):
                assert url.startswith(f"http://{node_address()}:")
                async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
                    assert response.status == 401, "the port is open to the whole network"
            await squares(client, 20)
            assert min(used(client)) >= 5

            # The server: its owner starts it again, at the same address.
            pid = await ask(group, 0, lambda worker: worker.server.pid)
            load = asyncio.ensure_future(squares(client, 60))
            await asyncio.sleep(0.3)
            os.killpg(pid, signal.SIGKILL)
            await load
            await until(lambda: "ended and was started again" in said.getvalue())
            assert client.urls == [first, second] and await client.ping()

            # Its owner: the server ends with it, and both get successors.
            owner = await ask(group, 0, lambda _: os.getpid())
            pid = await ask(group, 0, lambda worker: worker.server.pid)
            load = asyncio.ensure_future(squares(client, 60))
            os.kill(owner, signal.SIGKILL)
            await load
            await until(lambda: len(client.urls) == 2 and first not in client.urls)
            await until(lambda: not is_alive(pid))
            assert "owner of code interpreter server 0 ended" in said.getvalue()
            used(client)
            await squares(client, 20)
            assert min(used(client)) >= 5

            # The node.
            lost = await ask(group, 1, lambda worker: worker.server.pid)
            load = asyncio.ensure_future(squares(client, 200))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(cluster.remove_node, next(iter(cluster.worker_nodes)), allow_graceful=False)
            await load
            await until(lambda: len(client.urls) == 1)
            assert second not in client.urls and "second left Ray" in said.getvalue()
            used(client)
            await squares(client, 20)
            assert used(client) == (20, 0)
            await until(lambda: not is_alive(lost))
            left = await ask(group, 0, lambda worker: worker.server.pid)
        await until(lambda: not is_alive(left))

    asyncio.run(scenario())
    assert len(list(tmp_path.glob("*/logs/code_interpreter_[01].log"))) == 2
