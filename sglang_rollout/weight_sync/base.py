"""New weights from the learner into running engines, without a restart.

    sync = make_weight_sync(config, engine_urls)
    report = sync.push(learner.export_weights(bucket_bytes), version=step)

``push`` runs in the learner's rank 0 and needs neither sglang nor ray. Whatever the way of the bytes, the steps are
the same: hold the engines (requests in flight are retracted and go on afterwards), open an update session, send bucket
after bucket, close the session, forget cached prefixes, set the version, let the engines go on, and check that every
engine reports the new version. With ``verify`` the checksum of every engine tensor is compared with what was sent.

| method | way | for |
|---|---|---|
| ``distributed`` | broadcast in a process group of learner and engines (NCCL, gloo) | engines with GPUs of their own |
| ``tensor`` | handles of shared memory (CPU) or CUDA IPC | engines on the learner's own devices |
| ``disk`` | safetensors on a file system that all nodes see | everything else, and debugging |

A peer that is dead or hangs is a WeightSyncError which names the engine, after at most ``timeout_seconds``.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import shutil
import socket
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from megatron_retool.config import Config
from sglang_rollout.engine.process import free_port

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]
Bucket = list[NamedTensor]
PROBE_SECONDS = 10.0
SEND_AWAY_SECONDS = 3.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}


class WeightSyncError(RuntimeError):
    """Engines could not be given new weights. ``engines`` names those at fault; their weights are undefined now."""

    def __init__(self, message: str, engines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.engines = tuple(engines)


@dataclass(frozen=True)
class SyncReport:
    """What one push did."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    verified_tensors: int = 0

    def metrics(self) -> dict[str, float]:
        return {
            "weight_sync/seconds": self.seconds,
            "weight_sync/gigabytes": self.bytes / 1e9,
            "weight_sync/gigabytes_per_second": self.bytes / 1e9 / max(self.seconds, 1e-9),
            "weight_sync/verified_tensors": float(self.verified_tensors),
        }


def push_weights(buckets: Iterable[Bucket], engines: Sequence[str], version: int, config: Config) -> dict[str, float]:
    """``WeightSync.push`` with a connection that lasts: it is made anew only when the engines changed or it failed.

    Returns:
        weight_sync/* metrics.
    """
    global _CONNECTION
    if _CONNECTION is None or _CONNECTION.engines != list(engines):
        disconnect()
        _CONNECTION = make_weight_sync(config, engines)
    try:
        return _CONNECTION.push(buckets, version).metrics()
    except BaseException:
        disconnect()
        raise


_CONNECTION: WeightSync | None = None


def disconnect() -> None:
    """Give up the connection that ``push_weights`` keeps."""
    global _CONNECTION
    if _CONNECTION is not None:
        _CONNECTION.close()
        _CONNECTION = None


def make_weight_sync(config: Config, engines: Sequence[str]) -> WeightSync:
    """The configured way to ``engines`` (base URLs)."""
    settings = config.weight_sync
    common: dict[str, Any] = {
        "timeout_seconds": settings.timeout_seconds,
        "verify": settings.verify,
        "quantize": _fp8_quantizer() if config.rollout.engine.quantization == "fp8" else None,
        "round_weight": _fp8_rounder() if settings.round_to_fp8 else None,
    }
    if settings.method == "disk":
        return DiskWeightSync(engines, directory=config.run_dir / "weight_sync", model_path=config.model.path, **common)
    if settings.method == "tensor":
        return TensorWeightSync(engines, **common)
    return DistributedWeightSync(engines, **common)


Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""weight [out, in] -> (float8_e4m3fn [out, in], inverse scales float32 [ceil(out/128), ceil(in/128)])."""


def _fp8_quantizer() -> Quantize:
    from conversion.model.block_fp8 import quantize_blockwise

    return quantize_blockwise


def _fp8_rounder() -> Callable[[torch.Tensor], torch.Tensor]:
    from conversion.model.block_fp8 import round_to_blocks

    return round_to_blocks


def _is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether FP8 serving quantises it: not embeddings, the output layer, norms, biases and MoE routers."""
    return tensor.ndim == 2 and name.endswith("_proj.weight")


