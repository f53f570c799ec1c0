"""httpx's way to the gateway of this process, without a socket.

| client | belongs to |
|---|---|
| ``GatewayClient(transport)`` | a coroutine, of the gateway's event loop or another one |
| ``httpx.Client(transport=transport)`` | a thread |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from sglang_rollout.gateway.api import Api, ApiRequest, BodyTooLong, Reply
from sglang_rollout.gateway.errors import ApiError

_STOPS_THE_LOOP = ApiError(
    400,
    "a synchronous client would stop the run's event loop, for all rollouts: use AsyncOpenAI, or make the agent a "
    "plain function, which has a thread of its own",
    code="synchronous_client",
)


class GatewayTransport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """Gives the requests of httpx's clients to ``api``; any number of clients may share it.

    Asynchronous clients of the gateway's event loop are answered in the task that asks, those of other loops and
    synchronous ones, of threads, hand their requests over to it. Who is cancelled or out of time (the client's read
    timeout) ends the call, as a client does that closes its connection. A stream comes in one piece.

    Args:
        root_url: of the gateway. A request for any other server is refused with ``httpx.ConnectError``.
        loop: the gateway's.

    Attributes:
        netloc: the host and port in it.
    """

    def __init__(self, api: Api, root_url: str, loop: asyncio.AbstractEventLoop) -> None:
        self._api = api
        self.root_url, self.netloc = root_url, httpx.URL(root_url).netloc
        self._loop = loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request on the event loop, without a socket.

        Raises:
            httpx.ReadTimeout: the answer takes longer than the request allows.
        """
        asked = self._read(request, await request.aread())
        try:
            async with asyncio.timeout(_seconds(request)):
                return _response(await self._answer(asked))
        except TimeoutError as error:
            raise _out_of_time(request) from error

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of another thread, without a socket; one of the event loop's own thread is refused.

        Raises:
            httpx.ReadTimeout: the answer takes longer than the request allows.
        """
        if _running_loop() is self._loop:  # waiting would stop the loop that is to give the answer
            return _response(self._api.refusal(request.url.path, _STOPS_THE_LOOP))
        future = self._handed_over(self._read(request, request.read()))
        try:
            return _response(future.result(_seconds(request)))
        except TimeoutError as error:
            future.cancel()
            raise _out_of_time(request) from error

    async def post(self, path: str, key: str, body: Mapping[str, Any]) -> Any:
        """What a call of ``path`` with ``key`` and ``body`` as JSON is answered, without httpx.

        Raises:
            httpx.HTTPStatusError: the answer is an error, whose message it tells.
        """
        sent = json.dumps(dict(body)).encode()
        reply = await self._answer(ApiRequest("POST", path, {"authorization": f"Bearer {key}"}, _reader(sent)))
        assert isinstance(reply.body, bytes)
        answer = json.loads(reply.body)
        if reply.status != 200:
            request = httpx.Request("POST", f"{self.root_url}{path}", content=sent)
            raise httpx.HTTPStatusError(answer["error"]["message"], request=request, response=_response(reply))
        return answer

    async def _answer(self, asked: ApiRequest) -> Reply:
        if _running_loop() is self._loop:
            return await self._api.answer(asked)
        return await asyncio.wrap_future(self._handed_over(asked))

    def _handed_over(self, asked: ApiRequest) -> concurrent.futures.Future[Reply]:
        answer = self._api.answer(asked)
        try:
            return asyncio.run_coroutine_threadsafe(answer, self._loop)
        except RuntimeError as error:
            answer.close()
            raise httpx.ConnectError(f"{self.root_url}: the gateway has ended") from error

    def _read(self, request: httpx.Request, body: bytes) -> ApiRequest:
        if request.url.netloc != self.netloc:
            raise httpx.ConnectError(f"{request.url}: this client leads only to the gateway", request=request)
        return ApiRequest(request.method, request.url.path, request.headers, _reader(body))


class GatewayClient(httpx.AsyncClient):
    """An asynchronous client of only the gateway, which waits for an answer as long as it takes.

    There are no cookies, redirects and log-ins on this way, which httpx looks for longer than all else that it does.
    """

    def __init__(self, transport: GatewayTransport) -> None:
        super().__init__(transport=transport, timeout=None)

    def build_request(
        self,
        method: str,
        url: httpx.URL | str,
        *,
        json: Any = None,
        headers: Any = None,
        timeout: Any = httpx.USE_CLIENT_DEFAULT,
        **rest: Any,
    ) -> httpx.Request:
        """As ``httpx.AsyncClient.build_request``, of JSON without the headers that name this client to a server."""
        whole = httpx.URL(url)
        if json is None or whole.is_relative_url or any(value for value in rest.values()):
            return super().build_request(method, url, json=json, headers=headers, timeout=timeout, **rest)
        limits = self.timeout if timeout is httpx.USE_CLIENT_DEFAULT else httpx.Timeout(timeout)
        return httpx.Request(method, whole, headers=headers, json=json, extensions={"timeout": limits.as_dict()})

    async def send(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: Any = httpx.USE_CLIENT_DEFAULT,
        follow_redirects: Any = httpx.USE_CLIENT_DEFAULT,
    ) -> httpx.Response:
        """As ``httpx.AsyncClient.send``."""
        if self.is_closed or auth is not httpx.USE_CLIENT_DEFAULT:
            return await super().send(request, stream=stream, auth=auth, follow_redirects=follow_redirects)
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _reader(body: bytes) -> Callable[[int], Awaitable[bytes]]:
    async def read(most: int) -> bytes:
        if len(body) > most:
            raise BodyTooLong
        return body

    return read


def _seconds(request: httpx.Request) -> float | None:
    return request.extensions.get("timeout", {}).get("read")


def _out_of_time(request: httpx.Request) -> httpx.ReadTimeout:
    return httpx.ReadTimeout("the gateway did not answer in time", request=request)


def _response(reply: Reply) -> httpx.Response:
    body = reply.body if isinstance(reply.body, bytes) else b"".join(reply.body)
    return httpx.Response(reply.status, headers=reply.headers, content=body)
