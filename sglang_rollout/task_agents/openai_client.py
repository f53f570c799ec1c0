"""``openai``'s client for the rollouts of one gateway, made once.

Making a client, with one of httpx's in it, and finding out what it tells servers of the machine takes as much time as
a call of the gateway. Here rollouts differ only by their key: it finds the session where an address names none.
"""

from __future__ import annotations

import copy
import functools

import httpx
from openai import AsyncOpenAI

from sglang_rollout.gateway.in_process import GatewayClient, GatewayTransport


def client_of_session(gateway: GatewayTransport, key: str) -> AsyncOpenAI:
    """The client of the session with ``key``, for any event loop. Closing it closes nothing."""
    # The first is not used: the resources that a client keeps (client.chat) would lead the copies to its session.
    client = copy.copy(_of_gateway(gateway))
    client.api_key = key
    return client


class _Client(AsyncOpenAI):
    def _prepare_url(self, url: str) -> httpx.URL:
        return _joined(self.base_url, url)


class _HttpClient(GatewayClient):
    async def aclose(self) -> None:
        """Nothing: other rollouts use it."""


@functools.lru_cache(maxsize=2)
def _of_gateway(gateway: GatewayTransport) -> _Client:
    made = _Client(base_url=f"{gateway.root_url}/v1", api_key="of a session", http_client=_HttpClient(gateway))
    # Told to the gateway alone. Else each copy's first call would ask a thread for it, all that begin together at once.
    made._platform = "Linux"
    return made


@functools.lru_cache(maxsize=64)
def _joined(base_url: httpx.URL, path: str) -> httpx.URL:
    return base_url.join(path.lstrip("/"))