def quantize_bucket(bucket: Bucket, quantize: Quantize) -> Bucket:
    """Block-FP8 form of a bucket, named as in FP8 checkpoints: linear weights become weight and weight_scale_inv."""
    quantized: Bucket = []
    for name, tensor in bucket:
        if _is_linear(name, tensor):
            weight, scale_inv = quantize(tensor)
            quantized += [(name, weight), (f"{name}_scale_inv", scale_inv)]
        else:
            quantized.append((name, tensor))
    return quantized


class WeightSync(ABC):
    """One way to send weights to a fixed set of engines."""

    def __init__(
        self,
        engines: Sequence[str],
        *,
        timeout_seconds: float = 300.0,
        verify: bool = False,
        quantize: Quantize | None = None,
        round_weight: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        if not engines:
            raise ValueError("weight sync needs at least one engine URL")
        self.engines = [url.rstrip("/") for url in engines]
        self.timeout_seconds = timeout_seconds
        self.verify = verify
        self._quantize = quantize
        self._round_weight = round_weight
        self._pool = ThreadPoolExecutor(max_workers=2 * len(self.engines) + 1, thread_name_prefix="weight-sync")
        self._infos: dict[str, dict[str, Any]] = {}

    def push(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """Send ``buckets`` of (Hugging Face name, full tensor) to every engine as weight version ``version``.

        Every parameter must be in exactly one bucket. When this returns, every engine serves ``version``.

        Raises:
            WeightSyncError: an engine is dead, too slow, refuses the weights or reports another version.
        """
        began = time.monotonic()
        self._probe()
        expected = self._expected_checksums() if self.verify else None
        tensors = sent_bytes = 0
        self._call_all("/pause_generation", {"mode": "retract"})
        try:
            self._begin()
            try:
                for bucket in self._wire_buckets(buckets):
                    tensors += len(bucket)
                    sent_bytes += sum(tensor.nbytes for _, tensor in bucket)
                    if expected is not None:
                        expected.add(bucket)
                    self._send(bucket)
                if not tensors:
                    raise WeightSyncError("there was no weight to send: export_weights yielded no bucket")
            except BaseException:
                self._give_up()
                raise
            self._end(version)
            self._call_all("/flush_cache", {})
            self._call_all("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        finally:
            self._call_all("/continue_generation", {}, timeout=PROBE_SECONDS, check=False)
        self._check_version(version)
        verified = self._check_checksums(expected) if expected is not None else 0
        return SyncReport(version, tensors, sent_bytes, time.monotonic() - began, verified)

    def close(self) -> None:
        """Give up connections and shared memory."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        path = "/begin_weight_update"
        try:
            self._call_all(path, {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            # Left behind by a learner that died while it was sending.
            self._call_all("/end_weight_update", {}, check=False)
            self._call_all(path, {})

    def _end(self, version: int) -> None:
        self._call_all("/end_weight_update", {})

    def _give_up(self) -> None:
        """Leave engines that answer in a state in which another push can begin."""
        self._call_all("/end_weight_update", {}, timeout=PROBE_SECONDS, check=False)

    @abstractmethod
    def _send(self, bucket: Bucket) -> None:
        """Bring one bucket into every engine."""

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
            if self._round_weight is not None:
                bucket = [(name, self._round_weight(t) if _is_linear(name, t) else t) for name, t in bucket]
            if self._quantize is not None:
                bucket = quantize_bucket(bucket, self._quantize)
            converted = [
                (name, tensor.to(dtype) if dtype and _plain_float(name, tensor) else tensor) for name, tensor in bucket
            ]
            # A flat bucket needs every tensor aligned to its own element size.
            yield sorted(converted, key=lambda item: -item[1].element_size())

    def _check_version(self, version: int) -> None:
        infos = self._call_all("/model_info", None)
        served = {url: info.get("weight_version") for url, info in infos.items()}
        wrong = {url: found for url, found in served.items() if str(found) != str(version)}
        if wrong:
            raise WeightSyncError(
                "engines serve another weight version than the one just sent: "
                + ", ".join(f"{url} serves {found!r} instead of {version}" for url, found in wrong.items()),
                list(wrong),
            )

    def _expected_checksums(self) -> Any:
        from sglang_rollout.weight_sync.checksums import ExpectedChecksums

        return ExpectedChecksums(self._infos)

    def _check_checksums(self, expected: Any) -> int:
        answers = self._call_all("/weights_checker", {"action": "checksum"})
        return int(expected.compare(answers))

    def _call_all(
        self, path: str, body: dict[str, Any] | None, *, timeout: float | None = None, check: bool = True
    ) -> dict[str, dict[str, Any]]:
        """The same request to all engines at once (GET where ``body`` is None)."""
        return self._await_all(self._start_all(path, {url: body for url in self.engines}, timeout), path, check)

    def _start_all(
        self, path: str, bodies: dict[str, dict[str, Any] | None], timeout: float | None = None
    ) -> dict[str, Future[dict[str, Any]]]:
        limit = self.timeout_seconds if timeout is None else timeout
        return {url: self._pool.submit(_request, url, path, body, limit) for url, body in bodies.items()}

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
            reasons = "; ".join(f"engine {url}: {error}" for url, error in errors.items())
            raise WeightSyncError(f"weight sync failed at {path}: {reasons}", list(errors)) from next(
                iter(errors.values())
            )
        return answers


class DiskWeightSync(WeightSync):
    """Weights as a safetensors checkpoint that the engines read.

    Args:
        directory: on a file system that learner and engines share; holds one version at a time.
        model_path: Hugging Face directory whose config.json the engines need beside the weights.
    """

    def __init__(self, engines: Sequence[str], *, directory: Path, model_path: str | Path, **common: Any) -> None:
        super().__init__(engines, **common)
        self.directory = Path(directory).absolute()
        self.model_path = Path(model_path)
        self._partial: Path | None = None
        self._files: dict[str, str] = {}
        self._bytes = 0

    def _begin(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._partial = self.directory / "partial"
        self._partial.mkdir(parents=True)
        self._files, self._bytes = {}, 0

    def _send(self, bucket: Bucket) -> None:
        from safetensors.torch import save_file

        assert self._partial is not None
        name = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        # safetensors refuses tensors that share memory, as views of a bucket do.
        copies = {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in bucket}
        save_file(copies, self._partial / name)
        self._files |= {key: name for key, _ in bucket}
        self._bytes += sum(tensor.nbytes for _, tensor in bucket)

    def _give_up(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, version: int) -> None:
        assert self._partial is not None
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._files}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index))
        for name in ("config.json", "generation_config.json"):
            if (self.model_path / name).is_file():
                shutil.copy(self.model_path / name, self._partial / name)
        final = self.directory / f"version_{version}"
        os.replace(self._partial, final)
        self._call_all(
            "/update_weights_from_disk",
            {"model_path": str(final), "weight_version": str(version), "flush_cache": True},
        )

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.directory, ignore_errors=True)


class TensorWeightSync(WeightSync):
    """Handles of memory that the engines map: shared memory on CPU, CUDA IPC on GPU.

    Engines must run on the learner's host (and, on GPU, see its devices). Each bucket is copied once into a flat
    buffer: one handle for each reader, whatever the number of tensors.
    """

    def __init__(self, engines: Sequence[str], **common: Any) -> None:
        super().__init__(engines, **common)
        self._buffer: torch.Tensor | None = None

    def _probe(self) -> None:
        super()._probe()
        foreign = [url for url in self.engines if not _is_local(url)]
        if foreign:
            raise WeightSyncError(
                f"weight_sync.method=tensor shares memory, but {', '.join(foreign)} is on another host: use "
                "weight_sync.method=distributed",
                foreign,
            )

    def _send(self, bucket: Bucket) -> None:
        device = bucket[0][1].device
        flat = self._flat(sum(tensor.nbytes for _, tensor in bucket), device)
        metadata, offset = [], 0
        for name, tensor in bucket:
            end = offset + tensor.nbytes
            flat[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            metadata.append(
                SimpleNamespace(
                    name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=offset, end_idx=end, numel=end - offset
                )
            )
            offset = end
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        value = {"flattened_tensor": flat, "metadata": metadata}
        bodies: dict[str, dict[str, Any] | None] = {
            url: {
                # Every tensor-parallel rank of every engine maps the same memory and takes its own part. Each needs a
                # handle of its own: a handle is one count on the memory, and the rank that opens it takes it down.
                "serialized_named_tensors": [_pickled(value) for _ in range(int(self._infos[url].get("tp_size") or 1))],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            for url in self.engines
        }
        path = "/update_weights_from_tensor"
        self._await_all(self._start_all(path, bodies), path)

    def _end(self, version: int) -> None:
        super()._end(version)
        self._free()

    def _give_up(self) -> None:
        super()._give_up()
        self._free()

    def _flat(self, size: int, device: torch.device) -> torch.Tensor:
        """Memory for a bucket of ``size`` bytes."""
        if device.type == "cuda":
            # Never the one before: an engine answers when its first rank is done, while others may be reading still.
            # torch gives memory back when every reader has closed it, and not earlier.
            torch.cuda.ipc_collect()
            return torch.empty(size, dtype=torch.uint8, device=device)
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
            _share_through_file_system(self._buffer)
        return self._buffer[:size]

    def close(self) -> None:
        super().close()
        self._buffer = None

    def _free(self) -> None:
        # A segment of shared memory has a name, and outlives a process that is killed: between two syncs, where a run
        # spends its time and ends, there is none.
        self._buffer = None
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # every rank has closed its handles: the memory is the learner's again


class DistributedWeightSync(WeightSync):
    """Broadcast from the learner's rank 0 to every tensor-parallel rank of every engine.

    The process group is separate from Megatron's, is made at the first push on a fresh port, and lives until ``close``.
    """

    def __init__(self, engines: Sequence[str], *, backend: str | None = None, **common: Any) -> None:
        super().__init__(engines, **common)
        self._backend = backend
        self._group: Any = None
        self._group_name = ""

    def _begin(self) -> None:
        if self._group is None:
            self._connect()
        super()._begin()

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
            "flush_cache": False,
        }
        path = "/update_weights_from_distributed"
        calls = self._start_all(path, {url: body for url in self.engines})
        broadcast = self._pool.submit(self._broadcast, flat)
        self._await_together(broadcast, calls, path)

    def _broadcast(self, flat: torch.Tensor) -> None:
        work = torch.distributed.broadcast(flat, group_src=0, group=self._group, async_op=True)
        work.wait()
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def _await_together(self, own: Future[Any], calls: dict[str, Future[dict[str, Any]]], path: str) -> None:
        """Wait for our half of a collective and the engines' halves; a failure of either ends the wait at once."""
        done, pending = wait([own, *calls.values()], timeout=self.timeout_seconds, return_when=FIRST_EXCEPTION)
        failed = [future for future in done if future.exception() is not None]
        if failed or pending:
            self._abandon()
            errors = {url: call.exception() for url, call in calls.items() if call.done() and call.exception()}
            late = [] if failed else [url for url, call in calls.items() if not call.done()]
            reasons = [f"engine {url}: {error}" for url, error in errors.items()]
            reasons += [f"engine {url} did not answer in {self.timeout_seconds:.0f} s" for url in late]
            if own.done() and own.exception() is not None:
                reasons.append(f"the learner's side: {own.exception()}")
            raise WeightSyncError(f"weight sync failed at {path}: " + "; ".join(reasons), [*errors, *late])

    def _connect(self) -> None:
        backend = self._backend or ("nccl" if self._engines_on_cuda() else "gloo")
        self._backend = backend
        sizes = {url: int(self._infos[url].get("tp_size") or 1) for url in self.engines}
        world_size = 1 + sum(sizes.values())
        address = _own_address(self.engines)
        port = free_port("")
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
            self._pool.submit(_send_away, address, port, world_size)
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
        if self._group is not None:
            calls = self._start_all(
                "/destroy_weights_update_group", {url: {"group_name": self._group_name} for url in self.engines}, 10.0
            )
            self._await_all(calls, "/destroy_weights_update_group", check=False)
            torch.distributed.destroy_process_group(self._group)
            self._group = None
        super().close()


def _join_group(backend: str, address: str, port: int, world_size: int, name: str, timeout: timedelta) -> Any:
    """A process group beside the default one, whose other members are the engines; this process is rank 0.

    torch's public API makes only sub-groups of the default group. The engines build theirs with the same internals
    over a TCPStore at (address, port), under the prefix ``name``.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

    store = TCPStore(address, port, world_size, is_master=True, timeout=timeout, multi_tenant=True)
    # NCCL's watchdog ends the process when a collective's time is over: our own wait has to end first.
    group_timeout = 2 * timeout if backend == "nccl" else timeout
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=group_timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _leave(group: Any, backend: str | None) -> None:
    """Leave a group in which a collective may hang: NCCL's ordinary way out waits for it."""
    from torch.distributed.distributed_c10d import _abort_process_group

    if backend == "nccl":
        _abort_process_group(group)
    else:
        torch.distributed.destroy_process_group(group)


def _send_away(address: str, port: int, world_size: int) -> None:
    """Let engines that wait for a group which will not come go on serving: a store that opens and closes ends their
    wait at once, which otherwise lasts for torch's default of half an hour."""
    from torch.distributed import TCPStore

    # While the failed attempt still holds the port, its own end does the same.
    with contextlib.suppress(Exception):
        timeout = timedelta(seconds=SEND_AWAY_SECONDS)
        store = TCPStore(address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        time.sleep(SEND_AWAY_SECONDS)
        del store


def _plain_float(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and not name.endswith("_scale_inv")


def _share_through_file_system(tensor: torch.Tensor) -> None:
    # The default strategy passes a file descriptor through a socket that only child processes may open.
    import torch.multiprocessing as multiprocessing

    previous = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor.share_memory_()
    finally:
        multiprocessing.set_sharing_strategy(previous)


def _pickled(value: dict[str, Any]) -> str:
    """``value`` as SGLang's deserialiser takes it: ForkingPickler, which sends handles of shared tensors, in base64."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing as multiprocessing

    previous = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer)
        if value["flattened_tensor"].is_cuda:
            pickler.dispatch_table[torch.Tensor] = _reduce_cuda_tensor
        pickler.dump(value)
    finally:
        multiprocessing.set_sharing_strategy(previous)
    return base64.b64encode(buffer.getvalue()).decode()


def _reduce_cuda_tensor(tensor: torch.Tensor) -> Any:
    """CUDA IPC handle that names the device by UUID: learner and engine may number their devices differently."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)
    device_position = 6
    uuid = str(torch.cuda.get_device_properties(arguments[device_position]).uuid)
    return rebuild, (*arguments[:device_position], uuid, *arguments[device_position + 1 :])


def _request(url: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer = response.read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"HTTP {error.code}: {_message(error.read())}") from error
    except TimeoutError as error:
        raise RuntimeError(f"no answer in {timeout:.0f} s") from error
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise RuntimeError(f"no answer in {timeout:.0f} s") from error
        raise RuntimeError(f"not reachable ({reason})") from error
    try:
        parsed = json.loads(answer) if answer else {}
    except ValueError:
        return {}
    if isinstance(parsed, dict) and parsed.get("success") is False:
        raise RuntimeError(str(parsed.get("message")))
    return parsed if isinstance(parsed, dict) else {}


def _message(answer: bytes) -> str:
    try:
        parsed = json.loads(answer)
        return str(parsed.get("message") or parsed.get("error") or parsed)[:500]
    except (ValueError, AttributeError):
        return answer.decode(errors="replace")[:500]


def _own_address(engines: Sequence[str]) -> str:
    """Address of this host as the engines see it."""
    if all(_is_local(url) for url in engines):
        return "127.0.0.1"
    remote = urlsplit(next(url for url in engines if not _is_local(url)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only chooses the interface.
        probe.connect((remote.hostname, remote.port or 80))
        return str(probe.getsockname()[0])


def _is_local(url: str) -> bool:
    try:
        address = socket.gethostbyname(urlsplit(url).hostname or "")
    except OSError:
        return False
    # The host's name resolves to one of its addresses at most, and an engine may be known by another.
    return any(entry.address == address for entries in psutil.net_if_addrs().values() for entry in entries)
