"""Calls within the process: without a socket, from any loop and thread, and no further than the gateway."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest

from megatron_retool.config import SamplingConfig
from megatron_retool.registry import Extension
from sglang_rollout.agent.agents import task_agents
from sglang_rollout.gateway import shortcut
from sglang_rollout.gateway.in_process import GatewayClient
from sglang_rollout.task_agents.client import ClientSettings
from sglang_rollout.task_agents.function import run_function
from tests.kit.markov_policy import ANSWER, WORD
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


def plain(kind):
    """As an agent makes its client by itself."""
    return lambda client: kind(base_url=client.base_url, api_key=client.api_key, max_retries=0)


async def agent_of_the_loop(task, client, made=asynchronous):
    await made(client).chat.completions.create(**ASK)


def agent_of_a_thread(task, client, made=synchronous):
    made(client).chat.completions.create(**ASK)
    chunks = made(client).chat.completions.create(**ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def agent_of_another_loop(task, client):
    asyncio.run(agent_of_the_loop(task, client))


async def agent_with_the_runs_client(task, client):
    async with client.openai() as first, client.openai() as second:
        await first.chat.completions.create(**ASK)
    # Closing one closes none.
    await second.with_options(timeout=60).chat.completions.create(**ASK)


async def plain_agent_of_the_loop(task, client):
    await agent_of_the_loop(task, client, plain(openai.AsyncOpenAI))


def plain_agent_of_a_thread(task, client):
    agent_of_a_thread(task, client, plain(openai.OpenAI))


def plain_agent_of_another_loop(task, client):
    asyncio.run(plain_agent_of_the_loop(task, client))


async def agent_that_would_stop_the_loop(task, client):
    synchronous(client).chat.completions.create(**ASK)


async def plain_agent_that_would_stop_the_loop(task, client):
    await asyncio.sleep(0)
    plain(openai.OpenAI)(client).chat.completions.create(**ASK)


async def end_of(at, agent):
    shortcut.install()
    run: Extension = task_agents.bind(f"{__name__}:{agent.__name__}", {})
    with shortcut.leads_to(at.gateway.transport):
        return await run_function(run, {}, settings(at), lambda: 60.0)


def refused(*arguments, **keywords):
    raise OSError("a socket or a file")


@pytest.mark.parametrize(
    "agent",
    [
        agent_of_the_loop,
        agent_of_a_thread,
        agent_of_another_loop,
        agent_with_the_runs_client,
        plain_agent_of_the_loop,
        plain_agent_of_a_thread,
        plain_agent_of_another_loop,
    ],
)
def test_no_socket_is_used_and_no_certificate_read(tokenizer, monkeypatch, agent):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            for name in ("connect", "connect_ex", "accept"):
                monkeypatch.setattr(socket.socket, name, refused)
            monkeypatch.setattr(ssl, "create_default_context", refused)
            with pytest.raises(openai.APIConnectionError):
                await at.client.chat.completions.create(**ASK)
            end = await end_of(at, agent)
            assert end.outcome == "finished", end
            monkeypatch.undo()
            assert at.session.segments()

    asyncio.run(run())


@pytest.mark.parametrize("agent", [agent_that_would_stop_the_loop, plain_agent_that_would_stop_the_loop])
def test_a_synchronous_client_in_the_loop_is_refused_and_not_waited_for(tokenizer, agent):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            end = await end_of(at, agent)
            assert end.outcome == "crash" and "use AsyncOpenAI, or make the agent a plain function" in end.message
            assert at.gateway.statistics.errors == {"synchronous_client": 1} and not at.script.requests

    asyncio.run(run())


def test_the_shortcut_ends_with_its_gateway_and_leads_to_no_other_server(tokenizer):
    async def run():
        shortcut.install()
        async with served(tokenizer, [ANSWER + END]) as at, served(tokenizer, [WORD + END]) as other:
            http = httpx.AsyncClient(timeout=None)
            both = [f"{each.session.base_url}/models" for each in (at, other)]
            with shortcut.leads_to(at.gateway.transport):
                answers = [await http.get(url) for url in both]
            answers.append(await http.get(both[0]))
            assert [answer.status_code for answer in answers] == [200] * 3
            # A server names itself where there is a socket.
            assert ["server" in answer.headers for answer in answers] == [False, True, True]
            await http.aclose()

            def synchronous_ones():
                with httpx.Client() as client:
                    with shortcut.leads_to(at.gateway.transport):
                        found = [client.get(url) for url in both]
                    found.append(client.get(both[0]))
                return ["server" in answer.headers for answer in found]

            assert await asyncio.to_thread(synchronous_ones) == [False, True, True]

    asyncio.run(run())


def test_the_runs_clients_are_each_of_their_own_session(tokenizer):
    """Also where one was used before another is made, and the resources that it keeps were made with it."""

    async def run():
        async with served(tokenizer, [WORD + END]) as at:
            sessions = [at.gateway.open_session(SamplingConfig(), limits=at.session.settings.limits) for _ in range(3)]
            clients = []
            for session in sessions:
                settings = ClientSettings(
                    session.base_url, session.anthropic_base_url, session.key, at.gateway.transport
                )
                clients.append(settings.openai())
                await clients[-1].chat.completions.create(**ASK)
            for client, times in zip(clients, (1, 2, 3), strict=True):
                for _ in range(times):
                    await client.post("/chat/completions", body=ASK, cast_to=object)
                assert str(client._prepare_url("models")) == f"{at.gateway.transport.root_url}/v1/models"
            assert [len(session._tree) for session in sessions] == [2, 3, 4] and len(at.session._tree) == 0
            await sessions[0].close()
            with pytest.raises(openai.NotFoundError):
                await clients[0].chat.completions.create(**ASK)
            await clients[1].chat.completions.create(**ASK)

    asyncio.run(run())


def test_tools_that_are_not_there_are_told(tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END]) as at:
            call = {"id": "1", "type": "function", "function": {"name": "x", "arguments": "{}"}}

            async def ask():
                with pytest.raises(httpx.HTTPStatusError, match="tools") as raised:
                    await settings(at).call_tool(call)
                assert raised.value.response.status_code == 404

            await ask()
            await asyncio.to_thread(lambda: asyncio.run(ask()))

    asyncio.run(run())


@pytest.mark.parametrize("kind", [httpx.AsyncHTTPTransport, httpx.HTTPTransport])
def test_certificates_that_are_named_are_read_at_once(kind, tmp_path):
    shortcut.install()
    mine = getattr(httpx, kind.__name__)
    assert issubclass(mine, kind)
    with pytest.raises(FileNotFoundError):
        mine(verify=str(tmp_path / "no_such_file"))
    assert "_pool" not in vars(mine()) and "_pool" in vars(mine(verify=False))
    assert not hasattr(mine(), "_port")


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
                with pytest.raises(httpx.ConnectError, match="leads only to the gateway"):
                    await http.get("http://127.0.0.1:1/v1/models")
            with pytest.raises(RuntimeError, match="closed"):
                await http.get(f"{client.base_url}/models")
        with pytest.raises(openai.NotFoundError):
            await asynchronous(client).chat.completions.create(**ASK)
        return client

    client = asyncio.run(run())
    with client.sync_http_client() as http, pytest.raises(httpx.ConnectError, match="the gateway has ended"):
        http.get(f"{client.base_url}/models")


MODULE = """
from openai import AsyncOpenAI

