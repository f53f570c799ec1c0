"""Ray, started or joined, and the small things every actor of this project does when it starts.

On one machine ``ray.init(address="local")`` starts a private cluster that dies with the driver. Under Slurm the batch
script has started Ray on every node and ``cluster.ray_address=auto`` joins it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
from ray._private import services

from megatron_retool.cluster.ray_start import private_token, start_local_ray
from megatron_retool.config import ClusterConfig, ConfigError
from megatron_retool.runs.leave import REQUEUE
from megatron_retool.runs.write_errors import print_to_full_disks
from megatron_retool.scratch import RAY_DIRECTORY, current_scratch, remove_own_scratch

# Ray only does bookkeeping with CPUs here; processes are placed by GPUs, and on several nodes by the plan.
_LOGICAL_CPUS = 256
STOP_SECONDS = 6.0
RAY_SERVERS = ("gcs_server", "raylet")
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENT_LOOK_SECONDS = 10


@contextmanager
def ray_runtime(cluster: ClusterConfig) -> Iterator[None]:
    """A running Ray for the length of the block; a private one is shut down at its end."""
    # The console belongs to the run: Ray's notices and its actors' output stay in files, and its errors are raised.
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    own: list[psutil.Process] = []
    is_own = cluster.ray_address == "local"
    with private_token() if is_own else nullcontext():
        try:
            with _signals_left_to_this_process():
                if is_own:
                    scratch = current_scratch()
                    start_local_ray(
                        num_cpus=_LOGICAL_CPUS,
                        include_dashboard=False,
                        object_store_memory=_object_store_bytes(),
                        _temp_dir=None if scratch is None else str(scratch / RAY_DIRECTORY),
                        **options,
                    )
                    own = _ray_servers()
                else:
                    ray.init(address=cluster.ray_address, **options)
            with ended_with(own):
                yield
        finally:
            ray.shutdown()


@contextmanager
def ended_with(servers: Sequence[psutil.Process]) -> Iterator[None]:
    """For the length of the block, end this process as soon as one of ``servers`` ends, with a word of how to continue.

    Ray would keep the driver waiting for minutes, or end it without a word of the run. What works for the driver ends
    with it, but for agents that try for a minute to tell a dead raylet: these are ended here.
    """
    descriptors = {os.pidfd_open(server.pid): server.name() for server in servers}
    over_read, over_write = os.pipe()
    poll = select.poll()
    for descriptor in (*descriptors, over_read):
        poll.register(descriptor, select.POLLIN)

    def watch() -> None:
        agents: set[psutil.Process] = set()
        while not (ready := [descriptor for descriptor, _ in poll.poll(AGENT_LOOK_SECONDS * 1000)]):
            agents.update(_ray_agents())
        if over_read in ready:
            return
        print(
            f"error: Ray's {descriptors[ready[0]]} ended, and the run cannot continue without it; dmesg tells whether "
            "memory ran out. Starting the run again resumes it from its last checkpoint",
            flush=True,
        )
        for agent in agents:
            with suppress(psutil.Error):
                agent.kill()
        remove_own_scratch()
        os._exit(REQUEUE)

    thread = threading.Thread(target=watch, name="ray-servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(over_write)
        thread.join()
        for descriptor in (*descriptors, over_read):
            os.close(descriptor)


def _ray_servers() -> list[psutil.Process]:
    result = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() in RAY_SERVERS:
                result.append(child)
    return result


def _ray_agents() -> list[psutil.Process]:
    result = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(RAY_AGENTS):
                result.append(process)
    return result


@contextmanager
def _signals_left_to_this_process() -> Iterator[None]:
    """Start Ray's processes in sessions of their own, and keep Ray from taking this process's signals.

    What is sent to the driver's process group would else end Ray before the driver has stopped what runs in it.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    in_own_session = partial(services.ConsolePopen, start_new_session=True)
    with (
        patch.object(services, "ConsolePopen", in_own_session),
        patch.object(ray._private.utils, "set_sigterm_handler", lambda handler: None),
    ):
        yield
    # Ray's native part takes SIGTERM as well, without Python's knowledge.
    for number, handler in handlers.items():
        signal.signal(number, handler)


def all_node_ids() -> list[str]:
    """Ray's ids of all nodes that are alive; none before Ray is there."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []


def node_ids(cluster: ClusterConfig) -> tuple[str, ...]:
    """Ray's ids of this run's nodes, the driver's first; none on a single node, where there is nothing to choose.

    Raises:
        ConfigError: the Ray that was joined has another number of nodes than ``cluster.nodes``.
    """
    if cluster.nodes == 1:
        return ()
    own = driver_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    if len(alive) != cluster.nodes:
        names = ", ".join(sorted(node["NodeName"] for node in alive))
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}, but Ray (cluster.ray_address={cluster.ray_address}) has "
            f"{len(alive)} ({names}): start the run with scripts/slurm/submit.sh, or start Ray on every node and set "
            "cluster.ray_address=auto"
        )
    return tuple(node["NodeID"] for node in sorted(alive, key=lambda node: (node["NodeID"] != own, node["NodeName"])))


def driver_node() -> str:
    """Ray's id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def nodes_to_use(known: Sequence[str], gpus: int) -> list[str]:
    """Ray's ids of nodes that are alive: those of ``known`` in their order, then others that have ``gpus`` GPUs."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    joined = sorted(
        (node["NodeName"], node_id)
        for node_id, node in alive.items()
        if node_id not in known and node["Resources"].get("GPU", 0) >= gpus
    )
    return [*(node_id for node_id in known if node_id in alive), *(node_id for _, node_id in joined)]


def lost_nodes(node_ids: Sequence[str]) -> list[str]:
    """Names of those of this run's nodes that have left Ray."""
    known = {node["NodeID"]: node for node in ray.nodes()} if node_ids else {}
    return [known[i]["NodeName"] if i in known else i for i in node_ids if i not in known or not known[i]["Alive"]]


def _object_store_bytes() -> int:
    """A quarter of shared memory, at most 64 GiB: weights do not pass here, and a step's routed experts may have 10."""
    shared = os.statvfs("/dev/shm")
    return max(80 * 2**20, min(64 * 2**30, shared.f_frsize * shared.f_bavail // 4))


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr, C libraries' included, to ``path`` (appending)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    print_to_full_disks()


def node_address() -> str:
    """This node's address as other nodes see it."""
    return ray.util.get_node_ip_address()


async def resolved(reference: Any) -> Any:
    """What a Ray reference comes to, as a coroutine that asyncio can make a task of."""
    return await reference


async def stop_actors(workers: Sequence[Any]) -> None:
    """Call ``stop`` of every actor, and kill those that do not come to it in time."""
    stops = {asyncio.ensure_future(resolved(worker.stop.remote())): worker for worker in workers}
    if stops:
        await asyncio.wait(stops, timeout=STOP_SECONDS)
    for stop, worker in stops.items():
        if not stop.done() or stop.exception() is not None:
            ray.kill(worker)
