"""What the ``openai`` client costs an agent's process: making one, a call without a network, and the run's driver.

    python benchmarks/openai_client.py

CPU time, so that other programs on the cores matter less. The transport answers at once, with the same tool call; the
baseline is the same request by ``httpx`` alone, which ``openai`` is built on.

The driver's part is rollouts of ``RolloutManager`` with an engine and a tool that answer at once: a call of the tool,
and an answer. The baseline is the built-in loop. The same rollouts are taken by examples/run_tools_agent.py, whose
client is made for the gateway, and by an agent that makes its own, with the gateway's shortcut for such clients and by
a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletion

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_retool.config import SamplingConfig, load_config
from megatron_retool.data.chat_template import render
from sglang_rollout.engine.base import GenerateRequest, GenerateResult
from sglang_rollout.gateway import shortcut
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit import markov_policy as policy
from tests.kit.scripted import Counter, Prompt, ScriptedTools

ROOT = Path(__file__).resolve().parents[1]
GATEWAY_CLIENT = f"rollout.agent={ROOT}/examples/run_tools_agent.py:run"
OWN_CLIENT = f"rollout.agent={ROOT}/benchmarks/plain_openai_agent.py:run"
FUNCTION = {"name": "count", "parameters": {"type": "object", "properties": {"who": {"type": "string"}}}}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": "{}"}}
URL = "http://127.0.0.1:1/v1"
NOTHING = contextlib.nullcontext()


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
    result = []
    for _ in range(repeats):
        began = time.process_time()
        await call()
        result.append(time.process_time() - began)
    return 1e3 * float(np.median(result))


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
            "post for a dict": lambda sent=body: client.post("/chat/completions", body=sent, cast_to=object),
            "httpx": lambda sent=body: http.post(f"{URL}/chat/completions", json=sent),
        }
        costs = {name: await milliseconds(call, repeats) for name, call in calls.items()}
        result, ratio = (
            ", ".join(f"{name} {cost:.2f} ms" for name, cost in costs.items()),
            costs["create"] / costs["post"],
        )
        print(f"a call with {len(messages)} messages: {result}; create {ratio:.2f} times post")


class ScriptedEngine:
    """Says a tool call, and after its result an answer, at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.base_url, self.requests = "one", 0
        said = (policy.WORD * 20 + text + "<|im_end|>" for text in (policy.CALL, policy.ANSWER))
        self._turns = [tokenizer.encode(text, add_special_tokens=False) for text in said]

    def client(self, url: str) -> ScriptedEngine:
        return self

    async def generate(
        self, request: GenerateRequest, *, on_start: Callable[[str], None], deadline_seconds: float
    ) -> GenerateResult:
        self.requests += 1
        on_start(str(self.requests))
        ids = self._turns[self._turns[0][-2] in request.input_ids]
        await asyncio.sleep(0)
        return GenerateResult(ids, [-0.5] * len(ids), [0] * len(ids), "stop", ids[-1])

    async def healthy(self, timeout_seconds: float = 10.0) -> bool:
        return True

    async def close(self) -> None:
        pass


def prompts(tokenizer: Any, groups: int) -> list[Prompt]:
    result = []
    for group in range(groups):
        messages = [{"role": "user", "content": f"What is {group} * 7? Use Python, then write the number in a box."}]
        (text,) = render(tokenizer, [messages], [Counter.schema], add_generation_prompt=True)
        result.append(Prompt(tokenizer.encode(text, add_special_tokens=False), group, {"uid": str(group)}))
        result[-1].messages = messages
    return result


async def rollouts(tokenizer: Any, groups: int, *overrides: str) -> float:
    """CPU milliseconds of a rollout of two turns, of ``groups`` groups of 8."""
    config = load_config(None, ["data.max_prompt_length=2000", "data.max_response_length=400", *overrides])
    asked, sampling, engine = prompts(tokenizer, groups), SamplingConfig(n=8), ScriptedEngine(tokenizer)
    async with RolloutManager(config, tokenizer, ["one"], ScriptedTools(), engine=engine) as manager:
        began = time.process_time()
        rows = [row for group in await manager.generate_groups(asked, sampling) for row in group]
        spent = time.process_time() - began
    assert len(rows) == groups * 8 and all(row.turn_ids.max() == 1 and len(row.tool_calls) == 1 for row in rows)
    return 1e3 * spent / len(rows)


async def measure_driver(repeats: int) -> None:
    tokenizer = policy.build_tokenizer()
    ways: dict[str, tuple[str, ...]] = {
        "the built-in loop": (),
        "an agent with the gateway's client": (GATEWAY_CLIENT,),
        "an agent with its own client": (OWN_CLIENT,),
        "the same by a socket": (OWN_CLIENT,),
    }
    result: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, overrides in ways.items():
            with mock.patch.object(shortcut, "leads_to", contextlib.nullcontext) if "socket" in way else NOTHING:
                result[way].append(await rollouts(tokenizer, 16, *overrides))
    costs = {name: np.array(each[1:]) for name, each in result.items()}
    built_in = costs["the built-in loop"]
    for name, cost in costs.items():
        print(
            f"a rollout by {name}: {np.median(cost):.2f} ms, {np.median(cost - built_in) / 2:.2f} ms a turn more than "
            f"the built-in loop's, {np.median(cost / built_in):.2f} times"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7, help="of 128 rollouts in each way")
    options = parser.parse_args()
    asyncio.run(measure(options.repeats))
    asyncio.run(measure_driver(options.rounds))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
