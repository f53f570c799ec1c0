"""Requests that are far too large: refused before work is spent on them, and never worked on in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
import urllib.parse
import weakref

import pytest

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from sglang_rollout.agent import long_texts
from sglang_rollout.gateway import rendering
from sglang_rollout.gateway.api import ApiRequest, BodyTooLong
from sglang_rollout.gateway.server import Gateway
from tests.kit.markov_policy import WORD, build_tokenizer
from tests.kit.scripted import Counter
from tests.kit.watched_tokenizer import WatchedTokenizer, largest_gap
from tests.sglang_rollout.gateway.scripted_sampler import RandomSampler
from tests.sglang_rollout.gateway.test_server import CLAUDE_TOOL, END, QUESTION, post, served, way
from tools.tool import ToolResult
from untrusted import MOST_LEVELS

__all__ = ["way"]
CONTEXT = 519
MUCH = "x y " * (1 << 19)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": MUCH})}}
TOO_LARGE = [
    (CHAT, {"messages": [{"role": "user", "content": MUCH}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": MUCH}]}]}),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": MUCH}, *QUESTION]}),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": "", "reasoning_content": MUCH}, *QUESTION]}),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *QUESTION]}),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 300}] * 1000}),
    (CHAT, {"messages": QUESTION, "tools": [{**Counter.schema, "function": {"name": "f", "description": MUCH}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": MUCH}}]}]}),
    (RESPONSES, {"input": MUCH}),
    (RESPONSES, {"input": "x", "instructions": MUCH}),
    (MESSAGES, {"max_tokens": 5, "messages": QUESTION, "system": MUCH}),
    (MESSAGES, {"max_tokens": 5, "messages": QUESTION, "tools": [{**CLAUDE_TOOL, "description": MUCH}]}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_what_cannot_have_room_is_refused_before_it_is_tokenised(path, body):
    async def run():
        tokenizer = WatchedTokenizer()
        async with served(tokenizer, [WORD + END], context_length=CONTEXT) as at:
            tokenizer.lengths.clear()
            status, answer = await post(at, path, body)
            assert status == 400 and at.session.overflowed
            words = "prompt is too long: " if path == MESSAGES else "This model's maximum context length is 519 tokens."
            assert answer["error"]["message"].startswith(words)
            assert not at.script.requests and not tokenizer.lengths

    asyncio.run(run())


def test_a_body_of_unknown_length_is_read_only_as_far_as_it_may_have_room(tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END], context_length=CONTEXT) as at:
            url = urllib.parse.urlsplit(at.session.base_url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            head = [
                f"POST {url.path}/chat/completions HTTP/1.1",
                f"Host: {url.netloc}",
                f"Authorization: Bearer {at.session.key}",
                "Transfer-Encoding: chunked",
            ]
            writer.write("\r\n".join([*head, "", ""]).encode())
            answer = asyncio.create_task(reader.readline())
            sent, piece = 0, b"x" * (1 << 16)
            while not answer.done() and sent < 60 << 20:
                writer.write(b"10000\r\n" + piece + b"\r\n")
                sent += len(piece)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
            writer.close()
            assert (await answer).startswith(b"HTTP/1.1 400")
            assert sent < 30 << 20 and at.session.overflowed  # the kernel's buffers hold some of it

    asyncio.run(run())


def test_a_long_history_that_may_have_room_is_tokenised_only_as_far_as_it_has(tokenizer):
    async def run():
        watched = WatchedTokenizer()
        length = 20_000
        async with served(watched, [WORD + END], context_length=length) as at:
            watched.lengths.clear()
            status, answer = await post(at, CHAT, {"messages": [{"role": "user", "content": "x" * (length * 20)}]})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert sum(watched.lengths) < 3 * length and max(watched.lengths) <= rendering.WINDOW
            # The same text in longer tokens: as many characters, and room for them.
            status, _ = await post(at, CHAT, {"messages": [{"role": "user", "content": WORD * (length - 100)}]})
            assert status == 200
            (segment,) = await at.session.close()
            text = "<|im_start|>user\n" + WORD * (length - 100)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert " ".join(map(str, ids)) in " ".join(map(str, segment.prompt_ids.tolist()))

    asyncio.run(run())


def test_large_requests_do_not_stop_the_event_loop():
    async def run():
        tokenizer, seconds = WatchedTokenizer(), 2.0
        async with served(tokenizer, [WORD + END], context_length=200_000) as at:
            tokenizer.seconds = seconds
            text = "x" * (2 * long_texts.LARGE)
            done = asyncio.Event()
            watching = asyncio.create_task(largest_gap(done))
            for history in ([{"role": "user", "content": text}], [*QUESTION, {"role": "user", "content": text}]):
                began = time.monotonic()
                assert (await post(at, CHAT, {"messages": history}))[0] == 200
                assert time.monotonic() - began > seconds
            done.set()
            assert await watching < seconds / 2
            assert len(await at.session.close()) == 2

    asyncio.run(run())


class LongTools:
    """A tool of the run that says a lot."""

    async def call(self, name, arguments):
        return ToolResult("ok", "z" * (2 * long_texts.LARGE))

    async def close(self, returned):
        return None


def test_a_long_result_of_the_runs_tools_does_not_stop_the_event_loop():
    async def run():
        tokenizer, seconds, done = WatchedTokenizer(), 0.5, asyncio.Event()
        config = MultiTurnConfig(max_tool_response_tokens=90_000)
        async with Gateway(RandomSampler(build_tokenizer()), tokenizer, config) as gateway:
            session = gateway.open_session(SamplingConfig(), tool_session=LongTools())
            tokenizer.seconds = seconds
            watching = asyncio.create_task(largest_gap(done))
            said = await session.run_tool({"id": "1", "function": {"name": "f", "arguments": "{}"}})
            done.set()
            assert len(said["content"]) == 2 * long_texts.LARGE and len(tokenizer.lengths) > 1
            assert await watching < seconds / 2

    asyncio.run(run())


def test_a_tool_result_is_cut_as_before_however_long_it_is(way, tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END], way, context_length=CONTEXT) as at:
            history = [*QUESTION, {"role": "assistant", "content": WORD}]
            result = {"role": "tool", "tool_call_id": "1", "content": "z" * 900_000}
            status, answer = await post(at, CHAT, {"messages": [*history, result]})
            assert status == 200, answer
            await post(at, CHAT, {"messages": [*history, *QUESTION]})
            assert all(len(context) < CONTEXT for context in at.script.contexts)

    asyncio.run(run())


def test_a_conversation_that_has_grown_too_long_ends_its_segment(tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END], context_length=CONTEXT) as at:
            await post(at, CHAT, {"messages": QUESTION})
            history = [*QUESTION, {"role": "assistant", "content": WORD}, {"role": "user", "content": MUCH[:200_000]}]
            assert (await post(at, CHAT, {"messages": history}))[0] == 400
            (segment,) = await at.session.close()
            assert segment.finish_reason.name == "LENGTH"

    asyncio.run(run())


def test_an_announced_body_is_refused_unread_and_one_of_many_values_undecoded(tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END], context_length=CONTEXT) as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.gateway.port)
            path = at.session.base_url.partition("/sessions")[2]
            head = f"POST /sessions{path}/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            writer.write(f"{head}Content-Length: {60 << 20}\r\n\r\n".encode())
            assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"400"
            writer.close()
        async with served(tokenizer, [WORD + END], context_length=10**6) as at:
            for body in ("[" + "[]," * 500_000 + "[]]", '{"messages": [' + '"",' * 900_000 + '""]}'):
                status, answer = await post(at, CHAT, body)
                assert status == 400 and "values" in answer["error"]["message"]
            status, answer = await post(at, CHAT, "[" * 200_000)
            assert status == 400 and "nested" in answer["error"]["message"]
            quoted = json.dumps([[]] * (MOST_LEVELS * 10_000))
            status, _ = await post(at, CHAT, {"messages": [{"role": "user", "content": quoted}], "max_tokens": 1})
            assert status != 400 or "values" not in _["error"]["message"]

    asyncio.run(run())


def test_a_refused_body_is_let_go_without_the_garbage_collector(tokenizer):
    async def run():
        async with served(tokenizer, [WORD + END], context_length=10**5) as at:
            for text in (b"{", json.dumps({"messages": [{"role": "user", "content": MUCH * 5}]}).encode()):
                reader = Reader(text)
                kept = weakref.ref(reader)
                path = f"/sessions/{at.session.id}{CHAT}"
                reply = await at.gateway._api.answer(ApiRequest("POST", path, {}, reader.read))
                assert reply.status == 400
                del reader
                assert kept() is None

    class Reader:
        def __init__(self, body: bytes) -> None:
            self.body = body

        async def read(self, most: int) -> bytes:
            if len(self.body) > most:
                raise BodyTooLong
            return self.body

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
