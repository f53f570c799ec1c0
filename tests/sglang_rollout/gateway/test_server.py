"""The APIs by a socket and within the process: what clients get, what is refused and how, and what becomes of calls
that are cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from types import SimpleNamespace

import httpx
import openai
import pytest

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.engine.router import NoEngineAvailable
from sglang_rollout.gateway import api, server, shortcut
from sglang_rollout.gateway.in_process import GatewayClient
from sglang_rollout.gateway.interface import SessionLimits
from sglang_rollout.gateway.server import Gateway
from tests.kit.markov_policy import ANSWER, CALL, CALL_BROKEN, WORD
from tests.kit.scripted import Counter
from tools.tool import ToolResult

END = "<|im_end|>"
QUESTION = [{"role": "user", "content": "question"}]
FUNCTION = Counter.schema["function"]
CLAUDE_TOOL = {"name": "code_interpreter", "input_schema": FUNCTION["parameters"], "description": "Count."}


@contextlib.asynccontextmanager
async def own_client(transport):
    """As an agent makes one by itself."""
    shortcut.install()
    with shortcut.leads_to(transport):
        async with httpx.AsyncClient(timeout=None) as http:
            yield http


@pytest.fixture(params=[None, GatewayClient, own_client], ids=["socket", "in process", "shortcut"])
def way(request):
    """How calls reach the gateway: (its transport) -> httpx's client, or None for a socket."""
    return request.param


class Script:
    """Says its turns one after another; keeps the ids it was asked to continue."""

    def __init__(self, tokenizer, turns) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.requests, self.contexts = [], []
        self.held = asyncio.Event()
        self.held.set()

    async def generate(self, state, request):
        self.contexts.append([*state.prompt_ids, *state.response_ids])
        self.requests.append(request)
        await self.held.wait()
        text = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        if isinstance(text, Exception):
            raise text
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: request.max_new_tokens]
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        if any(stop in text for stop in request.stop.strings):
            reason = "stop"
        return GenerateResult(ids, [-0.25] * len(ids), [1] * len(ids), reason, cached_tokens=2)


@contextlib.asynccontextmanager
async def served(tokenizer, turns, way=None, host="127.0.0.1", stop_strings=True, **limits):
    script = Script(tokenizer, turns)
    config = MultiTurnConfig(max_tool_response_tokens=60)
    limits = SessionLimits(**{"context_length": 2000, **limits})
    async with (
        Gateway(script, tokenizer, config, host=host, stop_strings=stop_strings) as gateway,
        httpx.AsyncClient(timeout=None) if way is None else way(gateway.transport) as http,
    ):
        session = gateway.open_session(SamplingConfig(), limits=limits)
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0, http_client=http)
        async with client:
            yield SimpleNamespace(script=script, gateway=gateway, session=session, client=client, http=http)


async def post(at, path, body, headers=None):
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    url = at.session.anthropic_base_url + path
    response = await at.http.post(url, content=data, headers=headers)
    kind = response.headers["content-type"]
    assert response.headers.get("x-should-retry") == (None if response.status_code == 200 else "false")
    return response.status_code, response.text if kind.startswith("text/event-stream") else response.json()


def of_stream(text):
    """(event, data) of each server-sent event."""
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.strip().split("\n\n")]
    return [(block.get("event"), json.loads(block["data"])) for block in blocks if block["data"] != "[DONE]"]


