"""Requests to search services and to pages of the web: limits, a pace, retries, and no way into private networks."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from megatron_retool.config import SearchServiceConfig
from tools.search.backends import SearchError
from untrusted import retry_after_seconds

logger = logging.getLogger(__name__)

_RETRIED_STATUS = {408, 429, 500, 502, 503, 504}
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.5, 30.0
_CHUNK_BYTES = 65536
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class FetchedAnswer:
    """What a server sent. ``truncated``: the body had more than the bytes that were asked for."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    truncated: bool


class PrivateAddress(OSError):
    """A host's name leads to an address that is not public."""


class HttpClient:
    """Sends requests one attempt after the other, never more of them a second than ``settings`` allow.

    Redirections are answers: the caller follows them or not. Proxies and .netrc of the environment are not used.
    """

    def __init__(self, settings: SearchServiceConfig) -> None:
        self._settings = settings
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_start = 0.0
        self.counts: Counter[str] = Counter()
        """requests (attempts), retries and failures."""

    async def request(
        self,
        method: str,
        url: URL,
        *,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        public_only: bool = False,
    ) -> FetchedAnswer:
        """The first answer that is not a passing failure, or the last of these.

        Args:
            body: sent as JSON; None: nothing is.
            public_only: connect only to public addresses, whatever the host's name leads to.

        Raises:
            SearchError: no answer, or a private address.
        """
        for attempt in range(self._settings.retries + 1):
            last = attempt == self._settings.retries
            if attempt:
                self.counts["retries"] += 1
            await self._turn()
            wait = 0.0
            try:
                answer = await self._attempt(method, url, max_bytes, headers, params, body, public_only)
                if answer.status not in _RETRIED_STATUS:
                    return answer
                if last:
                    return answer
                wait = retry_after_seconds(answer.headers.get("Retry-After"), _LONGEST_DELAY_SECONDS)
            except TimeoutError:
                if last:
                    reason = f"no answer within {self._settings.timeout_seconds:g} s"
                    raise self._failed(url, reason, timed_out=True) from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                if isinstance(getattr(error, "os_error", error), PrivateAddress):
                    raise SearchError("the address is not public") from error
                if last or isinstance(error, (aiohttp.InvalidURL, ValueError)):
                    raise self._failed(url, f"no connection ({type(error).__name__})") from error
            delay = min(_FIRST_DELAY_SECONDS * 2**attempt, _LONGEST_DELAY_SECONDS)
            await asyncio.sleep(max(delay * random.uniform(0.5, 1.0), wait))
        raise AssertionError

    async def close(self) -> None:
        """Close all connections."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def _attempt(
        self,
        method: str,
        url: URL,
        max_bytes: int,
        headers: Mapping[str, str] | None,
        params: Mapping[str, str] | None,
        body: Any,
        public_only: bool,
    ) -> FetchedAnswer:
        self.counts["requests"] += 1
        content = bytearray()
        session = self._session(public_only)
        async with session.request(
            method, url, headers=headers, params=params, json=body, allow_redirects=False
        ) as response:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                content += chunk
                if len(content) > max_bytes:
                    break
            return FetchedAnswer(
                response.status, response.headers, bytes(content[:max_bytes]), len(content) > max_bytes
            )

    def _session(self, public_only: bool) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._sessions, self._loop = {}, loop
        session = self._sessions.get(public_only)
        if session is None:
            session = self._sessions[public_only] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=PublicResolver() if public_only else None),
                timeout=aiohttp.ClientTimeout(total=self._settings.timeout_seconds),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "megatron-retool"},
            )
        return session

    async def _turn(self) -> None:
        """Wait until the next request may start."""
        rate = self._settings.requests_per_second
        if rate is not None:
            start = max(time.monotonic(), self._next_start)
            self._next_start = start + 1.0 / rate
            await asyncio.sleep(start - time.monotonic())

    def _failed(self, url: URL, reason: str, timed_out: bool = False) -> SearchError:
        self.counts["failures"] += 1
        logger.warning("%s: %s", url.origin(), reason)
        return SearchError(reason, timed_out)


class PublicResolver(AbstractResolver):
    """Names to addresses, refusing a name with any address that is not public.

    It is asked for the addresses that are then connected to, so a name cannot be checked with one and used with
    another. Hosts that are addresses themselves never come here: ``require_public_host``.
    """

    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The host's addresses.

        Raises:
            PrivateAddress: one of them is not public.
        """
        result = await self._resolver.resolve(host, port, family)
        if not all(is_public(each["host"]) for each in result):
            raise PrivateAddress(f"{host} is not public")
        return result

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


def require_public_host(host: str) -> None:
    """Raise SearchError where ``host`` is an address that is not public, or an address in an unusual form."""
    try:
        public = is_public(host)
    except ValueError:
        # Not an address, or one of the short forms that the C library would read as one (127.1, 2130706433).
        public = not host.replace(".", "").isdigit()
    if not public:
        raise SearchError("the address is not public")


def is_public(address: str) -> bool:
    """Whether anybody may reach it: no private, loopback, link-local, shared, multicast or reserved address, also not
    one that an IPv6 address stands for.

    Raises:
        ValueError: it is no IP address.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)
