"""Agents of one's own: a plan before the answer, the better of two samples, and what is said about wrong ones."""

from __future__ import annotations

import asyncio

import pytest

from megatron_retool.config import Config, DataConfig, RolloutConfig
from megatron_retool.registry import ExtensionError
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.agents import check_agent, make_agent
from sglang_rollout.agent.loop import Agent, AgentLoop
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from tests.kit.markov_policy import ANSWER, CALL, WORD
from tests.kit.scripted import ScriptedTools
from tests.sglang_rollout.agent.test_loop import END, ScriptedEngine

OWN = """
from dataclasses import replace

from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.loop import AgentLoop, StopConditions


class PlanFirst(AgentLoop):
    '''Asks for a plan of a few tokens, then goes on as the agent of tool calls does.'''

    def __init__(self, setup, *, plan_tokens=16, request="Now the answer."):
        super().__init__(setup)
        self.plan_tokens = plan_tokens
        self.request = setup.tokenizer.encode(request, add_special_tokens=False)

    async def run(self, state, generate, paused):
        if state.turn == 0 and not state.finish_reason:
            if paused():
                return False
            missing = self.plan_tokens - len(state.response_ids)
            plan = await generate(state, missing, self.config.max_wall_seconds)
            state.append_sampled(plan)
            if plan.finish_reason == "abort":
                return False  # it goes on with the rest of the plan
            state.append_unsampled(self.request)
            state.turn, state.turn_start = 1, len(state.response_ids)
        return await super().run(state, generate, paused)


class BestOfTwo:
    '''Samples twice and keeps the shorter answer.'''

    def __init__(self, setup):
        self.limit = setup.max_response_length
        self.stop = StopConditions((setup.tokenizer.eos_token_id,), ())

    async def run(self, state, generate, paused):
        samples = []
        for number in range(2):
            if paused():
                return False
            asked = replace(state, seed=None if state.seed is None else state.seed + number)
            samples.append(await generate(asked, self.limit, 60.0))
            if samples[-1].finish_reason == "abort":
                return False
        best = min(samples, key=lambda sample: len(sample.output_ids))
        state.append_sampled(best)
        state.finish_reason = FinishReason.STOP if best.finish_reason == "stop" else FinishReason.LENGTH
        return True


class NoStop(BestOfTwo):
    def __init__(self, setup): ...
class NotAsync(BestOfTwo):
    def run(self, state, generate, paused): ...
class TwoArguments(BestOfTwo):
    async def run(self, state, generate): ...
class Raises(BestOfTwo):
    def __init__(self, setup): raise RuntimeError("no")
class NoSetup(BestOfTwo):
    def __init__(self): ...
"""


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def config_of(agent: str, **kwargs) -> Config:
    return Config(rollout=RolloutConfig(agent=agent, agent_kwargs=kwargs))


def agent_of(config: Config, tokenizer):
    return make_agent(config.rollout, config.data, tokenizer, ScriptedTools())


def run(agent: Agent, engine: ScriptedEngine) -> TrajectoryState:
    state = TrajectoryState([1, 2], group_id=0, index=0)
    assert asyncio.run(agent.run(state, engine, lambda: False))
    return state


def test_a_plan_before_the_answer(tokenizer, own):
    agent = agent_of(config_of(f"{own}:PlanFirst", plan_tokens=3, request="Go"), tokenizer)
    engine = ScriptedEngine(tokenizer, [WORD * 4, CALL + END, ANSWER + END])
    trajectory = run(agent, engine).to_trajectory()
    assert engine.requests[0][1] == 3
    text = tokenizer.decode(trajectory.response_ids.tolist())
    assert text.startswith(f"{WORD * 3}Go{CALL}{END}") and text.endswith(ANSWER + END)
    assert tokenizer.decode(trajectory.response_ids[~trajectory.loss_mask][:2].tolist()) == "Go"
    assert sorted(set(trajectory.turn_ids[trajectory.loss_mask].tolist())) == [0, 1, 2]
    assert trajectory.finish_reason is FinishReason.STOP and len(trajectory.tool_calls) == 1


def test_an_agent_that_calls_no_tools(tokenizer, own):
    agent = agent_of(config_of(f"{own}:BestOfTwo"), tokenizer)
    assert agent.stop.token_ids == (tokenizer.eos_token_id,)
    state = run(agent, ScriptedEngine(tokenizer, [WORD + WORD + END, WORD + END]))
    assert tokenizer.decode(state.response_ids) == WORD + END

    async def interrupted(state, max_new_tokens, deadline):
        return GenerateResult([], [], [], "abort")

    assert asyncio.run(agent.run(TrajectoryState([1], 0, 0), interrupted, lambda: False)) is False


def test_the_default_is_the_loop_of_tool_calls(tokenizer):
    assert type(make_agent(RolloutConfig(), DataConfig(), tokenizer, ScriptedTools())) is AgentLoop


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        ("tool_caling", {}, "agent='tool_caling' is not one of tool_calling, .* the nearest is tool_calling"),
        ("PlanFirst", {"tokens": 3}, "agent_kwargs.tokens: PlanFirst has no parameter .* are plan_tokens, request"),
        ("NoSetup", {}, "NoSetup takes 0 argument"),
    ],
)
def test_a_wrong_target_needs_no_tokenizer_to_be_found(own, target, kwargs, said):
    name = target if target[0].islower() else f"{own}:{target}"
    with pytest.raises(ExtensionError, match=said) as caught:
        check_agent(config_of(name, **kwargs).rollout)
    assert "rollout.agent" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("NoStop", "NoStop.stop must be StopConditions"),
        ("NotAsync", "NotAsync has no asynchronous method run: define async def run"),
        ("TwoArguments", "TwoArguments.run cannot be called with three arguments"),
        ("Raises", "making it failed: RuntimeError: no"),
    ],
)
def test_a_wrong_agent_is_one_message(tokenizer, own, target, said):
    with pytest.raises(ExtensionError, match=f"rollout.agent={own}:{target}: .*{said}"):
        agent_of(config_of(f"{own}:{target}"), tokenizer)
