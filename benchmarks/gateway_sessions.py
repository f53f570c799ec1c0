"""The gateway under many agents at once, against the same calls straight to the scripted engine.

    python benchmarks/gateway_sessions.py                  # 1,000 sessions of 8 turns
    python benchmarks/gateway_sessions.py --sessions 100   # fewer

Every session is an agent: it asks, reads a tool call, answers it, and asks again with the whole history; all agents
live in a second process. The scripted engine takes ``--engine-seconds`` for a turn and says in it which session it was
asked by, and for which turn: an answer that belongs elsewhere is seen by the agent, and in the segments.

The gateway's own time is a call's time in the server, from its headers to its answer, less the engine's seconds:
waiting for the event loop, which serves the other agents, included. The baseline is an HTTP server that gives the same
calls straight to the engine: JSON in and out, no sessions, no templates, no tokens. After every round the sessions
are closed; objects of theirs that stay, tasks, descriptors and memory are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway.interface import SessionLimits, TurnRequest
from sglang_rollout.gateway.server import Gateway
from sglang_rollout.gateway.session_tree import Turn
from sglang_rollout.gateway.sessions import OpenSession

SCHEMA = {"name": "count", "parameters": {"type": "object", "properties": {"who": {"type": "string"}}}}


def arguments(who: str, turn: int) -> str:
    """What session ``who`` says in ``turn``."""
    return json.dumps({"who": who, "turn": turn})


class ScriptedEngine:
    """Finds the session in the prompt's text. ``seconds``: of one turn."""

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        self._tokenizer, self._seconds = tokenizer, seconds

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        who = self._tokenizer.decode(state.prompt_ids[-80:]).rpartition("I am ")[2].partition(".")[0]
        call = f'<tool_call>\n{{"name": "count", "arguments": {arguments(who, state.turn)}}}\n</tool_call><|im_end|>'
        ids = self._tokenizer.encode(call, add_special_tokens=False)
        await asyncio.sleep(self._seconds)
        return GenerateResult(ids, [-0.5] * len(ids), [0] * len(ids), "stop", ids[-1])


class Bare:
    """The baseline: the engine's answer as a completion, without a gateway."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.call_seconds: list[float] = []

    async def answer(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        body = json.loads(await request.read())
        who = body["messages"][0]["content"].rpartition("I am ")[2].partition(".")[0]
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        await asyncio.sleep(self._seconds)
        function = {"name": "count", "arguments": arguments(who, turn)}
        message = {"role": "assistant", "content": None}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
        response = web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
        self.call_seconds.append(time.monotonic() - began)
        return response


async def agent(http: aiohttp.ClientSession, url: str, who: str, turns: int, delay: float) -> int:
    """Wrong answers of one session."""
    await asyncio.sleep(delay)
    wrong = 0
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Count for me. I am {who}."}]
    for turn in range(turns):
        body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": SCHEMA}]}
        async with http.post(f"{url}/chat/completions", json=body) as response:
            said = (await response.json())["choices"][0]["message"]
        (call,) = said["tool_calls"]
        wrong += call["function"]["arguments"] != arguments(who, turn)
        messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": f"{turn} for {who}"}]
    return wrong


def run_agents(pipe: Connection, turns: int, over_seconds: float) -> None:
    """Of the second process: for each list of (url, who) the number of wrong answers."""

    async def run(sessions: list[tuple[str, str]]) -> int:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:
            delays = np.linspace(0.0, over_seconds, len(sessions))
            tasks = [agent(http, url, who, turns, delay) for (url, who), delay in zip(sessions, delays, strict=True)]
            return sum(await asyncio.gather(*tasks))

    raise_descriptor_limit()
    gc.disable()  # its pauses would hold calls back, which then come all at once
    while (sessions := pipe.recv()) is not None:
        pipe.send(asyncio.run(run(sessions)))


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Round:
    """Agents against one server, and what the server's process spent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def run(self, label: str, sessions: list[tuple[str, str]], own: Callable[[], np.ndarray]) -> np.ndarray:
        cpu, began = time.process_time(), time.monotonic()
        self._pipe.send(sessions)
        wrong = await asyncio.to_thread(self._pipe.recv)
        cpu, seconds = time.process_time() - cpu, time.monotonic() - began
        milliseconds = own() * 1e3
        p50, p99 = np.percentile(milliseconds, [50, 99])
        print(
            f"{label}: {len(milliseconds)} calls, {wrong} wrong, {len(milliseconds) / seconds:.0f} a second; own time "
            f"p50 {p50:.1f} ms, p99 {p99:.1f} ms; CPU {cpu / len(milliseconds) * 1e3:.2f} ms a call",
            flush=True,
        )
        return milliseconds


