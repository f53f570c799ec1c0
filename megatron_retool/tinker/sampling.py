"""Samples: sampling sessions, and requests that run side by side past the learner's queue."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker.checkpoints import Checkpoints
from megatron_retool.tinker.loaded_adapters import LoadedAdapters
from megatron_retool.tinker.promises import Outcome, Promises, failure
from megatron_retool.tinker.requests import CheckpointPath, checkpoint_path, required_integer, required_text
from megatron_retool.tinker.run_store import SamplerRecord
from megatron_retool.tinker.sample_requests import SampleRequest, read_sample
from megatron_retool.tinker.sampler import PromptSampler
from megatron_retool.tinker.served_model import ServedModel
from megatron_retool.tinker.sessions import ClientSessions
from sglang_rollout.gateway.errors import ApiError, invalid, unsupported
from sglang_rollout.gateway.fields import Json
from untrusted import clipped

MOST_UNDER_WAY = 8192
"""Sample requests that wait for the engines or run there."""
logger = logging.getLogger(__name__)


class Sampling:
    """All sampling sessions' requests."""

    def __init__(
        self,
        model: ServedModel,
        sampler: PromptSampler,
        adapters: LoadedAdapters,
        checkpoints: Checkpoints,
        sessions: ClientSessions,
        promises: Promises,
    ) -> None:
        self._model, self._sampler, self._adapters = model, sampler, adapters
        self._checkpoints, self._sessions, self._promises = checkpoints, sessions, promises
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, body: Json) -> dict[str, Any]:
        """create_sampling_session.

        Raises:
            ApiError: the model or checkpoint is none that can be sampled here.
        """
        session = self._sessions.alive(required_text(body, "session_id"))
        number = required_integer(body, "sampling_session_seq_id")
        identifier = f"{session.record.id}:sample:{number}"
        if identifier not in session.samplers:
            if body.get("model_path") is not None:
                path = checkpoint_path(body, "model_path")
                if path.kind != "sampler_weights":
                    raise invalid(
                        "model_path", f"{path} cannot be sampled: take a checkpoint of save_weights_for_sampler"
                    )
                base = self._checkpoints.find(path, "model_path").base_model
                sampler = SamplerRecord(identifier, base, path)
            else:
                sampler = SamplerRecord(identifier, required_text(body, "base_model"))
            self._model.check_name(sampler.base_model)
            await self._sessions.add_sampler(session, sampler)
        return {"type": "create_sampling_session", "sampling_session_id": identifier}

    async def sample(self, body: Json) -> dict[str, Any]:
        """asample: begin, and answer with the promise of the result.

        Raises:
            ApiError: the request is wrong, its session unknown, or (429) too many are under way.
        """
        model = self._model
        call = await asyncio.to_thread(read_sample, body, model.vocabulary, model.context)
        identifier = f"{call.sampling_session_id}:{call.seq_id}"
        if (known := self._promises.find(identifier)) is not None:
            return known.submission
        sampler = self._sessions.sampler(call.sampling_session_id)
        request = call.request
        if request.stop_strings and not model.finds_texts:
            raise unsupported(
                "sampling_params.stop", "the engines have no tokenizer to find texts with: give token ids"
            )
        if len(self._tasks) >= MOST_UNDER_WAY:
            raise ApiError(429, "the engines have fallen behind: try again later", code="busy")
        self._path(sampler)
        names = [f"{identifier}:{place}" for place in range(request.samples)]
        promise = self._promises.open(identifier, sample_sequence_ids=names)
        task = asyncio.create_task(self._carry_out(identifier, sampler, request))
        promise.cancel = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return promise.submission

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _path(self, sampler: SamplerRecord) -> CheckpointPath | None:
        """What a session samples from now; None: the base model.

        Raises:
            ApiError: 404, it was deleted.
        """
        path = sampler.path
        if sampler.follows is not None:
            followed = self._checkpoints.followed(sampler.follows)
            if followed is None:
                raise ApiError(404, "the weights that this session follows were deleted", code="not_found")
            path = followed.path
        if path is not None:
            self._checkpoints.find(path, "sampling_session_id")
        return path

    async def _carry_out(self, identifier: str, sampler: SamplerRecord, request: SampleRequest) -> None:
        try:
            path = self._path(sampler)
            if path is None:
                result = await self._sampler.sample(None, request)
            else:
                async with self._adapters.use(path, self._checkpoints.directory(path)) as name:
                    result = await self._sampler.sample(name, request)
            outcome = Outcome(await asyncio.to_thread(result.to_wire), is_protobuf=True)
        except (RequestRefused, ApiError) as error:
            outcome = failure(str(error), by_user=True)
        except Exception as error:
            logger.exception("tinker: %s failed", identifier)
            outcome = failure(clipped(f"{type(error).__name__}: {error}"), by_user=False)
        promise = self._promises.find(identifier)
        if promise is not None:
            self._promises.settle(promise, outcome)
