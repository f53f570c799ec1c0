"""The policy's adapter (LoRA) in place of all weights: learner.lora.sync=adapter.

Each version is loaded beside the ones before, under a name of its own, while engines generate. Who unloads old
ones is the driver (``SGLangEngine.serve``), which knows the requests that still use them.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from conversion.files.peft_files import PREFIX, peft_config, write_peft
from megatron_retool.config import LoraConfig
from sglang_rollout.engine.base import EngineRejected, SyncReport
from sglang_rollout.engine.policy_adapter import adapter_name
from sglang_rollout.engine.weight_sync.base import Bucket, ServerWeightSync, is_local
from sglang_rollout.engine.weight_sync.errors import WeightSyncError


class AdapterWeightSync(ServerWeightSync):
    """Sends buckets of an adapter's factors by the names of PEFT's files, without their prefix.

    Args:
        settings: learner.lora.
        method: of weight_sync. tensor: files on this node, which the engine reads from memory. disk: files in
            ``directory``. distributed: tensors within the request.
        directory: on a file system that learner and engines share; holds a version until the engines have read it.

    With ``verify`` tensors always travel within the request, with a checksum of each, which every rank compares.
    """

    def __init__(
        self, engines: Sequence[str], *, settings: LoraConfig, method: str, directory: Path, **common: Any
    ) -> None:
        super().__init__(engines, **common)
        self._settings = settings
        self._method = "distributed" if self.verify else method
        self._directory = directory.absolute()

    def push(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """``WeightSync.push``. Requests in flight end on the version that they began with.

        Raises:
            WeightSyncError: an engine is dead, too slow, refuses the adapter or reports another version.
        """
        began = time.monotonic()
        self._probe()
        dtype = self._engine_dtype()
        factors = {
            name: tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()
            for bucket in buckets
            for name, tensor in bucket
        }
        if not factors:
            raise WeightSyncError("there was no adapter to send: export_adapter yielded no bucket")
        if self._method == "distributed":
            self._load(version, "/load_lora_adapter_from_tensors", self._messages(factors))
        else:
            self._load_files(version, factors)
        self._call_all("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._check_version(version)
        size = sum(tensor.nbytes for tensor in factors.values())
        verified = len(factors) * len(self.engines) if self.verify else 0
        return SyncReport(version, len(factors), size, time.monotonic() - began, verified)

    def _send(self, bucket: Bucket) -> None:
        raise AssertionError("an adapter travels whole")

    def _probe(self) -> None:
        super()._probe()
        foreign = [url for url in self.engines if not is_local(url)] if self._method == "tensor" else []
        if foreign:
            raise WeightSyncError(
                f"weight_sync.method=tensor is for engines of this node, but {', '.join(foreign)} is on another host: "
                "use weight_sync.method=distributed",
                foreign,
            )

    def _load_files(self, version: int, factors: dict[str, torch.Tensor]) -> None:
        if self._method == "disk":
            self._directory.mkdir(parents=True, exist_ok=True)
        root = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._directory if self._method == "disk" else None))
        try:
            settings, place = self._settings, root / "files"
            write_peft(place, factors, settings.rank, settings.alpha, "")
            self._load(version, "/load_lora_adapter", dict.fromkeys(self.engines, {"lora_path": str(place)}))
        finally:
            # Engines have copied it: checked_adapters.py.
            shutil.rmtree(root, ignore_errors=True)

    def _messages(self, factors: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
        # Not pickled tensors: torch's way of it sends descriptors of this process, and Megatron changes the other one.
        named = {PREFIX + name: tensor for name, tensor in factors.items()}
        payload = base64.b64encode(pickle.dumps({"safetensors": save(named)})).decode()
        body: dict[str, Any] = {"config_dict": peft_config(factors, self._settings.rank, self._settings.alpha, "")}
        if self.verify:
            body["expected_checksums"] = {name: _sha256(tensor) for name, tensor in named.items()}
        return dict.fromkeys(self.engines, body | {"serialized_named_tensors": [payload]})

    def _load(self, version: int, path: str, bodies: dict[str, dict[str, Any]]) -> None:
        name = adapter_name(version)
        named: dict[str, dict[str, Any] | None] = {url: body | {"lora_name": name} for url, body in bodies.items()}
        calls = self._start_all(path, named)
        # From a push that failed elsewhere, or from before the learner went back to an earlier step.
        taken = [url for url, call in calls.items() if _is_taken(call)]
        self._await_all({url: call for url, call in calls.items() if url not in taken}, path)
        if taken:
            unload = "/unload_lora_adapter"
            self._await_all(self._start_all(unload, dict.fromkeys(taken, {"lora_name": name})), unload)
            self._await_all(self._start_all(path, {url: named[url] for url in taken}), path)


def _is_taken(call: Future[dict[str, Any]]) -> bool:
    """Whether an engine refused an adapter because it has one of the name."""
    error = call.exception()
    return isinstance(error, EngineRejected) and "already loaded" in error.reason


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
