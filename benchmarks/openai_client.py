"""What the ``openai`` client costs an agent's process: making one, and a call without a network.

    python benchmarks/openai_client.py

CPU time, so that other programs on the cores matter less. The transport answers at once, with the same tool call; the
baseline is the same request by ``httpx`` alone, which ``openai`` is built on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletion

FUNCTION = {"name": "count", "parameters": {"type": "object", "properties": {"who": {"type": "string"}}}}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": "{}"}}
URL = "http://127.0.0.1:1/v1"


class Answers(httpx.AsyncBaseTransport):
    """The same completion to every request."""

    def __init__(self) -> None:
        message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._body = json.dumps({**head, "choices": [choice], "usage": usage}).encode()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "application/json"}, content=self._body)


def history(turns: int) -> list[Any]:
    """A question, and ``turns`` calls with their results."""
    said = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "42"}]
    return [{"role": "user", "content": "Count for me. " * 9}, *(said * turns)]


async def milliseconds(call: Callable[[], Awaitable[Any]], repeats: int) -> float:
    """Median CPU time of a call."""
    await call()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        await call()
        found.append(time.process_time() - began)
    return 1e3 * float(np.median(found))


async def measure(repeats: int) -> None:
    certificates = ssl.create_default_context()

    async def own_certificates() -> None:
        await AsyncOpenAI(base_url=URL, api_key="none").close()

    async def given_certificates() -> None:
        http = DefaultAsyncHttpxClient(verify=certificates)
        await AsyncOpenAI(base_url=URL, api_key="none", http_client=http).close()

    print(f"a client that reads certificates: {await milliseconds(own_certificates, 10):.1f} ms")
    print(f"a client with certificates that are there: {await milliseconds(given_certificates, repeats):.2f} ms")
    http = httpx.AsyncClient(transport=Answers())
    client = AsyncOpenAI(base_url=URL, api_key="none", http_client=http)
    for turns in (0, 1, 2, 8):
        messages = history(turns)
        body = {"model": "policy", "messages": messages, "tools": TOOLS}
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "create": lambda asked=messages: client.chat.completions.create(
                model="policy", messages=asked, tools=TOOLS
            ),
            "post": lambda sent=body: client.post("/chat/completions", body=sent, cast_to=ChatCompletion),
            "httpx": lambda sent=body: http.post(f"{URL}/chat/completions", json=sent),
        }
        costs = {name: await milliseconds(call, repeats) for name, call in calls.items()}
        found, ratio = (
            ", ".join(f"{name} {cost:.2f} ms" for name, cost in costs.items()),
            costs["create"] / costs["post"],
        )
        print(f"a call with {len(messages)} messages: {found}; create {ratio:.2f} times post")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    asyncio.run(measure(parser.parse_args().repeats))


if __name__ == "__main__":
    main()
