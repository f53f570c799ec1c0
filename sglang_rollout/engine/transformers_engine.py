"""transformers' model in the driver's own process: a slow engine for debugging, and a reference for the fast one.

Nothing runs on the engine's node. The client holds the model and samples token by token, all requests in one batch
with a KV cache; the learner leaves new weights in the run's directory, and the model looks there before every token.
One model serves all clients of a base URL.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_retool.config import Config, ConfigError, SamplingConfig
from sglang_rollout.engine.base import (
    EngineClientError,
    EngineFailed,
    EngineRejected,
    EngineStartError,
    GenerateRequest,
    GenerateResult,
    Memory,
    RankedText,
    SyncReport,
)
from sglang_rollout.engine.transformers_model import BatchedModel, InputTooLong, SampledSequence
from sglang_rollout.engine.weight_sync.base import Bucket
from sglang_rollout.engine.weight_sync.disk import WeightDirectory
from sglang_rollout.engine.weight_sync.errors import WeightSyncError
from sglang_rollout.engine.weight_sync.quantization import weight_conversion


class TransformersEngine:
    """``Engine`` of one process.

    Args:
        admit_every: tokens between two times at which waiting requests join the batch, whose cache is then made again.
        attention: transformers' attn_implementation.
    """

    def __init__(self, config: Config, *, admit_every: int = 16, attention: str = "sdpa") -> None:
        settings = config.rollout.engine
        for key, value in (
            ("quantization", settings.quantization),
            ("speculative.algorithm", settings.speculative.algorithm),
            ("extra_args", settings.extra_args),
        ):
            if value:
                raise ConfigError(
                    f"rollout.engine.{key}={value}: rollout.engine.backend=transformers has none: unset it"
                )
        if settings.tensor_parallel_size > 1:
            raise ConfigError(
                "rollout.engine.tensor_parallel_size must be 1 with rollout.engine.backend=transformers: its model is "
                "in one process"
            )
        self.config = config
        self._admit_every = admit_every
        self._attention = attention
        self._weights = WeightDirectory(config.trainer.run_dir / "weight_sync")
        self._models: dict[str, BatchedModel] = {}

    def server(self, index: int, *, model_path: str, **where: Any) -> TransformersServer:
        """``Engine.server``; host, devices and log are of no use to it."""
        return TransformersServer(index, Path(model_path), self._weights)

    def client(self, base_url: str) -> TransformersClient:
        """A client of the model at ``base_url``, which clients of the same URL share."""
        if base_url not in self._models:
            self._models[base_url] = BatchedModel(
                Path(urlsplit(base_url).path), self.config, self._weights, self._admit_every, self._attention
            )
        return TransformersClient(base_url, self._models[base_url])

    def weight_sync(self, base_urls: Sequence[str]) -> TransformersWeightSync:
        """Weights go through files in the run's directory."""
        model_path = Path(self.config.model.path)
        return TransformersWeightSync(
            base_urls,
            self._weights,
            model_path,
            weight_conversion(self.config.weight_sync, self.config.model, self.config.rollout),
        )


class TransformersServer:
    """There is no process to own: the first one forgets weights that an earlier run left."""

    def __init__(self, index: int, model_path: Path, weights: WeightDirectory) -> None:
        self._is_first = index == 0
        self.base_url = f"transformers://engine-{index}{model_path.absolute()}"
        self._model_path = model_path
        self._weights = weights

    def start(self) -> None:
        """Check that the model is there; it is loaded at the first request.

        Raises:
            EngineStartError: the directory has no config.json.
        """
        if not (self._model_path / "config.json").is_file():
            raise EngineStartError(
                f"{self._model_path} has no config.json: rollout needs a Hugging Face model directory (model.path)"
            )
        if self._is_first:  # one that is added later finds weights that others read
            self._weights.remove()

    def stop(self) -> None:
        """Nothing was started."""


