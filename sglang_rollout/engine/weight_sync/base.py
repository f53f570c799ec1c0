"""The steps of a weight sync into running SGLang servers, without a restart.

    with TensorWeightSync(base_urls) as sync:
        report = sync.push(learner.export_weights(bucket_bytes), version=step)

``push`` runs in one rank of the learner and needs neither sglang nor ray. Whatever the way of the bytes, the steps are
the same: hold the engines (requests in flight are retracted and resumed later), open an update session, send bucket
after bucket, close the session, forget cached prefixes, set the version, let the engines continue, and check that every
engine reports the new version. With ``verify`` the checksum of every engine tensor is compared with what was sent.

| method | way | for |
|---|---|---|
| ``distributed`` | broadcast in a process group of learner and engines (NCCL, gloo) | engines with GPUs of their own |
| ``tensor`` | handles of shared memory (CPU) or CUDA IPC, from a rank of the engine's node | colocated engines |
| ``disk`` | safetensors on a file system that all nodes see | everything else, and debugging |

A peer that is dead or hangs is a WeightSyncError which names the engine, after at most ``timeout_seconds``.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
import torch

from conversion.model.block_fp8 import SCALE_SUFFIXES
from conversion.model.rules import BUFFER_SUFFIXES
from sglang_rollout.engine.base import EngineClientError, SyncReport
from sglang_rollout.engine.blocking_client import BlockingClient
from sglang_rollout.engine.weight_sync.checksums import ExpectedChecksums
from sglang_rollout.engine.weight_sync.delta import DeltaEncoder
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

Bucket = list[tuple[str, torch.Tensor]]
PROBE_SECONDS = 10.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}


class ServerWeightSync(ABC):
    """One way to send weights to a fixed set of SGLang servers.

    Args:
        engines: base URLs.
        timeout_seconds: limit of every request and of every collective.
        verify: compare checksums of every tensor after each push.
        convert: what becomes of a bucket before it travels (``quantization.weight_conversion``).
        delta: sends only what has changed since the last sync; it needs ``verify``.
        draft: the weights are also those of the engines' draft model, which takes its own by their names. Of any other
            draft model none is among them, and it must not take the policy's.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        timeout_seconds: float = 300.0,
        verify: bool = False,
        convert: Callable[[Bucket], Bucket] | None = None,
        delta: DeltaEncoder | None = None,
        draft: bool = False,
    ) -> None:
        if not engines:
            raise ValueError("weight sync needs at least one engine URL")
        self.engines = [url.rstrip("/") for url in engines]
        self.timeout_seconds = timeout_seconds
        self.verify = verify
        self._convert = convert
        self._delta = delta
        self._models = {"selector": "all" if draft else "target"}
        self._requests = BlockingClient(self.engines)
        self._infos: dict[str, dict[str, Any]] = {}

    def push(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """``WeightSync.push`` of sglang_rollout.engine.base.

        Raises:
            WeightSyncError: an engine is dead, too slow, refuses the weights or reports another version.
        """
        began = time.monotonic()
        self._probe()
        expected = ExpectedChecksums(self._infos) if self.verify else None
        tensors = sent_bytes = all_bytes = 0
        if self._delta is not None:
            self._delta.begin(self._served_versions())
        self._hold()
        try:
            self._begin()
            try:
                for bucket in self._wire_buckets(buckets):
                    tensors += len(bucket)
                    all_bytes += sum(tensor.nbytes for _, tensor in bucket)
                    if expected is not None:
                        expected.add(bucket)
                    if self._delta is not None:
                        bucket = self._delta.encode(bucket)
                    sent_bytes += sum(tensor.nbytes for _, tensor in bucket)
                    if bucket:
                        self._send(bucket)
                    del bucket  # the next one is put together first, and needs its memory
                if not tensors:
                    raise WeightSyncError("there was no weight to send: export_weights yielded no bucket")
                self._finish_sending()
            except BaseException:
                self._give_up()
                raise
            self._take(version)
        finally:
            self._let_go()
        self._check_version(version)
        verified = self._check_checksums(expected) if expected is not None else 0
        if self._delta is not None:
            self._delta.end(version)
        return SyncReport(version, tensors, sent_bytes, time.monotonic() - began, verified, all_bytes)

    def close(self) -> None:
        """Give up connections and shared memory."""
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _hold(self) -> None:
        self._call_all("/pause_generation", {"mode": "retract"})

    def _let_go(self) -> None:
        self._call_all("/continue_generation", {}, timeout=PROBE_SECONDS, check=False)

    def _take(self, version: int) -> None:
        """The engines have all weights: they become those of ``version``."""
        self._end(version)
        self._call_all("/flush_cache", {})
        self._call_all("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _begin(self) -> None:
        path = "/begin_weight_update"
        try:
            self._call_all(path, self._models)
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            # Left behind by a learner that died while it was sending.
            self._call_all("/end_weight_update", {}, check=False)
            self._call_all(path, self._models)

    def _end(self, version: int) -> None:
        self._call_all("/end_weight_update", {})

    def _give_up(self) -> None:
        """Leave engines that answer in a state in which another push can begin."""
        self._call_all("/end_weight_update", {}, timeout=PROBE_SECONDS, check=False)

    @abstractmethod
    def _send(self, bucket: Bucket) -> None:
        """Bring one bucket into every engine. It may return before they have it, and then raises at the next one."""

    def _finish_sending(self) -> None:  # noqa: B027 (most ways are done when _send returns)
        """Wait until every engine has the last bucket."""

    def _probe(self) -> None:
        """Find dead engines before anything is changed, and learn the engines' dtype and parallelism."""
        for url, info in self._call_all("/server_info", None, timeout=PROBE_SECONDS).items():
            self._infos[url] = info

    def _engine_dtype(self) -> torch.dtype | None:
        """Dtype in which the engines hold unquantised weights; None where they differ or do not say."""
        names = {str(info.get("dtype", "auto")) for info in self._infos.values()}
        name = names.pop() if len(names) == 1 else "auto"
        return _DTYPES.get(name)

    def _wire_buckets(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Buckets in the form that travels: quantised or in the engines' dtype, wide elements first."""
        dtype = self._engine_dtype()
        for bucket in buckets:
            bucket = [(name, tensor.detach()) for name, tensor in bucket]
            if self._convert is not None:
                bucket = self._convert(bucket)
            converted = [
                (name, tensor.to(dtype) if dtype and _plain_float(name, tensor) else tensor) for name, tensor in bucket
            ]
            # A flat bucket needs every tensor aligned to its own element size.
            yield sorted(converted, key=lambda item: -item[1].element_size())
            del bucket, converted

    def _served_versions(self) -> set[int]:
        """Versions that the engines serve; none where one says nothing that is a version."""
        infos = self._call_all("/model_info", None, timeout=PROBE_SECONDS)
        try:
            return {int(str(info.get("weight_version"))) for info in infos.values()}
        except ValueError:
            return set()

    def _check_version(self, version: int) -> None:
        infos = self._call_all("/model_info", None)
        served = {url: info.get("weight_version") for url, info in infos.items()}
        wrong = {url: result for url, result in served.items() if str(result) != str(version)}
        if wrong:
            raise WeightSyncError(
                "engines serve another weight version than the one just sent: "
                + ", ".join(f"{url} serves {result!r} instead of {version}" for url, result in wrong.items()),
                list(wrong),
            )

    def _check_checksums(self, expected: ExpectedChecksums) -> int:
        answers = self._call_all("/weights_checker", {"action": "checksum"})
        return expected.compare(answers)

    def _call_all(
        self, path: str, body: dict[str, Any] | None, *, timeout: float | None = None, check: bool = True
    ) -> dict[str, dict[str, Any]]:
        """The same request to all engines at once (GET where ``body`` is None)."""
        return self._await_all(self._start_all(path, dict.fromkeys(self.engines, body), timeout), path, check)

    def _start_all(
        self, path: str, bodies: dict[str, dict[str, Any] | None], timeout: float | None = None
    ) -> dict[str, Future[dict[str, Any]]]:
        limit = self.timeout_seconds if timeout is None else timeout
        return {url: self._requests.submit(url, path, body, limit) for url, body in bodies.items()}

    def _await_all(
        self, calls: dict[str, Future[dict[str, Any]]], path: str, check: bool = True
    ) -> dict[str, dict[str, Any]]:
        answers, errors = {}, {}
        for url, call in calls.items():
            try:
                answers[url] = call.result()
            except Exception as error:
                errors[url] = error
        if errors and check:
            reasons = "; ".join(f"engine {url}: {reason_of(error)}" for url, error in errors.items())
            raise WeightSyncError(f"weight sync failed at {path}: {reasons}", list(errors)) from next(
                iter(errors.values())
            )
        return answers


def reason_of(error: BaseException | None) -> str:
    """Why a request failed, without the engine's name."""
    return error.reason if isinstance(error, EngineClientError) else str(error)


def _plain_float(name: str, tensor: torch.Tensor) -> bool:
    kept = (*SCALE_SUFFIXES, *BUFFER_SUFFIXES)
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and not name.endswith(kept)


def is_local(url: str) -> bool:
    """Whether the URL's host is this machine."""
    try:
        address = socket.gethostbyname(urlsplit(url).hostname or "")
    except OSError:
        return False
    # The host's name resolves to one of its addresses at most, and an engine may be known by another.
    return any(entry.address == address for entries in psutil.net_if_addrs().values() for entry in entries)