async def against_gateway(one_round: Round, tokenizer: Any, options: argparse.Namespace) -> np.ndarray:
    process, seconds = psutil.Process(), options.engine_seconds
    gateway = Gateway(ScriptedEngine(tokenizer, seconds), tokenizer, MultiTurnConfig())
    async with gateway:
        handles = [
            gateway.open_session(SamplingConfig(), limits=SessionLimits(context_length=100_000))
            for _ in range(options.sessions)
        ]
        names = [f"agent {place}" for place in range(options.sessions)]
        sessions = [(handle.base_url, who) for handle, who in zip(handles, names, strict=True)]
        own = await one_round.run(
            "gateway", sessions, lambda: np.array(gateway.statistics.call_seconds, np.float64) - seconds
        )
        mixed = 0
        for handle, who in zip(handles, names, strict=True):
            segments = await handle.close()
            text = tokenizer.decode([*segments[0].prompt_ids.tolist(), *segments[0].response_ids.tolist()])
            said = [arguments(who, turn) in text for turn in range(options.turns)]
            mixed += len(segments) != 1 or not all(said) or text.count('"who": "agent') != options.turns
        del handles, handle, segments
    gc.collect()
    left = sum(type(each) in (OpenSession, Turn) for each in gc.get_objects())
    print(
        f"  {mixed} sessions mixed up or in pieces, {gateway.open_sessions} still open, {left} objects of them left, "
        f"{len(asyncio.all_tasks()) - 1} tasks, {process.num_fds()} descriptors, "
        f"{process.memory_info().rss / 2**20:.0f} MiB resident"
    )
    return own


async def against_engine(one_round: Round, options: argparse.Namespace) -> np.ndarray:
    bare = Bare(options.engine_seconds)
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/chat/completions", bare.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    sessions = [(url, f"agent {place}") for place in range(options.sessions)]
    own = await one_round.run("engine ", sessions, lambda: np.array(bare.call_seconds) - options.engine_seconds)
    await runner.cleanup()
    return own


async def compare(one_round: Round, tokenizer: Any, options: argparse.Namespace) -> None:
    rounds: dict[str, list[np.ndarray]] = {"gateway": [], "engine": []}
    parts: list[tuple[str, Callable[[], Awaitable[np.ndarray]]]] = [
        ("engine", lambda: against_engine(one_round, options)),
        ("gateway", lambda: against_gateway(one_round, tokenizer, options)),
    ]
    for _ in range(options.rounds):
        for name, run in parts:
            rounds[name].append(await run())
    p99 = {name: np.percentile(np.concatenate(own), 99) for name, own in rounds.items()}
    print(
        f"all rounds: own time p99 {p99['gateway']:.1f} ms through the gateway, {p99['engine']:.1f} ms straight to the "
        f"engine; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


def main() -> None:
    from tests.kit.markov_policy import build_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--engine-seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    raise_descriptor_limit()
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    agents = context.Process(target=run_agents, args=(other, options.turns, options.engine_seconds), daemon=True)
    agents.start()
    try:
        asyncio.run(compare(Round(pipe), build_tokenizer(), options))
        pipe.send(None)
        agents.join()
    finally:
        agents.kill()


if __name__ == "__main__":
    main()