class TransformersWeightSync:
    """Weights as files that the model looks for before it samples the next token."""

    def __init__(
        self,
        engines: Sequence[str],
        weights: WeightDirectory,
        model_path: Path,
        convert: Callable[[Bucket], Bucket] | None = None,
    ) -> None:
        self.engines = [url.rstrip("/") for url in engines]
        self._weights = weights
        self._model_path = model_path
        self._convert = convert

    def push(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """Leave the weights in files, which the model reads before its next token.

        Raises:
            WeightSyncError: there is no weight, or a file cannot be written.
        """
        began, tensors = time.monotonic(), 0
        try:
            self._weights.begin()
            for bucket in buckets:
                tensors += len(bucket)
                self._weights.add(bucket if self._convert is None else self._convert(bucket))
            if not tensors:
                raise WeightSyncError("there was no weight to send: export_weights yielded no bucket")
            self._weights.finish(version, self._model_path)
        except OSError as error:
            raise WeightSyncError(f"weights cannot be left in {self._weights.directory}: {error}") from error
        return SyncReport(version, tensors, self._weights.bytes, time.monotonic() - began)

    def close(self) -> None:
        """Keep the files: a model reads them at its next request."""


class TransformersClient:
    """``EngineClient`` of a model in this process."""

    def __init__(self, base_url: str, model: BatchedModel) -> None:
        self.base_url = base_url
        self._model = model
        self._sequences: dict[str, SampledSequence] = {}

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_start: Callable[[str], None] | None = None,
        deadline_seconds: float | None = None,
    ) -> GenerateResult:
        """Sample within the batch that the model computes; see ``EngineClient.generate``.

        Raises:
            EngineRejected: the request names an adapter.
        """
        if request.adapter is not None:
            reason = f"adapter {request.adapter!r}: rollout.engine.backend=transformers loads none"
            raise EngineRejected(self.base_url, reason)
        request_id = uuid.uuid4().hex
        deadline = float("inf") if deadline_seconds is None else time.monotonic() + deadline_seconds
        done = asyncio.get_running_loop().create_future()
        sequence = self._sequences[request_id] = SampledSequence(request, list(request.input_ids), done, deadline)
        if on_start is not None:
            on_start(request_id)
        try:
            await self._model.sample(sequence)
        except InputTooLong as error:
            raise EngineRejected(self.base_url, str(error)) from error
        except Exception as error:
            raise EngineFailed(self.base_url, f"{type(error).__name__}: {error}") from error
        finally:
            del self._sequences[request_id]
        return sequence.result()

    async def score(self, input_ids: Sequence[int]) -> list[float]:
        """``ScoringClient.score``."""
        try:
            return await asyncio.to_thread(self._model.score, input_ids)
        except Exception as error:
            raise EngineFailed(self.base_url, f"{type(error).__name__}: {error}") from error

    async def rank(self, input_ids: Sequence[int], count: int) -> RankedText:
        """``RankingClient.rank``."""
        try:
            return await asyncio.to_thread(self._model.rank, input_ids, count)
        except Exception as error:
            raise EngineFailed(self.base_url, f"{type(error).__name__}: {error}") from error

    async def abort(self, request_id: str) -> None:
        """Let the request end with what it has."""
        if request_id in self._sequences:
            self._sequences[request_id].deadline = 0.0

    async def weight_version(self) -> int:
        """The version of the weights that the model has now.

        Raises:
            EngineFailed: newer weights cannot be read.
        """
        try:
            return await asyncio.to_thread(self._model.refresh)
        except Exception as error:
            raise EngineFailed(self.base_url, f"{type(error).__name__}: {error}") from error

    async def healthy(self, timeout_seconds: float = 10.0) -> bool:
        """Whether a token is sampled in time."""
        try:
            await self.generate(GenerateRequest([0], 1, SamplingConfig()), deadline_seconds=timeout_seconds)
        except EngineClientError:
            return False
        return True

    async def sleep(self, memory: Sequence[Memory]) -> None:
        """Move the weights to the CPU, once nothing is under way."""
        await self._model.idle()
        if Memory.WEIGHTS in memory:
            await asyncio.to_thread(self._model.move, "cpu")

    async def wake(self, memory: Sequence[Memory]) -> None:
        """Bring the weights back to the device."""
        if Memory.WEIGHTS in memory:
            await asyncio.to_thread(self._model.move, self._model.device)

    async def close(self) -> None:
        """Nothing is open: the model serves other clients of this URL."""

    async def __aenter__(self) -> TransformersClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
