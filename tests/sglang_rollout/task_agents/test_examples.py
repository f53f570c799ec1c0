"""The agents of examples/ that work in several contexts, through the real gateway with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from sglang_rollout.agent.agents import task_agents
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway import shortcut
from sglang_rollout.gateway.interface import SessionLimits
from sglang_rollout.gateway.server import Gateway
from sglang_rollout.task_agents.client import ClientSettings
from sglang_rollout.task_agents.function import run_function

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Actor:
    """Says what ``says`` makes of the text that it reads."""

    def __init__(self, tokenizer, says) -> None:
        self.tokenizer, self.says = tokenizer, says

    async def generate(self, state, request):
        read = self.tokenizer.decode([*state.prompt_ids, *state.response_ids], skip_special_tokens=False)
        ids = self.tokenizer.encode(f"{self.says(read)}<|im_end|>", add_special_tokens=False)
        return GenerateResult(ids, [-0.5] * len(ids), [1] * len(ids), "stop", ids[-1])


def played(tokenizer, example: str, says, ground_truth: str = "", task=None, room: int = 100_000, **kwargs):
    """(how it ended, [(prompt, response)] of its segments, as text, the turns of each)."""
    task = task or {"messages": [{"role": "user", "content": "What is 6 * 7?"}], "ground_truth": ground_truth}

    async def scenario():
        shortcut.install()
        async with Gateway(Actor(tokenizer, says), tokenizer, MultiTurnConfig()) as gateway:
            session = gateway.open_session(SamplingConfig(), limits=SessionLimits(context_length=room))
            client = ClientSettings(session.base_url, session.anthropic_base_url, session.key, gateway.transport)
            run = task_agents.bind(f"{EXAMPLES}/{example}.py:run", kwargs)
            with shortcut.leads_to(gateway.transport):  # as in a run
                end = await run_function(run, task, client, lambda: 60.0)
            return end, await session.close()

    end, segments = asyncio.run(scenario())
    texts = [
        tuple(tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in (each.prompt_ids, each.response_ids))
        for each in segments
    ]
    return end, texts, [int(each.turn_ids.max()) + 1 for each in segments]


def test_a_sub_agent_is_trained_in_a_context_of_its_own(tokenizer):
    """The planner asks two colleagues side by side; each looks at its answer twice."""

    def says(read: str) -> str:
        if "Check it" in read:
            return "surely 42"
        if "sub-question" in read and "What is 6 * 7?" not in read:
            return "perhaps 42"
        if "surely 42" in read:
            return "It is 42."
        return (
            call("ask", question="sub-question 1") + "\n" + call("ask", question="sub-question 2") + "\n" + call("ask")
        )

    end, texts, turns = played(tokenizer, "sub_agent", says, "42")
    assert end.outcome == "finished" and end.result["score"] == 1.0, end
    assert sorted(turns) == [2, 2, 2] and turns[0] == 2
    planner, *colleagues = texts
    assert "What is 6 * 7?" in planner[0] and planner[1].count("surely 42") == 2 and "needs a question" in planner[1]
    for prompt, response in colleagues:
        assert "What is 6 * 7?" not in prompt and "perhaps 42" in response and "surely 42" in response
    assert sorted("sub-question 1" in prompt for prompt, _ in colleagues) == [False, True]


def test_smolagents(tokenizer):
    pytest.importorskip("smolagents")

    def says(read: str) -> str:
        question = read.rpartition("What is 6 * 7?")[2]
        return call("final_answer", answer="42") if "42" in question else call("multiply", first=6, second=7)

    end, texts, turns = played(tokenizer, "smolagents_agent", says, "42")
    assert end.outcome == "finished" and end.result["score"] == 1.0, end
    # It sends a call and its result as texts of its own, which is another history.
    assert turns == [1, 1] and all("What is 6 * 7?" in prompt for prompt, _ in texts)
    assert ['"multiply"' in response for _, response in texts] == [True, False]
