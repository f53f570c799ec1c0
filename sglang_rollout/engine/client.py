"""Asynchronous client of one SGLang server: token ids in, token ids and log-probs out.

Every failure is one of four exceptions, so that a caller can tell a server that is gone (``EngineUnavailable``) from
one that is slow (``EngineTimeout``), from a request it refuses (``EngineRejected``) and from a server that broke while
it worked (``EngineFailed``). Generation has no side effect, so a dropped connection is retried with a new request id:
what the server may still do for the old one is aborted and never returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from megatron_retool.config import SamplingConfig

CONNECT_TIMEOUT_SECONDS = 10.0
CONTROL_TIMEOUT_SECONDS = 60.0
CLOSE_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 30.0
"""Idle connections are used again for this long. A server must keep them longer: a request on one that it is just
closing fails."""
RETRY_BASE_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0
MAX_SUPPORT = 4096


class EngineClientError(RuntimeError):
    """A request to an engine failed. ``engine`` is its base URL."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(f"engine {engine}: {message}")
        self.engine = engine


class EngineUnavailable(EngineClientError):
    """Nobody answers at the engine's address, also after the retries."""


class EngineTimeout(EngineClientError):
    """The engine did not answer in time."""


class EngineRejected(EngineClientError):
    """The engine refused the request (4xx): the request is wrong, and a retry would be too."""


class EngineFailed(EngineClientError):
    """The engine answered with an error of its own (5xx) or with something that is no answer."""


@dataclass(frozen=True)
class GenerateResult:
    """What one /generate call sampled. The lists have one entry for each output token.

    ``log_probs`` are natural logarithms of the probability after the temperature, and before top_p, top_k and min_p
    cut the distribution unless ``filtered_log_probs`` was asked for. ``weight_versions`` has the version that sampled
    each token: they differ within one call where weights were swapped while the request was held.
    """

    output_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    matched_stop: int | str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    top_log_probs: list[list[float]] | None = None
    """Log-probs of the most likely tokens at each position, where they were asked for."""


