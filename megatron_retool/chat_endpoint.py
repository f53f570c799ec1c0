"""A client of OpenAI-compatible chat completions that gives up late and says why."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from megatron_retool.errors import InputError, OperationError
from untrusted import load_json, retry_after_seconds

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_ABOUT_THE_REQUEST = {400, 413, 422}
_LONGEST_DELAY_SECONDS = 60.0
_MOST_BYTES = 16 * 2**20
"""Of one answer."""


class EndpointRefusal(Exception):
    """This request will not be answered, others may: it is too long, or breaks a rule of the endpoint's."""


class EndpointSilence(OperationError):
    """No answer after all retries."""


class EndpointError(InputError):
    """No request will be answered: key, URL or model are wrong. The message names the setting."""


@dataclass(frozen=True)
class ChatReply:
    """What a model answered.

    Attributes:
        finish_reason: as the endpoint says: stop, or length where it was cut off.
        prompt_tokens, completion_tokens: as the endpoint counts them; 0 where it does not.
    """

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatEndpoint:
    """Asks ``url``/chat/completions. Use as an asynchronous context manager.

    Args:
        url: the API's base, such as http://localhost:30000/v1.
        model: as the endpoint knows it.
        key: sent as a bearer token; None: none is sent.
        sampling: further fields of each request, such as temperature.
        retries: after the first attempt, for what may pass: no connection, a time-out, too many requests, a fault of
            the server's.
        timeout_seconds: for one attempt.
        first_delay_seconds: mean pause before the first retry; each further one is twice as long, up to a minute, or as
            long as the endpoint's Retry-After.
        key_setting, address_settings: what a message names where the key, or the URL or model, is wrong.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        sampling: dict[str, Any] | None = None,
        retries: int = 6,
        timeout_seconds: float = 600.0,
        first_delay_seconds: float = 1.0,
        key_setting: str = "the key that --key-variable names",
        address_settings: str = "--url and --model",
    ) -> None:
        self.url = f"{url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        self.model = model
        self._sampling = sampling or {}
        self._retries, self._first_delay = retries, first_delay_seconds
        self._key_setting, self._address_settings = key_setting, address_settings
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatEndpoint:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, prompt: str, **sampling: Any) -> ChatReply:
        """The model's answer to one user message; ``sampling`` are further fields of this request.

        Raises:
            EndpointRefusal, EndpointSilence, EndpointError: see there.
        """
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], **self._sampling}
        body |= sampling
        delay, wait, reason = self._first_delay, 0.0, ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(max(wait, delay * random.uniform(0.5, 1.5)))
                delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
            reply, reason, wait = await self._attempt(body)
            if reply is not None:
                return reply
        raise EndpointSilence(f"{self.url}: {reason}; gave up after {self._retries + 1} attempts")

    async def _attempt(self, body: dict[str, Any]) -> tuple[ChatReply | None, str, float]:
        """The reply, or why there is none and the seconds that the endpoint wants to be left alone."""
        assert self._session is not None
        try:
            async with self._session.post(self.url, json=body) as response:
                status = response.status
                wait = retry_after_seconds(response.headers.get("Retry-After"), _LONGEST_DELAY_SECONDS)
                content = await _bounded(response)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return None, f"{type(error).__name__}: {error}".rstrip(": "), 0.0
        if status >= 300:
            said = " ".join(content.decode(errors="replace").split())[:300]
            return None, self._failure(status, said), wait
        try:
            return _reply(load_json(content)), "", 0.0
        except ValueError as error:
            return None, f"no chat completion: {error}", 0.0

    def _failure(self, status: int, text: str) -> str:
        """What a status that may pass means; the others are raised."""
        said = f"HTTP {status}" + (f": {text}" if text else "")
        if status in _RETRIED or status > 504:
            return said
        if status in _ABOUT_THE_REQUEST:
            raise EndpointRefusal(said)
        cure = self._key_setting if status in (401, 403) else self._address_settings
        raise EndpointError(f"{self.url}: {said}: check {cure}")


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The body, as far as an answer may reach; what is cut off is no JSON."""
    content = bytearray()
    async for part in response.content.iter_chunked(2**16):
        content += part
        if len(content) > _MOST_BYTES:
            break
    return bytes(content)


def _reply(body: Any) -> ChatReply:
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] or ""
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{body!r:.200}") from error
    if not isinstance(text, str):
        raise ValueError(f"content is {text!r:.100}")
    usage = body.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    tokens = (_count(counted.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    return ChatReply(text, str(choice.get("finish_reason") or "stop"), *tokens)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0
