"""Weights by broadcast in a process group of the learner's rank 0 and all engines."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron_retool.ports import free_port, listening_descriptor
from sglang_rollout.engine.weight_sync.base import Bucket, ServerWeightSync, is_local, reason_of
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

SEND_AWAY_SECONDS = 30.0
"""Longest wait for engines that have to be sent away from a group that will not come."""
BLAME_SECONDS = 5.0
"""How long after our half of a collective failed an engine's answer, which names the culprit, may come."""
_STORE_OPEN_SECONDS = 1.0


class DistributedWeightSync(ServerWeightSync):
    """Broadcast from the learner's rank 0 to every tensor-parallel rank of every engine.

    The process group is separate from Megatron's, is made at the first push on a fresh port, and lives until ``close``.
    """

    def __init__(self, engines: Sequence[str], *, backend: str | None = None, **common: Any) -> None:
        super().__init__(engines, **common)
        # Our own half of a collective may hang: it must not hold up the requests.
        self._pool = ThreadPoolExecutor(max_workers=3, thread_name_prefix="weight-sync")
        self._backend = backend
        self._group: Any = None
        self._group_name = ""

    def _begin(self) -> None:
        if self._group is None:
            self._connect()
        super()._begin()

    def send_to(self, infos: Mapping[str, dict[str, Any]], bucket: Bucket) -> None:
        """Bring one bucket into the engines, which have an update open and are described by ``infos``; the first call
        joins them."""
        if self._group is None:
            self._infos = {url: infos[url] for url in self.engines}
            self._connect()
        self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")
        flat = torch.empty(sum(tensor.nbytes for _, tensor in bucket), dtype=torch.uint8, device=device)
        offset = 0
        for _, tensor in bucket:
            flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += tensor.nbytes
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            **self._models,
            "flush_cache": False,
        }
        path = "/update_weights_from_distributed"
        calls = self._start_all(path, dict.fromkeys(self.engines, body))
        # The group by value: what begins after another's failure may not take torch's default group for it.
        broadcast = self._pool.submit(_broadcast, flat, self._group)
        self._await_together(broadcast, calls, path)

    def _await_together(self, own: Future[Any], calls: dict[str, Future[dict[str, Any]]], path: str) -> None:
        """Wait for our half of a collective and the engines' halves; a failure of either ends the wait at once."""
        done, pending = wait([own, *calls.values()], timeout=self.timeout_seconds, return_when=FIRST_EXCEPTION)
        failed = [future for future in done if future.exception() is not None]
        if failed or pending:
            self._abandon()
            if own in failed:
                # Our half notices a dead engine first; the engines' answers tell which it is.
                wait(calls.values(), timeout=min(BLAME_SECONDS, self.timeout_seconds), return_when=FIRST_EXCEPTION)
            errors = {url: call.exception() for url, call in calls.items() if call.done() and call.exception()}
            late = [] if errors else [url for url, call in calls.items() if not call.done()]
            reasons = [f"engine {url}: {reason_of(error)}" for url, error in errors.items()]
            limit = "" if failed else f" in {self.timeout_seconds:.0f} s"
            reasons += [f"engine {url} did not answer{limit}" for url in late]
            if own.done() and own.exception() is not None:
                reasons.append(f"the learner's side: {own.exception()}")
            raise WeightSyncError(f"weight sync failed at {path}: " + "; ".join(reasons), [*errors, *late])

    def _connect(self) -> None:
        backend = self._backend or ("nccl" if self._engines_on_cuda() else "gloo")
        self._backend = backend
        sizes = {url: int(self._infos[url].get("tp_size") or 1) for url in self.engines}
        world_size = 1 + sum(sizes.values())
        address = _own_address(self.engines)
        port = free_port()
        self._group_name = f"weight_sync_{port}_{time.monotonic_ns()}"
        bodies: dict[str, dict[str, Any] | None] = {}
        offset = 1
        for url, size in sizes.items():
            bodies[url] = {
                "master_address": address,
                "master_port": port,
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": self._group_name,
                "backend": backend,
            }
            offset += size
        path = "/init_weights_update_group"
        calls = self._start_all(path, bodies)
        timeout = timedelta(seconds=self.timeout_seconds)
        own = self._pool.submit(_join_group, backend, address, port, world_size, self._group_name, timeout)
        try:
            self._await_together(own, calls, path)
        except WeightSyncError:
            _send_away(list(calls.values()), address, port, world_size)
            raise
        self._group = own.result()

    def _engines_on_cuda(self) -> bool:
        return any(str(info.get("device", "")).startswith("cuda") for info in self._infos.values())

    def _abandon(self) -> None:
        """Give up a group whose collective failed. Not awaited: that could hang on the peer that did not come."""
        group, self._group = self._group, None
        if group is not None:
            self._pool.submit(_leave, group, self._backend)

    def close(self) -> None:
        """Leave the process group on both sides, and close the connections."""
        if self._group is not None:
            calls = self._start_all(
                "/destroy_weights_update_group", {url: {"group_name": self._group_name} for url in self.engines}, 10.0
            )
            self._await_all(calls, "/destroy_weights_update_group", check=False)
            torch.distributed.destroy_process_group(self._group)
            self._group = None
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()


