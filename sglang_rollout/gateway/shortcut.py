"""Agents' own clients of httpx, led to the gateway of their process without a socket.

An agent that is a function makes its client as anywhere else, ``AsyncOpenAI(base_url=…, api_key=…)``, for each rollout
again. By a socket that costs the driver, which all agents share, 3 ms a rollout, and reading the machine's certificates
for a client that never needs them 10 to 20 ms more.

From ``install`` on, what httpx's clients of this process are made with (``httpx.HTTPTransport``,
``httpx.AsyncHTTPTransport``) gives requests for a gateway that ``leads_to`` names to its functions; all others go to
the network. Certificates are read when the first of those does. Clients that were made before, and those of other
libraries than httpx, keep to the socket, where answers are the same.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import httpx

from sglang_rollout.gateway.in_process import GatewayTransport

_GATEWAYS: dict[bytes, GatewayTransport] = {}
_MAKING = threading.Lock()


@contextlib.contextmanager
def leads_to(gateway: GatewayTransport) -> Iterator[None]:
    """Within it, requests for ``gateway`` need no socket."""
    _GATEWAYS[gateway.netloc] = gateway
    try:
        yield
    finally:
        del _GATEWAYS[gateway.netloc]


@functools.cache
def install() -> None:
    """Have clients that are made from now on take the shortcut."""
    # httpx's clients look there for what they are made with; other libraries look in the package.
    for module in (httpx, httpx._client):
        setattr(module, "AsyncHTTPTransport", AsyncShortcut)  # noqa: B010
        setattr(module, "HTTPTransport", Shortcut)  # noqa: B010


class _ConnectsLate:
    """Makes the pool of connections, and reads certificates for it, when something asks for it."""

    _make: Callable[[], None]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._make = functools.partial(super().__init__, *arguments, **keywords)
        if arguments or keywords.get("verify", True) is not True or keywords.get("cert") is not None:
            self._make()  # whose certificates may be wrong, which is told to who gives them

    def __getattr__(self, name: str) -> Any:
        if name != "_pool":
            raise AttributeError(name)
        with _MAKING:
            if "_pool" not in vars(self):
                self._make()
        return vars(self)["_pool"]


class AsyncShortcut(_ConnectsLate, httpx.AsyncHTTPTransport):
    """Of asynchronous clients."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As ``httpx.AsyncHTTPTransport.handle_async_request``."""
        gateway = _GATEWAYS.get(request.url.netloc)
        if gateway is None:
            return await super().handle_async_request(request)
        return await gateway.handle_async_request(request)

    async def aclose(self) -> None:
        """As ``httpx.AsyncHTTPTransport.aclose``."""
        if "_pool" in vars(self):
            await super().aclose()

    async def __aenter__(self) -> AsyncShortcut:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()


class Shortcut(_ConnectsLate, httpx.HTTPTransport):
    """Of synchronous clients."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As ``httpx.HTTPTransport.handle_request``; an error of status 400 in the gateway's event loop, which waiting
        would stop."""
        gateway = _GATEWAYS.get(request.url.netloc)
        return super().handle_request(request) if gateway is None else gateway.handle_request(request)

    def close(self) -> None:
        """As ``httpx.HTTPTransport.close``."""
        if "_pool" in vars(self):
            super().close()

    def __enter__(self) -> Shortcut:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.close()
