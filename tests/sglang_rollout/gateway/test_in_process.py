"""Calls within the process: without a socket, from any loop and thread, and no further than the gateway."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import openai
import pytest

from megatron_retool.registry import Extension
from sglang_rollout.agent.agents import task_agents
from sglang_rollout.gateway.in_process import GatewayClient
from sglang_rollout.task_agents.client import ClientSettings
from sglang_rollout.task_agents.function import run_function
from tests.sglang_rollout.agent.markov_policy import ANSWER, WORD
from tests.sglang_rollout.gateway.test_server import END, QUESTION, served

ASK = {"model": "", "messages": QUESTION}
ADDRESS = "http://127.0.0.1:8000/sessions/a/v1/chat/completions"
NAMES_A_CLIENT = {"accept", "accept-encoding", "connection", "user-agent"}


def settings(at) -> ClientSettings:
    return ClientSettings(at.session.base_url, at.session.anthropic_base_url, at.session.key, at.gateway.transport)


def asynchronous(client: ClientSettings, **options) -> openai.AsyncOpenAI:
    http = client.http_client()
    return openai.AsyncOpenAI(
        base_url=client.base_url, api_key=client.api_key, http_client=http, max_retries=0, **options
    )


def synchronous(client: ClientSettings, **options) -> openai.OpenAI:
    http = client.sync_http_client()
    return openai.OpenAI(base_url=client.base_url, api_key=client.api_key, http_client=http, max_retries=0, **options)


async def agent_of_the_loop(task, client):
    await asynchronous(client).chat.completions.create(**ASK)


def agent_of_a_thread(task, client):
    synchronous(client).chat.completions.create(**ASK)
    chunks = synchronous(client).chat.completions.create(**ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def agent_of_another_loop(task, client):
    asyncio.run(agent_of_the_loop(task, client))


async def agent_that_would_stop_the_loop(task, client):
    synchronous(client)


async def end_of(at, agent):
    run: Extension = task_agents.bind(f"{__name__}:{agent.__name__}", {})
    return await run_function(run, {}, settings(at), lambda: 60.0)


@pytest.mark.parametrize("agent", [agent_of_the_loop, agent_of_a_thread, agent_of_another_loop])
def test_no_socket_is_used(tokenizer, monkeypatch, agent):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:

            def refused(*arguments):
                raise OSError("a socket")

            for name in ("connect", "connect_ex", "accept"):
                monkeypatch.setattr(socket.socket, name, refused)
            with pytest.raises(openai.APIConnectionError):
                await at.client.chat.completions.create(**ASK)
            end = await end_of(at, agent)
            assert end.outcome == "finished", end
            monkeypatch.undo()
            assert at.session.segments()

    asyncio.run(run())


def test_a_synchronous_client_in_the_loop_is_refused_and_not_waited_for(tokenizer):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            end = await end_of(at, agent_that_would_stop_the_loop)
            assert end.outcome == "crash" and "use AsyncOpenAI with client.http_client()" in end.message
            made = await asyncio.to_thread(synchronous, settings(at))
            with pytest.raises(openai.APIConnectionError):
                made.chat.completions.create(**ASK)

    asyncio.run(run())


def test_a_clients_own_time_limit_ends_its_call(tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END]) as at:
            at.script.held.clear()
            with pytest.raises(openai.APITimeoutError):
                await asynchronous(settings(at), timeout=0.05).chat.completions.create(**ASK)
            assert len(at.script.requests) == 1

            def ask():
                synchronous(settings(at), timeout=0.05).chat.completions.create(**ASK)

            with pytest.raises(openai.APITimeoutError):
                await asyncio.to_thread(ask)
            while at.session._running:
                await asyncio.sleep(0.01)
            assert len(at.script.requests) == 2 and at.session.segments() == []

    asyncio.run(run())


def test_a_client_leads_to_its_gateway_alone_and_ends_with_it(tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END]) as at:
            client = settings(at)
            async with client.http_client() as http:
                with pytest.raises(httpx.ConnectError, match="leads to the gateway alone"):
                    await http.get("http://127.0.0.1:1/v1/models")
            with pytest.raises(RuntimeError, match="closed"):
                await http.get(f"{client.base_url}/models")
        with pytest.raises(openai.NotFoundError):
            await asynchronous(client).chat.completions.create(**ASK)
        return client

    client = asyncio.run(run())
    with client.sync_http_client() as http, pytest.raises(httpx.ConnectError, match="the gateway has ended"):
        http.get(f"{client.base_url}/models")


class Nowhere(httpx.AsyncBaseTransport):
    pass


def seen(request: httpx.Request) -> tuple[Any, ...]:
    headers = {name: value for name, value in request.headers.items() if name not in NAMES_A_CLIENT}
    return request.method, request.url, headers, request.content, request.extensions


@pytest.mark.parametrize(
    "arguments",
    [
        {"json": {"messages": [{"role": "user", "content": "\u00e9"}]}, "headers": {"Authorization": "Bearer key"}},
        {"json": {}, "timeout": 3.0},
        {"json": [1], "timeout": httpx.Timeout(None), "params": {}},
        {"json": {"a": 1}, "params": {"b": "2"}},
        {"json": {"a": 1}, "extensions": {"trace": 1}},
        {"content": b"text"},
        {},
    ],
    ids=lambda arguments: "+".join(arguments) or "nothing",
)
@pytest.mark.parametrize("url", [ADDRESS, httpx.URL(ADDRESS)], ids=["text", "URL"])
def test_requests_are_those_of_httpx(url: httpx.URL | str, arguments: dict[str, Any]) -> None:
    mine = GatewayClient(Nowhere())  # type: ignore[arg-type]
    theirs = httpx.AsyncClient(transport=Nowhere(), timeout=None)
    assert seen(mine.build_request("POST", url, **arguments)) == seen(theirs.build_request("POST", url, **arguments))


def test_a_relative_address_goes_to_the_clients_base_url() -> None:
    client = GatewayClient(Nowhere())  # type: ignore[arg-type]
    client.base_url = httpx.URL("http://127.0.0.1:8000/v1/")
    assert str(client.build_request("POST", "models", json={}).url) == "http://127.0.0.1:8000/v1/models"
