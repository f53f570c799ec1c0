"""HTTP client of one SGLang server: token ids in, token ids and log-probs out.

``SGLangClient`` belongs to one event loop; ``blocking_client`` has the same for code without one. Generation has no
side effect, so a dropped connection is retried with a new request id: what the server may still do for the old one is
aborted and never returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from megatron_retool.routed_experts import ExpertArray
from sglang_rollout.engine.base import (
    EngineClientError,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
    GenerateResult,
    Memory,
    RankedText,
    ScoredText,
    ScoreRequest,
)
from sglang_rollout.engine.generate_messages import error_text, generate_body, version_of, weight_versions_of
from sglang_rollout.engine.key import authorization
from sglang_rollout.engine.policy_adapter import PolicyAdapter, adapter_name
from sglang_rollout.engine.routed_experts import RoutingShape
from sglang_rollout.engine.score_pieces import add_likeliest_and_targets, pieces

CONNECT_TIMEOUT_SECONDS = 10.0
CONTROL_TIMEOUT_SECONDS = 60.0
CLOSE_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 30.0
"""Idle connections are used again for this long. A server must keep them longer: a request on one that it is just
closing fails."""
RETRY_BASE_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0
IDLE_SECONDS = 60.0
"""How long a server may take to end what was aborted; it must be idle when it releases memory."""
IDLE_POLL_SECONDS = 0.2
ADAPTER_SECONDS = 600.0
"""How long an engine may take to read an adapter, or to end the requests of one that it unloads."""
PROFILE_SECONDS = 600.0
"""How long an engine may take to write what it recorded."""


class SGLangClient:
    """Speaks to one server. Use it inside one event loop; ``close`` it, or use it as an async context manager.

    Args:
        base_url: http://host:port
        retries: further attempts after a dropped or refused connection.
        timeout_seconds: limit of one /generate call.
        routing: gives that of the served model, for requests that want routed experts; called when the first answers.
        policy: the adapter that requests without one of their own get; None: they get the engine's model.
        headers: that every request shows; None: the key of this run's own engines.
    """

    def __init__(
        self,
        base_url: str,
        *,
        retries: int = 3,
        timeout_seconds: float = 3600.0,
        routing: Callable[[], RoutingShape] | None = None,
        policy: PolicyAdapter | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._policy = policy
        self.base_url = base_url.rstrip("/")
        self.retries = retries
        self.timeout_seconds = timeout_seconds
        self.routing = routing
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_start: Callable[[str], None] | None = None,
        deadline_seconds: float | None = None,
    ) -> GenerateResult:
        """``EngineClient.generate``. With ``filtered_log_probs`` SGLang caps top_k at 4096."""
        with self._adapter(request.adapter) as (adapter, version):
            result = await self._generate(replace(request, adapter=adapter), on_start, deadline_seconds)
        if version is not None:
            # The engine says its newest, and a request stays with the one that it began with.
            result = replace(result, weight_versions=[version] * len(result.output_ids))
        return result

    @contextlib.contextmanager
    def _adapter(self, asked: str | None) -> Iterator[tuple[str | None, int | None]]:
        """For the length of a request: the name of its adapter, and the version of the policy's."""
        if asked is not None or self._policy is None:
            yield asked, None
            return
        with self._policy.used_at(self.base_url) as version:
            yield None if version is None else adapter_name(version), version

    async def _generate(
        self, request: GenerateRequest, on_start: Callable[[str], None] | None, deadline_seconds: float | None
    ) -> GenerateResult:
        for attempt in range(self.retries + 1):
            rid = uuid.uuid4().hex
            if on_start is not None:
                on_start(rid)
            call = asyncio.ensure_future(self.request("/generate", generate_body(request, rid), self.timeout_seconds))
            try:
                if deadline_seconds is not None:
                    done, _ = await asyncio.wait({call}, timeout=max(0.0, deadline_seconds))
                    if not done:
                        await self._abort_quietly(rid)
                        done, _ = await asyncio.wait({call}, timeout=CONTROL_TIMEOUT_SECONDS)
                        if not done:
                            reason = f"no answer to an abort in {CONTROL_TIMEOUT_SECONDS:.0f} s"
                            raise EngineTimeout(self.base_url, reason, "/generate")
                return self._parse(await call, request)
            except (asyncio.CancelledError, EngineTimeout, EngineUnavailable) as error:
                call.cancel()
                # The connection is gone, the request is not: it would continue using the engine.
                self._in_background(self._abort_quietly(rid))
                if not isinstance(error, EngineUnavailable) or attempt == self.retries:
                    raise
            await _pause_before_retry(attempt)
        raise AssertionError("unreachable")

    async def score(self, input_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """``ScoringClient.score``: a prefill, and a greedy token that is dropped."""
        return (await self._scored(input_ids, adapter=adapter))[0]

    async def rank(self, input_ids: Sequence[int], count: int, adapter: str | None = None) -> RankedText:
        """``RankingClient.rank``; ``adapter`` and what it raises as for ``score``."""
        log_probs, meta = await self._scored(input_ids, count, adapter)
        try:
            rows = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
            likeliest = [[(int(entry[1]), float(entry[0])) for entry in row] for row in rows]
        except (KeyError, TypeError, IndexError) as error:
            raise EngineFailed(self.base_url, f"no likeliest tokens: {str(meta)[:300]}", "/generate") from error
        if len(likeliest) != len(input_ids):
            raise EngineFailed(self.base_url, "likeliest tokens of other places than the input's", "/generate")
        return RankedText(log_probs, likeliest)

    async def score_text(self, request: ScoreRequest) -> ScoredText:
        """A text's log-probs from a place on, with its likeliest tokens there and the log-probs of any others.

        SGLang gives the log-probs of the same ids in all places of a request, so a text with many different targets is
        scored in pieces, each of which continues on the cache of the one before.

        Raises:
            EngineRejected: a target is no token of the vocabulary, or the adapter is not loaded.
            EngineUnavailable, EngineTimeout, EngineFailed
        """
        key, result = uuid.uuid4().hex, ScoredText([], [], [])
        for piece in pieces(request):
            log_probs, meta = await self._scored(
                request.input_ids[: piece.stop], request.likeliest, request.adapter, piece.start, piece.ids, key
            )
            result.log_probs.extend(log_probs)
            try:
                add_likeliest_and_targets(result, meta, request, piece)
            except (KeyError, TypeError, IndexError) as error:
                raise EngineFailed(self.base_url, f"other places than the text's: {error!r}", "/generate") from error
        return result

    async def _scored(
        self,
        input_ids: Sequence[int],
        likeliest: int = 0,
        adapter: str | None = None,
        start: int = 1,
        targets: Sequence[int] = (),
        key: str | None = None,
    ) -> tuple[list[float], dict[str, Any]]:
        """[n - start] log-probs of the input from token ``start`` on, and all that the server said of it."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "top_logprobs_num": likeliest,
            # A later request that shares a prefix with the text is to be computed as if it had never been here.
            "extra_key": key or uuid.uuid4().hex,
        }
        if targets:
            body["token_ids_logprob"] = list(targets)
        with self._adapter(adapter) as (name, _):
            if name is not None:
                body["lora_path"] = name
            answer = await self.request("/generate", body, self.timeout_seconds, retries=self.retries)
        try:
            meta = dict(answer["meta_info"])
            pairs = meta["input_token_logprobs"][1:]
            log_probs, ids = [float(pair[0]) for pair in pairs], [pair[1] for pair in pairs]
        except (KeyError, TypeError, IndexError) as error:
            reason = f"no log-probs of the input: {str(answer)[:300]}"
            raise EngineFailed(self.base_url, reason, "/generate") from error
        own = list(input_ids)[start:]
        if ids != own:
            await self._score_last_id(body, ids, own, log_probs)
        return log_probs, meta

    async def _score_last_id(
        self, body: Mapping[str, Any], ids: Sequence[int], own: Sequence[int], log_probs: list[float]
    ) -> None:
        """Put in the log-probs of the vocabulary's last id, in whose place SGLang scores the first.

        Raises:
            EngineFailed: the engine scored another text.
        """
        wrong = EngineFailed(self.base_url, "log-probs of other ids than those of the input", "/generate")
        if len(ids) != len(own):
            raise wrong
        places = [place for place, token in enumerate(own) if ids[place] != token]
        last, *others = sorted({own[place] for place in places})
        if others or last != max(own) or any(ids[place] for place in places):
            raise wrong
        answer = await self.request(
            "/generate", {**body, "token_ids_logprob": [last]}, self.timeout_seconds, retries=self.retries
        )
        try:
            rows = answer["meta_info"]["input_token_ids_logprobs"][1:]
            result = [{int(entry[1]): float(entry[0]) for entry in rows[place]}[last] for place in places]
        except (KeyError, TypeError, IndexError) as error:
            raise wrong from error
        for place, value in zip(places, result, strict=True):
            log_probs[place] = value

    async def load_adapter(self, name: str, directory: Path) -> None:
        """``AdapterClient.load_adapter``"""
        await self.request(
            "/load_lora_adapter", {"lora_name": name, "lora_path": str(directory.absolute())}, ADAPTER_SECONDS
        )

    async def unload_adapter(self, name: str) -> None:
        """``AdapterClient.unload_adapter``"""
        await self.request("/unload_lora_adapter", {"lora_name": name}, ADAPTER_SECONDS)

    async def abort(self, request_id: str) -> None:
        """End one request; its /generate call returns what it has, with finish_reason "abort"."""
        await self.request("/abort_request", {"rid": request_id})

    async def weight_version(self) -> int:
        """Version of the weights that the engine serves."""
        info = await self.request("/model_info", retries=self.retries)
        return version_of(info.get("weight_version"))

    async def healthy(self, timeout_seconds: float = 10.0) -> bool:
        """Whether the engine generates (SGLang's /health_generate; takes at least a second)."""
        try:
            await self.request("/health_generate", timeout_seconds=timeout_seconds)
        except EngineClientError:
            return False
        return True

    async def flush_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            EngineRejected: the engine has requests.
        """
        await self.request("/flush_cache", {})

    async def sleep(self, memory: Sequence[Memory]) -> None:
        """Give GPU memory back. The KV cache goes first, or with the weights, once the engine is idle."""
        if Memory.KV_CACHE in memory:
            await self._wait_until_idle()
        await self.request("/release_memory_occupation", {"tags": list(memory)})

    async def wake(self, memory: Sequence[Memory]) -> None:
        """Take back what ``sleep`` gave; weights come back empty and must be synchronised."""
        await self.request("/resume_memory_occupation", {"tags": list(memory)})

    async def start_profile(self, directory: Path, name: str, record_shapes: bool, with_stack: bool) -> None:
        """``ProfilingClient.start_profile``, by torch's profiler in each of the engine's ranks."""
        body = {
            "output_dir": str(directory),
            "profile_id": name,
            "record_shapes": record_shapes,
            "with_stack": with_stack,
        }
        await self.request("/start_profile", body)

    async def stop_profile(self) -> None:
        """``ProfilingClient.stop_profile``"""
        await self.request("/stop_profile", {}, PROFILE_SECONDS)

    async def close(self) -> None:
        """Wait briefly for calls in the background, and close the connections."""
        if self._background:
            await asyncio.wait(set(self._background), timeout=CLOSE_SECONDS)
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def request(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_seconds: float = CONTROL_TIMEOUT_SECONDS,
        retries: int = 0,
    ) -> Any:
        """The server's answer to a POST of ``body``, or without one to a GET, as JSON; {} where it is empty.

        Args:
            retries: further attempts after a dropped or refused connection, for what may be done twice.

        Raises:
            EngineUnavailable, EngineTimeout, EngineRejected, EngineFailed: a refusal may also be an answer with
                "success": false.
        """
        for attempt in range(retries):
            try:
                return await self.request(path, body, timeout_seconds)
            except EngineUnavailable:
                await _pause_before_retry(attempt)
        if self._closed:
            raise EngineUnavailable(self.base_url, "the client is closed", path)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
                auto_decompress=False,
                headers=authorization() if self._headers is None else self._headers,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
        payload = None if body is None else orjson.dumps(body)
        headers = None if payload is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                self.base_url + path,
                data=payload,
                headers=headers,
                timeout=timeout,
            ) as response:
                answer = await response.read()
                status = response.status
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"no connection in {CONNECT_TIMEOUT_SECONDS:.0f} s"
            raise EngineUnavailable(self.base_url, reason, path) from error
        except TimeoutError as error:
            raise EngineTimeout(self.base_url, f"no answer in {timeout_seconds:.0f} s", path) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(self.base_url, f"{type(error).__name__}: {error}", path) from error
        if status >= 500:
            raise EngineFailed(self.base_url, f"HTTP {status}: {error_text(answer)}", path)
        if status >= 400:
            raise EngineRejected(self.base_url, f"HTTP {status}: {error_text(answer)}", path)
        if not answer:
            return {}
        try:
            parsed = orjson.loads(answer)
        except orjson.JSONDecodeError:
            return {"message": answer.decode(errors="replace")}
        if isinstance(parsed, dict) and parsed.get("success") is False:
            raise EngineRejected(self.base_url, str(parsed.get("message")), path)
        return parsed

    async def _wait_until_idle(self) -> None:
        """An engine refuses to flush its cache until nothing runs."""
        deadline = asyncio.get_running_loop().time() + IDLE_SECONDS
        while True:
            try:
                return await self.flush_cache()
            except EngineRejected:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(IDLE_POLL_SECONDS)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_quietly(self, rid: str) -> None:
        with contextlib.suppress(EngineClientError):
            await self.request("/abort_request", {"rid": rid}, CONNECT_TIMEOUT_SECONDS)

    def _parse(self, answer: Any, request: GenerateRequest) -> GenerateResult:
        try:
            meta = answer["meta_info"]
            output_ids = answer["output_ids"]
            finish = meta["finish_reason"]
            pairs = meta.get("output_token_logprobs") or []
            log_probs = [pair[0] for pair in pairs]
            sampled = [pair[1] for pair in pairs]
            if request.wants_filtered:
                log_probs = [float(value) for value in meta.get("output_token_sampling_logprobs") or []]
            reason = finish["type"]
        except (KeyError, TypeError) as error:
            reason = f"not an answer of /generate: {str(answer)[:300]}"
            raise EngineFailed(self.base_url, reason, "/generate") from error
        rows = self._rows(meta.get("routed_experts"), request, len(output_ids), reason == "abort")
        if sampled != output_ids or len(log_probs) != len(sampled):
            # Token in, token out: ids and log-probs that do not line up must never reach the learner.
            known = min(len(sampled), len(log_probs))
            if reason != "abort" or sampled[:known] != output_ids[:known]:
                raise EngineFailed(
                    self.base_url, f"{len(output_ids)} output ids, log-probs for {len(sampled)} other ids", "/generate"
                )
            output_ids, log_probs = sampled[:known], log_probs[:known]
            rows = None
        top = top_ids = None
        if meta.get("output_top_logprobs"):
            positions = meta["output_top_logprobs"][: len(output_ids)]
            top = [[entry[0] for entry in position or ()] for position in positions]
            top_ids = [[entry[1] for entry in position or ()] for position in positions]
        return GenerateResult(
            output_ids=output_ids,
            log_probs=log_probs,
            weight_versions=weight_versions_of(meta, len(output_ids)),
            finish_reason=reason,
            matched_stop=finish.get("matched"),
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
            top_log_probs=top,
            top_ids=top_ids,
            routed_experts=rows,
        )

    def _rows(self, text: Any, request: GenerateRequest, sampled: int, aborted: bool) -> ExpertArray | None:
        """The answer's rows, where they were asked for and are there."""
        start = request.routed_experts_start
        if start is None or self.routing is None or not isinstance(text, str):
            return None
        try:
            return self.routing().decode(text, max(0, len(request.input_ids) + sampled - 1 - start))
        except ValueError as error:
            if aborted:
                # They are asked for again: an answer that was cut off need not be whole.
                return None
            raise EngineFailed(self.base_url, str(error), "/generate") from error


async def _pause_before_retry(attempt: int) -> None:
    # Full jitter: hundreds of trajectories lose their connection at the same moment.
    await asyncio.sleep(random.uniform(0.0, min(RETRY_MAX_SECONDS, RETRY_BASE_SECONDS * 2**attempt)))
