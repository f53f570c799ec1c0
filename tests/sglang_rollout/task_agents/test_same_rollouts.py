"""With the same seeds an agent on the ``openai`` client leaves the rollouts of the built-in loop, bit for bit, however
long engines, tools and clients take, and whatever engines end by themselves."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import numpy as np

from megatron_retool.config import SamplingConfig, load_config
from megatron_retool.data.chat_template import render
from megatron_retool.rollout_rows import AGENT_KEY
from megatron_retool.trajectory import FinishReason
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit.markov_policy import TOOL_POLICY, single
from tests.kit.scripted import Counter, Prompt, ScriptedTools

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "run_tools_agent.py"
COLUMNS = ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "turn_ids", "weight_versions")


class SeededEngine:
    """Draws each token with the request's seed and the token's place, as SGLang does; takes any time for it."""

    def __init__(self, tokenizer, timing: int) -> None:
        self.base_url, self.requests, self.aborts = "one", 0, 0
        self.random = random.Random(timing)
        self.end = single(tokenizer, "<|im_end|>")
        self.table = {
            single(tokenizer, text): [(single(tokenizer, each), share) for each, share in row.items()]
            for text, row in TOOL_POLICY.items()
        }

    def client(self, url):
        return self

    async def generate(self, request, *, on_start=None, deadline_seconds=None):
        self.requests += 1
        on_start(str(self.requests))
        ids, log_probs, reason = list(request.input_ids), [], "length"
        while len(log_probs) < request.max_new_tokens:
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.expovariate(300))
            if log_probs and self.random.random() < 0.1:
                reason, self.aborts = "abort", self.aborts + 1
                break
            tokens, shares = zip(*self.table[ids[-1]], strict=True)
            (place,) = random.Random(f"{request.seed}/{len(ids)}").choices(range(len(tokens)), shares)
            ids.append(tokens[place])
            log_probs.append(math.log(shares[place]))
            if ids[-1] == self.end:
                reason = "stop"
                break
        sampled = ids[len(request.input_ids) :]
        matched = self.end if reason == "stop" else None
        return GenerateResult(sampled, log_probs, [3] * len(sampled), reason, matched)

    async def abort(self, request_id):
        pass

    async def healthy(self, timeout_seconds=10.0):
        return True

    async def weight_version(self):
        return 3

    async def close(self):
        pass


def rollouts(tokenizer, timing: int, *overrides: str):
    config = load_config(
        None,
        [
            "rollout.engine.random_seed=7",
            "rollout.multi_turn.max_assistant_turns=4",
            "rollout.multi_turn.max_tool_calls=3",
            "rollout.multi_turn.max_tool_response_tokens=48",
            "data.max_prompt_length=1000",
            "data.max_response_length=200",
            *overrides,
        ],
    )
    prompts = []
    for group in range(6):
        messages = [{"role": "user", "content": f"What is {group}*7?"}]
        (text,) = render(tokenizer, [messages], [Counter.schema], add_generation_prompt=True)
        prompts.append(Prompt(tokenizer.encode(text, add_special_tokens=False), group, {"uid": str(group)}))
        prompts[-1].messages = messages
    engine = SeededEngine(tokenizer, timing)

    async def scenario():
        tools = ScriptedTools(seconds=engine.random.expovariate(200))
        async with RolloutManager(config, tokenizer, ["one"], tools, engine=engine) as manager:
            groups = await asyncio.wait_for(manager.generate_groups(prompts, SamplingConfig(n=4)), 200)
        return [row for group in groups for row in group]

    rows = asyncio.run(scenario())
    assert engine.aborts
    return rows


def kept(calls):
    return [(call.name, call.arguments, call.status, call.output_tokens, call.position) for call in calls]


def test_an_agents_rollouts_are_those_of_the_built_in_loop(tokenizer):
    built_in = rollouts(tokenizer, 0)
    reasons = {row.finish_reason for row in built_in}
    assert {FinishReason.STOP, FinishReason.TOOL_LIMIT, FinishReason.LENGTH} <= reasons
    assert len({row.response_ids.tobytes() for row in built_in}) > 12 and max(row.num_turns for row in built_in) > 2
    for timing in (1, 2):
        rows = rollouts(tokenizer, timing, f"rollout.agent={EXAMPLE}:run")
        assert len(rows) == len(built_in) == 24
        for mine, theirs in zip(built_in, rows, strict=True):
            key = (mine.group_id, mine.index)
            assert key == (theirs.group_id, theirs.index) and theirs.segment == 0
            for column in COLUMNS:
                np.testing.assert_array_equal(getattr(theirs, column), getattr(mine, column), f"{key}: {column}")
            assert kept(mine.tool_calls) == kept(theirs.tool_calls)
            assert theirs.reward_info[AGENT_KEY]["outcome"] == "finished"
            assert theirs.finish_reason in (mine.finish_reason, FinishReason.STOP), key