def test_chat_completions(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD + CALL + CALL_BROKEN + END, ANSWER + END], way) as at:
            asked = {"model": "mine", "messages": QUESTION, "tools": [Counter.schema], "logprobs": True}
            whole = await at.client.chat.completions.create(**asked, seed=3)
            (choice,) = whole.choices
            good, bad = choice.message.tool_calls
            assert (choice.finish_reason, choice.message.content, whole.model) == ("tool_calls", WORD, "mine")
            assert json.loads(good.function.arguments) == {"code": "print(6*7)"} and good.id != bad.id
            assert "invalid tool call" in bad.error
            assert [token.token for token in choice.logprobs.content] == [WORD, CALL, CALL_BROKEN, END]
            assert {token.logprob for token in choice.logprobs.content} == {-0.25}
            usage = whole.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(at.script.contexts[0]), 4)
            assert usage.prompt_tokens_details.cached_tokens == 2
            # The same, streamed.
            at.script.turns = [WORD + CALL + END, ANSWER + END]
            text, arguments, finish, last = "", "", None, None
            options = {"include_usage": True}
            stream = await at.client.chat.completions.create(**asked, stream=True, stream_options=options, n=2)
            async for chunk in stream:
                for piece in chunk.choices:
                    if piece.index == 0:
                        text += piece.delta.content or ""
                        arguments += "".join(c.function.arguments for c in piece.delta.tool_calls or ())
                        finish = piece.finish_reason or finish
                last = chunk
            assert (text, json.loads(arguments)["code"], finish) == (WORD, "print(6*7)", "tool_calls")
            assert last.usage.completion_tokens == 3 + 2
            assert len(await at.session.close()) == 3

    asyncio.run(run())


def test_stop_texts_and_length(tokenizer, way):
    async def run():
        async with served(tokenizer, ["say halt now", WORD * 9], way) as at:
            stopped = await at.client.chat.completions.create(model="", messages=QUESTION, stop=["now", "halt"])
            assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("say ", "stop")
            assert set(at.script.requests[0].stop.strings) == {"halt", "now"}
            cut = await at.client.chat.completions.create(model="", messages=QUESTION, max_completion_tokens=4)
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (WORD * 4, "length")
            # The end of turn, which nobody sampled, is put in before the next message.
            history = [*QUESTION, {"role": "assistant", "content": WORD * 4}, *QUESTION]
            await at.client.chat.completions.create(model="", messages=history, max_tokens=1)
            _, segment = await at.session.close()
            assert segment.loss_mask.sum() == 5
            assert tokenizer.decode(segment.response_ids[4:6].tolist()) == END + "\n"
            assert not segment.loss_mask[4]

    asyncio.run(run())


def test_responses(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD + CALL + END, ANSWER + END], way) as at:
            tool = {"type": "function", **FUNCTION}
            asked = {"model": "mine", "instructions": "Be brief.", "tools": [tool]}
            first = await at.client.responses.create(**asked, input="question")
            message, call = first.output
            assert (message.content[0].text, call.name, first.status) == (WORD, "code_interpreter", "completed")
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
            events = []
            async with at.client.responses.stream(**asked, input=[result], previous_response_id=first.id) as stream:
                async for event in stream:
                    events.append(event.type)
                second = await stream.get_final_response()
            assert second.output_text == ANSWER
            assert events[0] == "response.created" and events[-1] == "response.completed"
            # Items instead of the id of the earlier response: the same history, so no further segment's context.
            items = [
                {"role": "user", "content": [{"type": "input_text", "text": "question"}]},
                message.model_dump(),
                call.model_dump(),
                result,
            ]
            await at.client.responses.create(**asked, input=items)
            assert at.script.contexts[1] == at.script.contexts[2]
            first_segment, again = await at.session.close()
            assert (first_segment.calls, again.calls) == ((0, 1), (2,))
            with pytest.raises(openai.NotFoundError):
                await at.client.responses.create(model="", input="more")

    asyncio.run(run())