FOR_ALL_ROLLOUTS = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="none")


async def run(task, client):
    openai = FOR_ALL_ROLLOUTS.with_options(base_url=client.base_url, api_key=client.api_key)
"""
CHECKED = """
import sys
from megatron_retool.config import load_config
from megatron_retool.cluster.checks import check_extensions
from sglang_rollout.agent.agents import agents

config = load_config(None, [f"rollout.agent={sys.argv[1]}:run"])
check_extensions(config)
made = agents.load(config.rollout.agent).__globals__["FOR_ALL_ROLLOUTS"]
print(type(made._client._transport).__name__)
"""


def test_a_client_of_the_agents_module_is_made_when_the_shortcut_is_there(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(MODULE)
    done = subprocess.run([sys.executable, "-c", CHECKED, path], capture_output=True, text=True)
    assert done.stdout.strip() == "AsyncShortcut", done


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
    mine = GatewayClient(Nowhere())
    theirs = httpx.AsyncClient(transport=Nowhere(), timeout=None)
    assert seen(mine.build_request("POST", url, **arguments)) == seen(theirs.build_request("POST", url, **arguments))


def test_a_relative_address_goes_to_the_clients_base_url() -> None:
    client = GatewayClient(Nowhere())
    client.base_url = httpx.URL("http://127.0.0.1:8000/v1/")
    assert str(client.build_request("POST", "models", json={}).url) == "http://127.0.0.1:8000/v1/models"
