"""Faults on the wire, against a server that misbehaves on purpose. That the real server works is test_real_engine's."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megatron_retool.config import SamplingConfig
from sglang_rollout.engine.base import (
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
    StopConditions,
)
from sglang_rollout.engine.client import SGLangClient


def answer(ids=(7, 8), log_probs=(-0.1, -0.2), reason="stop", **meta):
    return {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": reason, "matched": ids[-1] if ids else None},
            "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, ids, strict=False)],
            "weight_version": "3",
            **meta,
        },
    }


class Server:
    """/generate runs ``behaviour(count of requests so far)``; /abort_request is recorded."""

    def __init__(self, behaviour) -> None:
        self.behaviour = behaviour
        self.bodies: list[dict] = []
        self.aborted: list[str] = []

    async def generate(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return await self.behaviour(len(self.bodies) - 1, request)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


def generate(behaviour, *, retries=3, timeout=5.0, request=None, routing=None, **kwargs):
    async def scenario():
        server = Server(behaviour)
        async with (
            server.running() as url,
            SGLangClient(url, retries=retries, timeout_seconds=timeout, routing=routing) as client,
        ):
            try:
                result = await client.generate(request or GenerateRequest([1, 2], 5, SamplingConfig()), **kwargs)
            except Exception as error:
                result = error
        return server, result

    return asyncio.run(scenario())


async def dropped(request: web.Request) -> web.Response:
    request.transport.abort()
    return web.Response()


def test_the_request_carries_ids_and_sampling_parameters():
    async def behaviour(count, request):
        return web.json_response(answer())

    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1)
    request = GenerateRequest([1, 2, 3], 9, sampling, StopConditions((5,), ("</code>",)), seed=11, top_log_probs=4)
    server, result = generate(behaviour, request=request)
    body = server.bodies[0]
    assert body["input_ids"] == [1, 2, 3] and body["return_logprob"] is True and body["top_logprobs_num"] == 4
    assert body["sampling_params"] == {
        "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "stop_token_ids": [5],
        "stop": ["</code>"], "sampling_seed": 11, "skip_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    assert (result.output_ids, result.log_probs, result.weight_versions) == ([7, 8], [-0.1, -0.2], [3, 3])


def test_a_dropped_connection_is_retried_under_a_new_id_and_nothing_is_duplicated():
    async def behaviour(count, request):
        return await dropped(request) if count < 2 else web.json_response(answer())

    seen = []
    server, result = generate(behaviour, on_start=seen.append)
    assert result.output_ids == [7, 8]
    assert [body["rid"] for body in server.bodies] == seen and len(set(seen)) == 3
    assert server.aborted == seen[:2]


def test_a_server_that_stays_away_is_unavailable_and_named():
    async def behaviour(count, request):
        return await dropped(request)

    server, error = generate(behaviour, retries=1)
    assert isinstance(error, EngineUnavailable) and error.engine in str(error)
    assert len(server.bodies) == 2


def test_nobody_listening():
    async def scenario():
        async with SGLangClient("http://127.0.0.1:9", retries=1) as client:
            await client.weight_version()

    with pytest.raises(EngineUnavailable, match="127.0.0.1:9"):
        asyncio.run(scenario())


def test_a_slow_answer_is_a_timeout_and_the_request_is_aborted():
    async def behaviour(count, request):
        await asyncio.sleep(1)
        return web.json_response(answer())

    server, error = generate(behaviour, timeout=0.2)
    assert isinstance(error, EngineTimeout)
    assert server.aborted == [server.bodies[0]["rid"]]
    assert len(server.bodies) == 1


def test_cancellation_aborts_the_request():
    async def scenario():
        async def behaviour(count, request):
            await asyncio.sleep(1)
            return web.json_response(answer())

        server = Server(behaviour)
        async with server.running() as url, SGLangClient(url) as client:
            task = asyncio.create_task(client.generate(GenerateRequest([1], 5, SamplingConfig())))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return server

    server = asyncio.run(scenario())
    assert server.aborted == [server.bodies[0]["rid"]]


@pytest.mark.parametrize(("status", "kind"), [(400, EngineRejected), (422, EngineRejected), (500, EngineFailed)])
def test_http_errors_are_typed_and_quoted(status, kind):
    async def behaviour(count, request):
        return web.json_response({"error": {"message": "input is too long"}}, status=status)

    server, error = generate(behaviour)
    assert type(error) is kind and "input is too long" in str(error)
    assert len(server.bodies) == 1


def test_an_answer_that_says_no_success_is_a_refusal():
    async def behaviour(count, request):
        return web.json_response({"success": False, "message": "the group is unknown"})

    _, error = generate(behaviour)
    assert isinstance(error, EngineRejected) and error.reason == "the group is unknown"


@pytest.mark.parametrize(
    "body",
    [
        {"unexpected": 1},
        "text",
        answer(ids=(7, 8), log_probs=(-0.1,)),
        {**answer(), "output_ids": [7, 9]},
    ],
)
def test_an_answer_whose_ids_and_log_probs_disagree_never_gets_through(body):
    async def behaviour(count, request):
        return web.Response(text=json.dumps(body), content_type="application/json")

    _, error = generate(behaviour)
    assert isinstance(error, EngineFailed)


def test_weight_versions_follow_the_spans():
    async def behaviour(count, request):
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
        return web.json_response(answer(weight_versions=spans, weight_version="4"))

    assert generate(behaviour)[1].weight_versions == [3, 4]


def test_an_engine_that_does_not_number_its_weights_serves_version_0():
    async def behaviour(count, request):
        return web.json_response(answer(weight_version="default"))

    assert generate(behaviour)[1].weight_versions == [0, 0]