def _join_group(backend: str, address: str, port: int, world_size: int, name: str, timeout: timedelta) -> Any:
    """A process group beside the default one, whose other members are the engines; this process is rank 0.

    torch's public API makes only sub-groups of the default group. The engines build theirs with the same internals
    over a TCPStore at (address, port), under the prefix ``name``.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

    listener = listening_descriptor(address, port)  # torch itself would listen on every address
    store = TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, multi_tenant=True, master_listen_fd=listener
    )
    # NCCL's watchdog ends the process when a collective's time is over: our own wait has to end first.
    group_timeout = 2 * timeout if backend == "nccl" else timeout
    group_name: Any = name  # a str to all but torch's annotations
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store), group_name=group_name, timeout=group_timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _broadcast(flat: torch.Tensor, group: Any) -> None:
    work = torch.distributed.broadcast(flat, group_src=0, group=group, async_op=True)
    assert work is not None
    work.wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _leave(group: Any, backend: str | None) -> None:
    """Leave a group in which a collective may hang: NCCL's ordinary way out waits for it."""
    from torch.distributed.distributed_c10d import _abort_process_group

    if backend == "nccl":
        _abort_process_group(group)
    else:
        torch.distributed.destroy_process_group(group)


def _send_away(calls: Sequence[Future[Any]], address: str, port: int, world_size: int) -> None:
    """Let engines that wait for a group which will not come continue serving: a store that closes on them ends their
    wait at once, which otherwise lasts for torch's default of half an hour.

    Engines try to connect at growing intervals, so the store opens again and again until each has answered its call.
    """
    from torch.distributed import TCPStore

    deadline = time.monotonic() + SEND_AWAY_SECONDS
    timeout = timedelta(seconds=SEND_AWAY_SECONDS)
    while not all(call.done() for call in calls) and time.monotonic() < deadline:
        store = None
        # While the failed attempt still holds the port, its own end does the same.
        with contextlib.suppress(Exception):
            listener = listening_descriptor(address, port)
            store = TCPStore(
                address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False,
                master_listen_fd=listener,
            )  # fmt: skip
        wait(calls, timeout=_STORE_OPEN_SECONDS)
        del store


def _own_address(engines: Sequence[str]) -> str:
    """Address of this host as the engines see it."""
    if all(is_local(url) for url in engines):
        return "127.0.0.1"
    remote = urlsplit(next(url for url in engines if not is_local(url)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only chooses the interface.
        probe.connect((remote.hostname, remote.port or 80))
        return str(probe.getsockname()[0])