@dataclass(frozen=True)
class StopConditions:
    """When the engine ends a turn: on a token id, or on a string (needs the tokenizer in the engine)."""

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One call of /generate."""

    input_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    stop: StopConditions = field(default_factory=StopConditions)
    seed: int | None = None
    top_log_probs: int = 0
    filtered_log_probs: bool = False
    """Take the probabilities after top_p, top_k and min_p: the distribution that was sampled from. SGLang then returns
    each token's support too, and caps top_k at 4096."""

    @property
    def wants_filtered(self) -> bool:
        sampling = self.sampling
        filtered = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
        return self.filtered_log_probs and filtered and sampling.temperature > 0.0

    def body(self, rid: str) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "min_p": self.sampling.min_p,
            "stop_token_ids": list(self.stop.token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if self.stop.strings:
            sampling["stop"] = list(self.stop.strings)
        if self.seed is not None:
            sampling["sampling_seed"] = self.seed
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(self.input_ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if self.wants_filtered:
            body["return_sampling_mask"] = True
            sampling["top_k"] = min(self.sampling.top_k, MAX_SUPPORT) if self.sampling.top_k > 0 else MAX_SUPPORT
        if self.top_log_probs:
            body["top_logprobs_num"] = self.top_log_probs
        return body


class EngineClient:
    """Speaks to one engine. Use it inside one event loop; ``close`` it, or use it as an async context manager.

    Args:
        base_url: http://host:port
        retries: further attempts after a dropped or refused connection.
        timeout_seconds: limit of one /generate call.
        max_connections: simultaneous requests; 0 is no limit.
    """

    def __init__(
        self, base_url: str, *, retries: int = 3, timeout_seconds: float = 3600.0, max_connections: int = 0
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.retries = retries
        self.timeout_seconds = timeout_seconds
        self._max_connections = max_connections
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
        """Sample until a stop condition, the length limit, or an abort (then the result is partial).

        Args:
            on_start: called with the request id of every attempt; ``abort`` takes it.
            deadline_seconds: after that time the request is aborted and what it has so far is returned.

        Raises:
            EngineUnavailable, EngineTimeout, EngineRejected, EngineFailed
        """

        call_limit = f"{CONTROL_TIMEOUT_SECONDS:.0f} s"

        async def attempt() -> GenerateResult:
            rid = uuid.uuid4().hex
            if on_start is not None:
                on_start(rid)
            call = asyncio.ensure_future(self._post("/generate", request.body(rid), self.timeout_seconds))
            try:
                if deadline_seconds is not None:
                    done, _ = await asyncio.wait({call}, timeout=max(0.0, deadline_seconds))
                    if not done:
                        await self._abort_quietly(rid)
                        done, _ = await asyncio.wait({call}, timeout=CONTROL_TIMEOUT_SECONDS)
                        if not done:
                            raise EngineTimeout(self.base_url, f"/generate: no answer to an abort in {call_limit}")
                return self._parse(await call, request.wants_filtered)
            except (asyncio.CancelledError, EngineTimeout, EngineUnavailable):
                call.cancel()
                # The connection is gone, the request is not: it would go on using the engine.
                self._in_background(self._abort_quietly(rid))
                raise

        result: GenerateResult = await self._retrying(attempt)
        return result

    async def abort(self, rid: str) -> None:
        """End one request; its /generate call returns what it has, with finish_reason "abort"."""
        await self._post("/abort_request", {"rid": rid}, CONTROL_TIMEOUT_SECONDS)

    async def abort_all(self) -> None:
        """End every request of the engine, whoever made it."""
        await self._post("/abort_request", {"abort_all": True}, CONTROL_TIMEOUT_SECONDS)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "retract") -> None:
        """Hold generation. abort: running requests return what they have; retract: they wait and recompute their KV
        cache afterwards (weights may change meanwhile); in_place: they wait and keep their KV cache."""
        await self._post("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_SECONDS)

    async def resume(self) -> None:
        """Undo ``pause``."""
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_SECONDS)

    async def weight_version(self) -> int:
        """Version of the weights that the engine serves."""
        info = await self._retrying(lambda: self._get("/model_info", CONTROL_TIMEOUT_SECONDS))
        return _version(info.get("weight_version"))

    async def server_info(self) -> dict[str, Any]:
        """The server's arguments and state, as SGLang reports them."""
        info: dict[str, Any] = await self._retrying(lambda: self._get("/server_info", CONTROL_TIMEOUT_SECONDS))
        return info

    async def healthy(self, timeout_seconds: float = 10.0) -> bool:
        """Whether the engine generates (SGLang's /health_generate; takes at least a second)."""
        try:
            await self._get("/health_generate", timeout_seconds)
        except EngineClientError:
            return False
        return True

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. The engine must be idle or paused with retract."""
        await self._post("/flush_cache", {}, CONTROL_TIMEOUT_SECONDS)

    async def release_memory(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None:
        """Give the GPU memory of weights and/or KV cache back (colocated engines); the engine must be idle."""
        await self._post("/release_memory_occupation", {"tags": list(tags)}, CONTROL_TIMEOUT_SECONDS)

    async def resume_memory(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take back what ``release_memory`` gave; weights come back empty and must be synchronised."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)}, CONTROL_TIMEOUT_SECONDS)

    async def close(self) -> None:
        if self._background:
            await asyncio.wait(set(self._background), timeout=CLOSE_SECONDS)
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _retrying(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        for count in range(self.retries + 1):
            try:
                return await attempt()
            except EngineUnavailable:
                if count == self.retries:
                    raise
                # Full jitter: hundreds of trajectories lose their connection at the same moment.
                await asyncio.sleep(random.uniform(0.0, min(RETRY_MAX_SECONDS, RETRY_BASE_SECONDS * 2**count)))
        raise AssertionError("unreachable")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_quietly(self, rid: str) -> None:
        with contextlib.suppress(EngineClientError):
            await self._post("/abort_request", {"rid": rid}, CONNECT_TIMEOUT_SECONDS)

    async def _get(self, path: str, timeout_seconds: float) -> Any:
        return await self._send("GET", path, None, timeout_seconds)

    async def _post(self, path: str, body: dict[str, Any], timeout_seconds: float) -> Any:
        return await self._send("POST", path, body, timeout_seconds)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float) -> Any:
        if self._closed:
            raise EngineUnavailable(self.base_url, f"{path}: the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=KEEP_ALIVE_SECONDS),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
        payload = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if payload is not None else None
        try:
            async with self._session.request(
                method, self.base_url + path, data=payload, headers=headers, timeout=timeout
            ) as response:
                answer = await response.read()
                status = response.status
        except aiohttp.ConnectionTimeoutError as error:
            message = f"{path}: no connection in {CONNECT_TIMEOUT_SECONDS:.0f} s"
            raise EngineUnavailable(self.base_url, message) from error
        except TimeoutError as error:
            raise EngineTimeout(self.base_url, f"{path}: no answer in {timeout_seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(self.base_url, f"{path}: {type(error).__name__}: {error}") from error
        if status >= 500:
            raise EngineFailed(self.base_url, f"{path}: HTTP {status}: {_message(answer)}")
        if status >= 400:
            raise EngineRejected(self.base_url, f"{path}: HTTP {status}: {_message(answer)}")
        if not answer:
            return {}
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError:
            return {"message": answer.decode(errors="replace")}

    def _parse(self, answer: Any, filtered: bool) -> GenerateResult:
        try:
            meta = answer["meta_info"]
            output_ids = answer["output_ids"]
            finish = meta["finish_reason"]
            pairs = meta.get("output_token_logprobs") or []
            log_probs = [pair[0] for pair in pairs]
            sampled = [pair[1] for pair in pairs]
            if filtered:
                log_probs = [float(value) for value in meta.get("output_token_sampling_logprobs") or []]
            reason = finish["type"]
        except (KeyError, TypeError) as error:
            raise EngineFailed(self.base_url, f"/generate: not an answer of /generate: {str(answer)[:300]}") from error
        if sampled != output_ids or len(log_probs) != len(sampled):
            # Token in, token out: ids and log-probs that do not line up must never reach the learner.
            known = min(len(sampled), len(log_probs))
            if reason != "abort" or sampled[:known] != output_ids[:known]:
                raise EngineFailed(
                    self.base_url, f"/generate: {len(output_ids)} output ids, log-probs for {len(sampled)} other ids"
                )
            output_ids, log_probs = sampled[:known], log_probs[:known]
        top = None
        if meta.get("output_top_logprobs"):
            positions = meta["output_top_logprobs"][: len(output_ids)]
            top = [[entry[0] for entry in position or ()] for position in positions]
        return GenerateResult(
            output_ids=output_ids,
            log_probs=log_probs,
            weight_versions=_versions(meta, len(output_ids)),
            finish_reason=reason,
            matched_stop=finish.get("matched"),
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
            top_log_probs=top,
        )


def _versions(meta: dict[str, Any], count: int) -> list[int]:
    versions = [_version(meta.get("weight_version"))] * count
    for span in meta.get("weight_versions") or ():
        start, end = span["start"], min(span["end"], count)
        versions[start:end] = [_version(span["version"])] * max(0, end - start)
    return versions


def _version(reported: Any) -> int:
    """Engines not started by us report "default": the weights they were started with, version 0."""
    try:
        return int(reported)
    except (TypeError, ValueError):
        return 0


def _message(answer: bytes) -> str:
    text = answer.decode(errors="replace")
    try:
        parsed = orjson.loads(answer)
        inner = parsed.get("error", parsed)
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (orjson.JSONDecodeError, AttributeError):
        pass
    return text[:500]
