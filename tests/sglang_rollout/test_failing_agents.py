"""An agent of one's own that fails on some trajectories, or breaks its contract: these end, and the stream goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.loop import AgentLoop
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.rollout_manager import MAX_AGENT_FAILURES, RolloutManager
from sglang_rollout.session import RolloutError
from tests.kit.scripted import Prompt, ScriptedTools
from tests.sglang_rollout.test_rollout_manager import PROMPTS, TWO, ScriptedEngine, make_config


async def raises(state: TrajectoryState) -> bool:
    raise KeyError("plan")


async def ends_the_program(state: TrajectoryState) -> bool:
    raise SystemExit(2)


async def is_cancelled(state: TrajectoryState) -> bool:
    task = asyncio.ensure_future(asyncio.sleep(9))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task
    return True


async def leaves_columns_uneven(state: TrajectoryState) -> bool:
    state.response_ids.append(7)
    state.finish_reason = FinishReason.STOP
    return True


async def leaves_no_numbers(state: TrajectoryState) -> bool:
    state.append_unsampled(["seven"])
    raise ValueError("no")


async def names_no_reason(state: TrajectoryState) -> bool:
    return True


async def pauses_unasked(state: TrajectoryState) -> bool:
    return False


def generated(
    tokenizer: Any, wrong: Callable[[TrajectoryState], Any], fails: Callable[[TrajectoryState], bool], prompts
):
    async def scenario():
        engine = await ScriptedEngine(tokenizer).start()
        async with RolloutManager(make_config(), tokenizer, [engine.url], ScriptedTools()) as manager:
            sound = manager.agent

            class Failing(AgentLoop):
                stop = sound.stop

                def __init__(self) -> None: ...

                async def run(self, state, generate, paused=lambda: False):
                    return await (wrong(state) if fails(state) else sound.run(state, generate, paused))

            manager.agent = Failing()
            try:
                groups = await asyncio.wait_for(manager.generate_groups(prompts, TWO), 30)
            finally:
                await engine.stop()
            return groups, manager.statistics

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (raises, "KeyError: 'plan'"),
        (ends_the_program, "SystemExit: 2"),
        (is_cancelled, "CancelledError"),
        (leaves_columns_uneven, "columns of different lengths"),
        (leaves_no_numbers, "ValueError: no"),
        (names_no_reason, "left finish_reason unset"),
        (pauses_unasked, "nothing asked it to pause"),
    ],
)
def test_a_trajectory_whose_agent_fails_ends_and_the_others_go_on(tokenizer, wrong, said):
    groups, statistics = generated(
        tokenizer, wrong, lambda state: state.group_id % 2 == 1 and state.index == 0, PROMPTS
    )
    assert [(t.group_id, t.index) for group in groups for t in group] == [(g, i) for g in range(6) for i in range(2)]
    for trajectory in (t for group in groups for t in group):
        if trajectory.group_id % 2 == 1 and trajectory.index == 0:
            assert trajectory.finish_reason is FinishReason.ABORTED
            assert said in trajectory.reward_info["agent_failure"]
        else:
            assert trajectory.finish_reason is FinishReason.STOP and "agent_failure" not in trajectory.reward_info
    assert statistics.failed_trajectories == 3


def test_an_agent_that_always_fails_ends_the_run(tokenizer):
    prompts = [Prompt([1, 2], group_id) for group_id in range(MAX_AGENT_FAILURES)]
    with pytest.raises(RolloutError, match=r"rollout.agent=tool_calling\) failed on 16 trajectories in a row.*'plan'"):
        generated(tokenizer, raises, lambda state: True, prompts)
