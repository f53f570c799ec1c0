"""Samples from the engines: an adapter is loaded into an engine when that gets the first request for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_retool.config import SamplingConfig
from megatron_retool.target_sequences import Int64Array, RequestRefused
from megatron_retool.tinker.sample_requests import SampleRequest
from megatron_retool.tinker.sampler import LikeliestTokens, SampledTokens, SampleResult
from megatron_retool.tinker.wire import MASKED
from sglang_rollout.engine.base import (
    EngineClientError,
    EngineFailed,
    EngineRejected,
    GenerateRequest,
    GenerateResult,
    ScoredText,
    ScoreRequest,
    StopConditions,
)
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.gateway.session_tree import seed_of

logger = logging.getLogger(__name__)
MOST_FAILURES = 3
"""Requests of one call that may fail on engines that are healthy."""


class EngineSampler:
    """``sampler.Sampler``. All methods belong to one event loop.

    Args:
        engines: SGLang's.
        ends: token ids that end a sample where a client names none, beside the model's own.
        context: tokens of a prompt with its sample.
    """

    def __init__(self, engines: EnginePool, ends: Sequence[int], context: int) -> None:
        self._engines = engines
        self._ends = tuple(ends)
        self._context = context
        self._directories: dict[str, Path] = {}
        self._loaded: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Know an adapter, whose files stay until ``unload_adapter``."""
        self._directories[name] = directory

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, here and in the engines that have it."""
        self._directories.pop(name, None)
        clients: dict[str, Any] = {each.url: each.client for each in self._engines.router.engines if each.alive}
        for url, loaded in [key for key in self._loaded if key[1] == name]:
            del self._loaded[url, loaded]
            if url in clients:
                try:
                    await clients[url].unload_adapter(name)
                except EngineClientError:
                    logger.warning("tinker: engine %s did not unload adapter %s", url, name, exc_info=True)

    def forget_engine(self, url: str) -> None:
        """Take no adapter for loaded by an engine that is restarted."""
        for key in [each for each in self._loaded if each[0] == url]:
            del self._loaded[key]

    async def sample(self, adapter: str | None, request: SampleRequest) -> SampleResult:
        """As ``Sampler.sample``; log-probs of samples are those after the temperature, before top_k and top_p.

        Raises:
            RequestRefused: an engine refuses the request.
            EngineClientError: engines that are healthy failed it several times.
        """
        draws = [asyncio.ensure_future(self._drawn(adapter, request, index)) for index in range(request.samples)]
        try:
            scored = await self._scored(adapter, request)
            drawn = await asyncio.gather(*draws)
        finally:
            for draw in draws:
                draw.cancel()
        return SampleResult([result for result, _ in drawn], **scored, cached_tokens=max(cached for _, cached in drawn))

    async def _drawn(self, adapter: str | None, request: SampleRequest, index: int) -> tuple[SampledTokens, int]:
        """A sample, and the prompt's tokens that the engine had in its cache."""
        room = self._context - len(request.prompt)
        most = room if request.max_tokens is None else request.max_tokens
        if not most:
            return SampledTokens(np.zeros(0, np.int64), np.zeros(0, np.float32), stopped=False), 0
        wanted = GenerateRequest(
            input_ids=request.prompt.tolist(),
            max_new_tokens=most,
            sampling=SamplingConfig(
                temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, min_p=0.0, n=1
            ),
            stop=StopConditions(self._ends, request.stop_strings)
            if request.stop_ids is None
            else StopConditions(request.stop_ids, request.stop_strings, end_of_sequence=False),
            seed=seed_of(request.seed, index),
            top_log_probs=request.top_sampled,
            adapter=adapter,
        )

        async def generate(client: Any) -> GenerateResult:
            result: GenerateResult = await client.generate(wanted)
            if result.finish_reason == "abort":
                raise EngineFailed(client.base_url, "it ended the request by itself", "/generate")
            return result

        result = await self._asked(adapter, request.prompt, len(request.prompt) + most, generate)
        top = None
        if request.top_sampled:
            rows = zip(result.top_ids or [], result.top_log_probs or [], strict=True)
            top = _table([list(zip(*row, strict=True)) for row in rows], request.top_sampled)
        tokens, log_probs = np.array(result.output_ids, np.int64), np.array(result.log_probs, np.float32)
        return SampledTokens(tokens, log_probs, result.finish_reason == "stop", top), result.cached_tokens

    async def _scored(self, adapter: str | None, request: SampleRequest) -> dict[str, Any]:
        """The fields of ``SampleResult`` that are about the prompt."""
        if not request.scores_prompt:
            return {}
        length, targets = len(request.prompt), request.targets
        # Targets are asked for at all places.
        start = request.scored_from if targets is None else 1
        if start >= length:
            result = ScoredText([], [], [])
        else:
            wanted = ScoreRequest(
                input_ids=request.prompt.tolist(),
                start=start,
                likeliest=request.top_prompt,
                targets=None if targets is None else [row[row >= 0].tolist() for row in targets],
                adapter=adapter,
            )
            result = await self._asked(adapter, request.prompt, length, lambda client: client.score_text(wanted))
        answer: dict[str, Any] = {}
        hidden = max(request.scored_from, 1)
        if request.prompt_log_probs:
            own = np.full(length, np.nan, np.float32)
            own[start:] = result.log_probs
            own[:hidden] = np.nan
            answer["prompt_log_probs"] = own
        if request.top_prompt:
            rows: list[list[tuple[int, float]]] = [[] for _ in range(start)] + result.likeliest
            answer["top_prompt"] = _table(
                [row if place >= hidden else [] for place, row in enumerate(rows)], request.top_prompt
            )
        if targets is not None:
            values = np.full(targets.shape, np.nan, np.float32)
            values[targets >= 0] = [value for row in result.targets for value in row]
            answer["target_log_probs"] = values
        return answer

    async def _asked(self, adapter: str | None, prompt: Int64Array, tokens: int, ask: Any) -> Any:
        """What ``ask(client)`` says of an engine that has a place and the adapter, preferably the one that has the
        prompt in its cache.

        Raises:
            RequestRefused, EngineClientError: see ``sample``.
        """
        failures, avoid, group = 0, None, hash((adapter, prompt.tobytes()))
        while True:
            lease = await self._engines.router.acquire(group, tokens, avoid)
            avoid = lease.engine
            try:
                if adapter is not None:
                    await self._load(avoid.url, avoid.client, adapter)
                return await ask(avoid.client)
            except EngineRejected as error:
                raise RequestRefused(f"the engine refuses the request: {error}") from error
            except EngineClientError as error:
                failures += await self._engines.still_alive(avoid, error)
                if failures > MOST_FAILURES:
                    raise
            finally:
                self._engines.router.release(lease)

    async def _load(self, url: str, client: Any, name: str) -> None:
        """Load an adapter into an engine, once however many ask for it."""
        key = url, name
        loading = self._loaded.get(key)
        if loading is None:
            loading = self._loaded[key] = asyncio.ensure_future(client.load_adapter(name, self._directories[name]))
        try:
            # One that no longer waits does not end what others wait for.
            await asyncio.shield(loading)
        except EngineClientError:
            if self._loaded.get(key) is loading:
                del self._loaded[key]
            raise


def _table(rows: Sequence[Sequence[tuple[int, float]]], width: int) -> LikeliestTokens:
    """(id, log-prob) of each place, the likeliest first, as tables; what a place lacks is masked."""
    ids = np.zeros((len(rows), width), np.int64)
    log_probs = np.full((len(rows), width), MASKED, np.float32)
    for place, row in enumerate(rows):
        for column, (token, log_prob) in enumerate(row[:width]):
            ids[place, column], log_probs[place, column] = token, log_prob
    return LikeliestTokens(ids, log_probs)