def test_anthropic_messages(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD + CALL + END, ANSWER + END], way) as at:
            asked = {"model": "mine", "max_tokens": 50, "system": "Be brief.", "tools": [CLAUDE_TOOL]}
            status, first = await post(at, "/v1/messages", {**asked, "messages": QUESTION})
            assert (status, first["stop_reason"], first["role"]) == (200, "tool_use", "assistant")
            said, use = first["content"]
            assert (said["text"], use["name"], use["input"]) == (WORD, "code_interpreter", {"code": "print(6*7)"})
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "42"}]}
            history = [
                *QUESTION,
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [result]},
            ]
            _, text = await post(at, "/v1/messages", {**asked, "messages": history, "stream": True})
            events = of_stream(text)
            assert all(name == event["type"] for name, event in events)
            assert [name for name, _ in events] == [
                "message_start",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
            assert events[2][1]["delta"]["text"] == ANSWER and events[4][1]["delta"]["stop_reason"] == "end_turn"
            (segment,) = await at.session.close()
            assert segment.turn_ids.max() == 1

    asyncio.run(run())


def test_a_streamed_call_of_a_tool_in_anthropics_form(tokenizer, way):
    async def run():
        async with served(tokenizer, [CALL + CALL_BROKEN + END], way) as at:
            _, text = await post(at, "/v1/messages", {"max_tokens": 9, "messages": QUESTION, "stream": True})
            written = {}
            for name, event in of_stream(text):
                if name == "content_block_delta":
                    written[event["index"]] = written.get(event["index"], "") + event["delta"]["partial_json"]
            assert json.loads(written[0]) == {"code": "print(6*7)"} and list(json.loads(written[1])) == ["malformed"]

    asyncio.run(run())


USER = {"role": "user", "content": "x"}
BAD = [
    ("/v1/chat/completions", "{", "body"),
    ("/v1/chat/completions", "[]", "body"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": ["x"]}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ("/v1/chat/completions", {"messages": [USER], "n": 0}, "n"),
    ("/v1/chat/completions", {"messages": [USER], "n": 999}, "n"),
    ("/v1/chat/completions", {"messages": [USER], "temperature": "hot"}, "temperature"),
    ("/v1/chat/completions", {"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [USER], "stop": ["a", ""]}, "stop"),
    ("/v1/chat/completions", {"messages": [USER], "seed": 1.5}, "seed"),
    ("/v1/chat/completions", {"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
    ("/v1/chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/responses", {}, "input"),
    ("/v1/responses", {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ("/v1/messages", {"messages": [USER]}, "max_tokens"),
    ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("/v1/messages", {"max_tokens": 5, "messages": [USER, {"role": "assistant", "content": "x"}]}, "messages"),
    ("/v1/messages", {"max_tokens": 5, "messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice"),
]


def test_malformed_requests_are_told_the_field(tokenizer, way):
    async def run():
        async with served(tokenizer, [ANSWER + END], way) as at:
            for path, body, field in BAD:
                status, answer = await post(at, path, body)
                error = answer["error"]
                assert status == 400 and error["type"] == "invalid_request_error", (body, answer)
                assert field in error["message"].split()[0].rstrip(":"), (body, answer)
                assert path == "/v1/messages" or error["param"] == field
            assert not at.script.requests and sum(at.gateway.statistics.errors.values()) == len(BAD)

    asyncio.run(run())


@pytest.mark.parametrize("characters", [200, 200_000])
def test_a_stream_whose_context_overflows(tokenizer, way, characters):
    """Responses tells it by an event, as its clients expect; the other APIs by status 400 before the stream."""

    async def run():
        async with served(tokenizer, [WORD + END], way, context_length=120) as at:
            long = "x" * characters
            streams = {"Accept": "text/event-stream"}
            status, text = await post(at, "/v1/responses", {"model": "m", "input": long, "stream": True}, streams)
            events = of_stream(text)
            names = ["response.created", "response.in_progress", "response.failed"]
            assert status == 200 and [event for event, _ in events] == names
            assert [data["sequence_number"] for _, data in events] == [0, 1, 2]
            failed = events[-1][1]["response"]
            assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
            assert "maximum context length is 120 tokens" in failed["error"]["message"] and at.session.overflowed
            asked = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": long}]}
            for path in ("/v1/chat/completions", "/v1/messages"):
                assert (await post(at, path, asked, streams))[0] == 400
            assert (await post(at, "/v1/responses", {"model": "m", "input": long}))[0] == 400
            assert at.gateway.statistics.errors == {"context_length_exceeded": 4}

    asyncio.run(run())


def test_limits_and_dead_sessions(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD * 20 + END], way, context_length=120, max_calls=2) as at:
            create = at.client.chat.completions.create
            with pytest.raises(openai.APIStatusError) as raised:
                await create(model="", messages=[{"role": "user", "content": "x" * 200}])
            error = raised.value
            assert (error.status_code, error.code) == (400, "context_length_exceeded")
            said = r"maximum context length is (\d+) tokens. However, your messages resulted in (\d+) tokens"
            limit, tokens = map(int, re.search(said, error.message).groups())
            assert tokens > 200 and limit == 120 and "context_length" in error.message
            await create(model="", messages=QUESTION, n=2)
            with pytest.raises(openai.RateLimitError) as raised:
                await create(model="", messages=QUESTION)
            assert raised.value.code == "max_calls"
            await at.session.close()
            with pytest.raises(openai.NotFoundError):
                await create(model="", messages=QUESTION)
            status, answer = await post(at, "/v1/messages", {})
            assert (status, answer["error"]["type"]) == (404, "not_found_error")
            assert at.gateway.statistics.errors == {"context_length_exceeded": 1, "max_calls": 1, "not_found": 2}
            assert at.gateway.open_sessions == 0

    asyncio.run(run())


def test_sampled_tokens_time_and_stop_texts_are_limits_too(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD * 20 + END], way, max_sampled_tokens=5, stop_strings=False) as at:
            answer = await at.client.chat.completions.create(model="", messages=QUESTION)
            assert answer.usage.completion_tokens == 5
            with pytest.raises(openai.RateLimitError, match="max_sampled_tokens"):
                await at.client.chat.completions.create(model="", messages=QUESTION)
            with pytest.raises(openai.BadRequestError, match="stop"):
                await at.client.chat.completions.create(model="", messages=QUESTION, stop="x")
            spent = at.gateway.open_session(SamplingConfig(), limits=SessionLimits(max_wall_seconds=0.0))
            with pytest.raises(openai.RateLimitError, match="max_wall_seconds"):
                await at.client.with_options(base_url=spent.base_url).chat.completions.create(
                    model="", messages=QUESTION
                )

    asyncio.run(run())


def test_a_client_that_goes_away_and_a_session_that_ends(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD + END], way) as at:
            at.script.held.clear()
            call = asyncio.create_task(at.client.chat.completions.create(model="", messages=QUESTION))
            while not at.script.requests:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            while at.session._running:
                await asyncio.sleep(0.01)
            call = asyncio.create_task(at.client.chat.completions.create(model="", messages=QUESTION))
            while len(at.script.requests) < 2:
                await asyncio.sleep(0.01)
            assert await at.session.close() == []
            with pytest.raises(openai.NotFoundError, match="ended"):
                await call

    asyncio.run(run())


class SlowTools:
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def call(self, name, arguments):
        await self.go.wait()
        return ToolResult("ok", json.dumps([name, arguments]))

    async def close(self, returned):
        pass


def test_tools_of_the_run(tokenizer, way):
    """Any call may be run, also one that the policy did not make; what is wrong with a call is its result."""

    async def run():
        async with served(tokenizer, [WORD + CALL_BROKEN + CALL + END], way, max_concurrent_calls=2) as at:
            status, answer = await post(at, "/v1/tool_calls", {"id": "1", "function": {"name": "x", "arguments": "{}"}})
            assert (status, answer["error"]["code"]) == (404, "no_tools")
            tools = SlowTools()

            def opened(**limits):
                limits = SessionLimits(context_length=2000, max_concurrent_calls=2, **limits)
                return at.gateway.open_session(SamplingConfig(), limits=limits, tool_session=tools)

            at.session = opened()

            async def call(arguments, identifier="1"):
                function = {"name": "x", "arguments": arguments}
                return await post(at, "/v1/tool_calls", {"id": identifier, "function": function})

            waiting = [asyncio.create_task(call("{}")) for _ in range(2)]
            while len(at.session._desk.at_work) < 2:
                await asyncio.sleep(0.01)
            assert (await call("{}"))[1]["error"]["code"] == "max_concurrent_calls"
            tools.go.set()
            assert [answer["content"] for _, answer in await asyncio.gather(*waiting)] == ['["x", {}]'] * 2
            assert "not an object" in (await call("[]"))[1]["content"]
            assert "invalid tool call" in (await call("{"))[1]["content"]
            status, answer = await post(at, "/v1/tool_calls", {"id": "1"})
            assert (status, answer["error"]["param"]) == (400, "function")
            _, said = await post(at, "/v1/chat/completions", {"messages": QUESTION})
            broken, whole = said["choices"][0]["message"]["tool_calls"]
            assert "invalid tool call" in (await post(at, "/v1/tool_calls", broken))[1]["content"]
            assert "print(6*7)" in (await post(at, "/v1/tool_calls", whole))[1]["content"]
            (segment,) = at.session.segments()
            assert [(one.status, one.position) for one in segment.tool_calls] == [("parse_error", 1), ("ok", 2)]
            tools.go.clear()
            waiting = asyncio.create_task(call("{}"))
            await asyncio.sleep(0.1)
            await at.session.close()
            assert (await waiting)[0] == 404 and (await call("{}"))[0] == 404
            at.session = opened(max_wall_seconds=0.5)
            assert (await call("{}"))[1]["error"]["code"] == "max_wall_seconds"
            assert 0.1 < at.session.timing.tools < 30

    asyncio.run(run())


def test_calls_at_a_time_are_limited(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD + END], way, max_concurrent_calls=2) as at:
            at.script.held.clear()
            create = at.client.chat.completions.create
            held = [asyncio.create_task(create(model="", messages=QUESTION)) for _ in range(2)]
            while len(at.script.requests) < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError, match="max_concurrent_calls=2"):
                await create(model="", messages=QUESTION)
            at.script.held.set()
            await asyncio.gather(*held)
            await create(model="", messages=QUESTION)
            assert len(await at.session.close()) == 3

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_that_is_cut_keeps_its_turn(tokenizer, path):
    """What was sampled is trained, once, whether or not the client has read it; its retry begins a segment."""

    async def run():
        async with served(tokenizer, [WORD * 400 + END]) as at:
            asked = {"input": "question"} if path == "/v1/responses" else {"messages": QUESTION, "max_tokens": 1000}
            body = {"model": "", "stream": True, **asked}
            for _ in range(2):
                async with at.http.stream("POST", at.session.anthropic_base_url + path, json=body) as response:
                    assert await anext(response.aiter_bytes())
            first, again = await at.session.close()
            assert first.loss_mask.sum() == again.loss_mask.sum() == 401
            assert first.prompt_ids.tolist() == again.prompt_ids.tolist() == at.script.contexts[0]

    asyncio.run(run())


def test_keys(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD + END], way) as at:
            root = at.session.base_url.partition("/sessions/")[0] + "/v1"
            by_key = at.client.with_options(base_url=root)
            assert (await by_key.models.list()).data[0].id == "policy"
            await by_key.chat.completions.create(model="", messages=QUESTION)
            with pytest.raises(openai.NotFoundError):
                await by_key.with_options(api_key="wrong").chat.completions.create(model="", messages=QUESTION)
            await at.client.with_options(api_key="any").chat.completions.create(model="", messages=QUESTION)
            assert len(at.session.segments()) == 2
        async with served(tokenizer, [WORD + END], way, host="0.0.0.0") as at:
            await at.client.models.list()
            with pytest.raises(openai.AuthenticationError):
                await at.client.with_options(api_key="any").models.list()

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_pages_of_other_sites_need_a_key(tokenizer, headers):
    async def run():
        body = {"model": "", "max_tokens": 9, "messages": QUESTION}
        async with served(tokenizer, [WORD + END]) as at:
            status, told = await post(at, "/v1/chat/completions", body, headers)
            assert (status, told["error"]["code"]) == (403, "foreign_caller")
            status, told = await post(at, "/v1/messages", body, headers)
            assert (status, told["error"]["type"]) == (403, "permission_error")
            shown = {**headers, "x-api-key": at.session.key}
            assert (await post(at, "/v1/messages", body, shown))[0] == 200
            assert (await post(at, "/v1/messages", body, {"Host": "localhost"}))[0] == 200
        async with served(tokenizer, [WORD + END], host="0.0.0.0") as at:
            named = {"Host": "host.docker.internal", "x-api-key": at.session.key}
            assert (await post(at, "/v1/messages", body, named))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_errors_quote_no_long_values(tokenizer, path):
    long = "x" * 100_000

    async def run():
        async with served(tokenizer, [WORD + END], context_length=100_000) as at:
            valid = {"model": "", "max_tokens": 9, "messages": QUESTION}
            bad = [{long: 1}, {"tool_choice": long}, {"stream": long}, {"messages": [{"role": long, "content": ""}]}]
            for fields in [*bad, {"input": [{"type": long}]}, {"tools": long}, {"temperature": long}]:
                asked = {key: value for key, value in valid.items() if path != "/v1/responses" or key == "model"}
                status, told = await post(at, path, {**asked, **fields})
                assert status == 400 and len(json.dumps(told)) < 4500

    asyncio.run(run())


def test_a_body_that_stops_halfway_is_given_up(tokenizer, monkeypatch):
    monkeypatch.setattr(server, "BODY_SECONDS", 0.3)

    async def run():
        async with served(tokenizer, [WORD + END]) as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.gateway.port)
            path = httpx.URL(at.session.anthropic_base_url).path
            writer.write(f"POST {path}/v1/messages HTTP/1.1\r\n".encode())
            writer.write(b"Host: localhost\r\nContent-Length: 99\r\n\r\n{")
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert b" 408 " in answer.splitlines()[0] and b"invalid_request_error" in answer

    asyncio.run(run())


def test_engines_that_are_gone(tokenizer, way):
    async def run():
        gone = NoEngineAvailable("all engines are dead")
        async with served(tokenizer, [gone, ValueError("a bug"), WORD + END], way) as at:
            with pytest.raises(openai.InternalServerError, match="all engines are dead"):
                await at.client.chat.completions.create(model="", messages=QUESTION)
            assert at.session.failure is gone
            with pytest.raises(openai.InternalServerError, match="the gateway failed: ValueError"):
                await at.client.chat.completions.create(model="", messages=QUESTION)
            await at.client.chat.completions.create(model="", messages=QUESTION)

    asyncio.run(run())


def test_a_body_that_is_too_large(tokenizer, way, monkeypatch):
    for module in (api, server):
        monkeypatch.setattr(module, "MAX_BODY_BYTES", 1 << 20)

    async def run():
        async with served(tokenizer, [WORD + END], way) as at:
            padding = {"model": "x" * (1 << 20)}
            status, answer = await post(at, "/v1/chat/completions", {"messages": QUESTION, **padding})
            assert (status, answer["error"]["code"]) == (413, "request_too_large")
            assert "1 MiB" in answer["error"]["message"] and not at.script.requests

    asyncio.run(run())


def test_unknown_addresses_and_what_is_counted(tokenizer, way):
    async def run():
        async with served(tokenizer, [WORD + END], way) as at:
            status, answer = await post(at, "/v1/embeddings", {})
            assert (status, answer["error"]["code"]) == (404, "unknown_url")
            wrong = await at.http.get(f"{at.session.base_url}/chat/completions")
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "unknown_url")
            assert (await at.http.get(at.session.base_url.partition("/sessions")[0])).status_code == 404
            await post(at, "/v1/chat/completions", {"messages": QUESTION})
            statistics = at.gateway.statistics
            assert (statistics.errors, statistics.calls) == ({"unknown_url": 3}, 1)
            assert len(statistics.call_seconds) == 1 and 0 <= statistics.call_seconds[0] < 60

    asyncio.run(run())
