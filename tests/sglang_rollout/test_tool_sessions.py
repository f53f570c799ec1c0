"""The life of a tool: opened with its trajectory, called, closed, however the trajectory ends or stops for a while."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from megatron_retool.config import RewardConfig, SamplingConfig, load_config
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.loop import AgentLoop
from sglang_rollout.agent.paused_groups import read_paused_groups, write_paused_groups
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit.abortable_engine import AbortableEngine
from tests.kit.markov_policy import ANSWER, CALL, CALL_UNKNOWN, WORD
from tests.kit.scripted import Counter, Prompt
from tests.sglang_rollout.agent.test_loop import END, ScriptedEngine, make_loop
from tools.loading import named_tool
from tools.registry import ToolRegistry
from tools.tool import EarlierCall

TURNS = [CALL + END, CALL + END, ANSWER + END]


def loop_with(tokenizer, tool: Counter, **limits) -> tuple[AgentLoop, ToolRegistry]:
    registry = ToolRegistry([named_tool(tool)])
    return make_loop(tokenizer, registry, **limits), registry


def started(**extra_info) -> TrajectoryState:
    return TrajectoryState([1, 2], group_id=3, index=1, extra_info=extra_info)


async def interrupted(state, max_new_tokens, deadline) -> GenerateResult:
    return GenerateResult([], [], [], "abort")


def test_a_session_is_the_trajectorys_and_what_it_returns_is_kept_for_the_reward(tokenizer):
    tool = Counter()
    loop, _ = loop_with(tokenizer, tool)
    kwargs = {
        "create_kwargs": {"first": 10, "ground_truth": "42"},
        "execute_kwargs": {"step": 5},
        "release_kwargs": {"label": "steps"},
    }
    state = started(ground_truth="42", tools_kwargs={"code_interpreter": kwargs})
    assert asyncio.run(loop.run(state, ScriptedEngine(tokenizer, TURNS)))
    (opened,) = tool.opened
    assert (opened.trajectory_id, opened.extra_info["ground_truth"], opened.earlier_calls) == ("3/1", "42", {})
    assert state.reward_info["tools"] == {"code_interpreter": {"steps": 20}} and len(tool.closed) == 1
    text = tokenizer.decode(state.response_ids)
    assert "<tool_response>\n15\n" in text and "<tool_response>\n20\n" in text
    seen = []
    with RewardManager(RewardConfig(), tokenizer) as manager:
        seen.append(manager._request(state.to_trajectory())["extra_info"]["tools"])
    assert seen == [{"code_interpreter": {"steps": 20}}]


def test_a_paused_trajectory_closes_its_session_and_opens_another_with_its_earlier_calls(tokenizer):
    tool = Counter()
    loop, _ = loop_with(tokenizer, tool)
    state, engine = started(), ScriptedEngine(tokenizer, TURNS)
    assert asyncio.run(loop.run(state, engine, lambda: bool(state.tool_calls))) is False
    assert len(tool.opened) == len(tool.closed) == 1 and "tools" not in state.reward_info
    assert asyncio.run(loop.run(state, engine, lambda: True)) is False
    assert len(tool.opened) == 1, "nothing is opened for a trajectory that may not go on"
    assert asyncio.run(loop.run(state, engine))
    assert tool.opened[1].earlier_calls == {"code_interpreter": (EarlierCall({"code": "print(6*7)"}, "ok"),)}
    assert state.reward_info["tools"] == {"code_interpreter": {"count": 2}} and len(tool.closed) == 2


def test_a_fork_opens_its_own_session(tokenizer):
    tool = Counter()
    loop, _ = loop_with(tokenizer, tool)
    state, engine = started(), ScriptedEngine(tokenizer, TURNS)
    forks = []

    async def generate(current, max_new_tokens, deadline):
        if current.turn == 1 and not forks:
            forks.append(current.fork(index=4, seed=None))
        return await engine(current, max_new_tokens, deadline)

    assert asyncio.run(loop.run(state, generate))
    assert asyncio.run(loop.run(forks[0], ScriptedEngine(tokenizer, [CALL + END, CALL + END, ANSWER + END])))
    assert [info.index for info in tool.opened] == [1, 4] and len(tool.opened[1].earlier_calls) == 1
    assert state.reward_info["tools"] == {"code_interpreter": {"count": 2}}
    assert forks[0].reward_info["tools"] == {"code_interpreter": {"count": 3}}


@pytest.mark.parametrize("ending", ["cancelled", "engine", "wall"])
def test_a_session_is_closed_however_its_trajectory_ends(tokenizer, ending):
    tool = Counter(seconds=5.0)
    loop, _ = loop_with(tokenizer, tool, max_wall_seconds=0.1 if ending == "wall" else 100.0)

    async def dies(state, max_new_tokens, deadline):
        raise RuntimeError("the engines are gone")

    async def scenario():
        state = started()
        if ending == "engine":
            with pytest.raises(RuntimeError, match="gone"):
                await loop.run(state, dies)
            return
        task = asyncio.create_task(loop.run(state, ScriptedEngine(tokenizer, TURNS)))
        if ending == "cancelled":
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "tools" not in state.reward_info
        else:
            assert await task and state.finish_reason is FinishReason.ABORTED
            assert state.reward_info["tools"] == {"code_interpreter": {"count": 0}}

    asyncio.run(scenario())
    assert len(tool.opened) == len(tool.closed) == 1


def test_a_session_that_is_being_closed_is_closed_to_the_end(tokenizer):
    class Slow(Counter):
        async def close(self, session):
            await asyncio.sleep(0.1)
            return await super().close(session)

    tool = Slow()
    loop, _ = loop_with(tokenizer, tool)
    state = started()

    async def scenario():
        task = asyncio.create_task(loop.run(state, ScriptedEngine(tokenizer, TURNS)))
        await asyncio.sleep(0.05)
        assert state.finish_reason is FinishReason.STOP and not tool.closed
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert len(tool.closed) == 1 and state.reward_info["tools"] == {"code_interpreter": {"count": 2}}


def test_a_tool_that_cannot_be_opened_or_closed_costs_no_trajectory(tokenizer):
    class Broken(Counter):
        async def open(self, trajectory):
            raise RuntimeError("no container left")

    class Unclosable(Counter):
        async def close(self, session):
            raise RuntimeError("lost")

    loop, registry = loop_with(tokenizer, Broken())
    state = started()
    assert asyncio.run(loop.run(state, ScriptedEngine(tokenizer, TURNS)))
    assert [call.status for call in state.tool_calls] == ["error", "error"]
    assert "Error: the tool failed: RuntimeError" in tokenizer.decode(state.response_ids)
    assert registry.take_metrics() == {"tool/code_interpreter/open_failures": 1.0}
    loop, registry = loop_with(tokenizer, Unclosable())
    assert asyncio.run(loop.run(started(), ScriptedEngine(tokenizer, TURNS)))
    assert registry.take_metrics() == {"tool/code_interpreter/close_failures": 1.0}


def test_opening_counts_as_time_of_the_trajectory(tokenizer):
    class Slow(Counter):
        async def open(self, trajectory):
            await asyncio.sleep(5.0)

    loop, _ = loop_with(tokenizer, Slow(), max_wall_seconds=0.05)
    state, engine = started(), ScriptedEngine(tokenizer, TURNS)
    assert asyncio.run(loop.run(state, engine))
    assert state.finish_reason is FinishReason.ABORTED and engine.requests == [] and state.seconds >= 0.05


def test_a_tool_that_is_not_the_prompts_is_unknown(tokenizer):
    registry = ToolRegistry([named_tool(Counter()), named_tool(Counter(), "other")])
    loop = make_loop(tokenizer, registry, max_tool_response_tokens=100)
    state = started(tool_selection=["other"])
    assert asyncio.run(loop.run(state, ScriptedEngine(tokenizer, [CALL + END, CALL_UNKNOWN + END, ANSWER + END])))
    assert [call.status for call in state.tool_calls] == ["unknown_tool", "unknown_tool"]
    assert "there is no tool 'code_interpreter'; the tools are: other" in tokenizer.decode(state.response_ids)


def test_sessions_over_a_pause_and_a_restart_of_the_process(tokenizer, tmp_path):
    """Every session that a stream opened is closed when it is left; a new process goes on with the earlier calls."""
    config = load_config(None, ["rollout.partial.enable=true", "rollout.engine.random_seed=7", "rollout.train.n=2"])
    prompts = [Prompt([1, 2, 3], group_id) for group_id in range(4, 10)]

    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            first, second = Counter(), Counter()
            tools = ToolRegistry([named_tool(first)])
            async with RolloutManager(config, tokenizer, [engine.url], tools) as manager:
                async with aclosing(manager.stream(prompts, SamplingConfig(n=2))) as stream:
                    await anext(stream)
                assert len(first.opened) == len(first.closed) > 0
                write_paused_groups(manager.finish_step(), tmp_path / "paused.parquet")
            paused = read_paused_groups(tmp_path / "paused.parquet")
            tools = ToolRegistry([named_tool(second)])
            async with RolloutManager(config, tokenizer, [engine.url], tools) as manager:
                manager.restore_paused(paused, prompts)
                groups = await manager.generate_groups([], SamplingConfig(n=2))
            return paused, second, groups

    paused, second, groups = asyncio.run(scenario())
    states = {(state.group_id, state.index): state for group in paused for state in group.states}
    assert len(second.opened) == len(second.closed) == sum(s.finish_reason is None for s in states.values()) > 2
    for info in second.opened:
        calls = states[info.group_id, info.index].tool_calls
        earlier = tuple(EarlierCall(json.loads(call.arguments), call.status) for call in calls)
        assert info.earlier_calls.get("code_interpreter", ()) == earlier
    assert any(info.earlier_calls for info in second.opened)
    assert all(t.reward_info["tools"] == {"code_interpreter": {"count": 1}} for group in groups for t in group)


def test_a_group_waits_for_tools_that_take_long_to_close(tokenizer):
    """What they return is part of the trajectory, which has its finish reason before."""

    class FirstClosesLast(Counter):
        closing = 0

        async def close(self, session: dict[str, int], *, label: str = "count") -> dict[str, int]:
            self.closing += 1
            if self.closing == 1:
                while len(self.closed) < 2:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
            return await super().close(session, label=label)

    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            tools = ToolRegistry([named_tool(FirstClosesLast())])
            config = load_config(None, ["rollout.engine.random_seed=7"])
            async with RolloutManager(config, tokenizer, [engine.url], tools) as manager:
                return await manager.generate_groups([Prompt([1, 2, 3], 0)], SamplingConfig(n=3))

    (group,) = asyncio.run(scenario())
    assert [t.reward_info["tools"] for t in group] == [{"code_interpreter": {"count": 1}}] * 3


def test_dropped_trajectories_close_their_sessions(tokenizer):
    config = load_config(None, ["rollout.engine.random_seed=7"])
    tool = Counter()

    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            tools = ToolRegistry([named_tool(tool)])
            async with RolloutManager(config, tokenizer, [engine.url], tools) as manager:
                prompts = [Prompt([1, 2, 3], group_id) for group_id in range(4)]
                async with aclosing(manager.stream(prompts, SamplingConfig(n=4))) as stream:
                    await anext(stream)

    asyncio.run(scenario())
    assert len(tool.opened) == 16 and len(tool.closed) == 16


def test_words_alone_need_no_tool(tokenizer):
    tool = Counter()
    loop, _ = loop_with(tokenizer, tool)
    state = started()
    assert asyncio.run(loop.run(state, interrupted)) is False
    assert asyncio.run(loop.run(state, ScriptedEngine(tokenizer, [WORD + END])))
    assert state.reward_info["tools"] == {"code_interpreter": {"count": 0}}
