"""An agent on the plain ``openai`` client leaves the same row as the built-in loop, id for id."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import openai
import pytest

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from megatron_retool.data.chat_template import render
from megatron_retool.trajectory import Trajectory
from sglang_rollout.agent.agents import task_agents
from sglang_rollout.agent.loop import AgentLoop, AgentSetup, run_call
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.gateway.interface import SessionLimits
from sglang_rollout.gateway.server import Gateway
from sglang_rollout.task_agents.client import ClientSettings
from tests.kit.markov_policy import (
    ANSWER,
    CALL,
    CALL_BROKEN,
    CALL_LONG,
    CALL_UNKNOWN,
    WORD,
    WORDS,
    build_tokenizer,
)
from tests.kit.scripted import Counter, ScriptedTools
from tests.sglang_rollout.agent.test_loop import ScriptedEngine

END = "<|im_end|>"
EXAMPLE = f"{Path(__file__).resolve().parents[3]}/examples/run_tools_agent.py:run"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}]
CONFIG = MultiTurnConfig(max_tool_response_tokens=60, max_assistant_turns=100, max_tool_calls=100)
SCRIPTS = {
    "an answer": [ANSWER + END],
    "tools": [WORD + CALL + END, CALL_LONG + CALL + END, WORDS + ANSWER + END],
    "wrong calls": [CALL_BROKEN + END, WORD + CALL_UNKNOWN + CALL_BROKEN + END, ANSWER + END],
    "thinking": [f"<think>\n{CALL}\n</think>\n\n{WORD}{CALL}{END}", f"<think>\n{WORD}\n</think>\n\n{ANSWER}{END}"],
    "a long answer": [CALL + END, WORD * 900 + END],
    "long results": [CALL_LONG + CALL_LONG + CALL_LONG + END] * 9,
    "another end": [WORD + CALL + END, ANSWER + "<|endoftext|>"],
}


class AsSampler:
    """The script of the loop's tests where the gateway looks for tokens."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def generate(self, state, request):
        return await self.engine(state, request.max_new_tokens, request.deadline_seconds)


async def agent(client: openai.AsyncOpenAI, tools: ScriptedTools, model: str = "any") -> None:
    """Twenty lines, as somebody would write them."""
    messages = list(MESSAGES)
    while True:
        try:
            answer = await client.chat.completions.create(model=model, messages=messages, tools=[Counter.schema])
        except openai.APIStatusError as error:
            assert error.status_code == 400
            return
        said = answer.choices[0].message
        if not said.tool_calls:
            return
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            error = getattr(call, "error", None)
            arguments = {} if error else json.loads(call.function.arguments)
            _, text = await run_call(tools, ParsedCall(call.function.name, arguments, "", error))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def with_its_own_tools(gateway, handle) -> None:
    async with openai.AsyncOpenAI(base_url=handle.base_url, api_key="none", max_retries=0) as client:
        await agent(client, ScriptedTools())


async def with_the_runs_tools(gateway, handle) -> None:
    run = task_agents.bind(EXAMPLE, {"turns": 100, "calls": 100})
    task = {"messages": MESSAGES, "tools": [Counter.schema]}
    await run(task, ClientSettings(handle.base_url, handle.anthropic_base_url, handle.key, gateway.transport))


@pytest.mark.parametrize("drive", [with_its_own_tools, with_the_runs_tools])
@pytest.mark.parametrize("template", ["qwen2.5.jinja", "qwen3.jinja"])
def test_rows_are_equal(template, drive):
    tokenizer = build_tokenizer(template)
    schemas = [Counter.schema]
    limit = 500
    (text,) = render(tokenizer, [MESSAGES], schemas, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)

    def built_in(script) -> Trajectory:
        loop = AgentLoop(AgentSetup(CONFIG, tokenizer, ScriptedTools(), limit))
        state = TrajectoryState(prompt, 0, 0)
        asyncio.run(loop.run(state, ScriptedEngine(tokenizer, script)))
        return state.to_trajectory()

    async def through_the_gateway(script):
        engine = ScriptedEngine(tokenizer, script)
        # A wider one, which what does not fit exceeds as well.
        limits = SessionLimits(max_response_length=limit, context_length=len(prompt) + limit + 5)
        async with Gateway(AsSampler(engine), tokenizer, CONFIG) as gateway:
            handle = gateway.open_session(SamplingConfig(), limits=limits, tool_session=ScriptedTools())
            await drive(gateway, handle)
            return await handle.close()

    for name, script in SCRIPTS.items():
        expected = built_in(script)
        (row,) = asyncio.run(through_the_gateway(script))
        for column in ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "turn_ids", "weight_versions"):
            np.testing.assert_array_equal(getattr(row, column), getattr(expected, column), f"{name}: {column}")
            assert getattr(row, column).dtype == getattr(expected, column).dtype
        assert row.finish_reason is expected.finish_reason, name
        assert drive is with_its_own_tools or kept(row.tool_calls) == kept(expected.tool_calls), name


def kept(calls):
    return [{**vars(call), "seconds": 0, "started": 0} for call in calls]
