"""Paused groups through a file: nothing of an unfinished trajectory is lost, and it goes on where it was."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.config import BranchingConfig, SamplingConfig, load_config
from megatron_retool.routed_experts import stored_type
from megatron_retool.trajectory import FinishReason, RolloutTiming, ToolCall
from run_files.parquet_files import UnreadableFile
from sglang_rollout import rollout_manager
from sglang_rollout.agent.branching import EntropyBranching
from sglang_rollout.agent.paused_groups import PausedGroup, read_paused_groups, write_paused_groups
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.written_calls import ParsedCall
from sglang_rollout.groups import Changes
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit import traced_rows
from tests.kit.abortable_engine import AbortableEngine
from tests.kit.scripted import Prompt, ScriptedTools
from tests.test_routed_experts import make_rows

TWO = SamplingConfig(n=2)
PROMPTS = [Prompt([1, 2, 3], group_id, {"row": group_id}) for group_id in range(4, 10)]
# Whatever a model may write, halves of surrogate pairs too.
texts = st.text(st.characters(exclude_categories=()), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def states(draw: st.DrawFn, group_id: int, index: int, age: int) -> TrajectoryState:
    length = draw(st.integers(0, 6))

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=length, max_size=length))

    return TrajectoryState(
        prompt_ids=[],
        group_id=group_id,
        index=index,
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        response_ids=column(st.integers(0, 2**31 - 1)),
        loss_mask=column(st.booleans()),
        log_probs=column(st.floats(-1e3, 0)),
        turn_ids=column(st.integers(-1, 99)),
        weight_versions=column(st.integers(-1, 10**6)),
        tool_calls=draw(st.lists(st.builds(ToolCall, texts, texts, texts, st.floats(0, 9), st.booleans()), max_size=2)),
        turn=draw(st.integers(0, 9)),
        turn_start=draw(st.integers(0, 9)),
        pending_calls=draw(
            st.lists(
                st.builds(ParsedCall, texts, st.dictionaries(texts, json_values, max_size=2), texts, st.none() | texts),
                max_size=2,
            )
        ),
        seconds=draw(st.floats(0, 1e4)),
        timing=draw(st.builds(RolloutTiming, *[st.floats(0, 1e4)] * 3)),
        age=age,
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        reward_info=draw(st.dictionaries(texts, json_values, max_size=2)),
        # The prompt, which is not stored, has rows too.
        routed_experts=[
            make_rows(count, seed=count) for count in draw(st.lists(st.integers(1, 5), max_size=3 if length else 0))
        ],
    )


@st.composite
def paused_groups(draw: st.DrawFn) -> list[PausedGroup]:
    groups = []
    for group_id in draw(st.lists(st.integers(0, 2**40), unique=True, max_size=3)):
        age, count = draw(st.integers(0, 9)), draw(st.integers(1, 3))
        members = [draw(states(group_id, index, age)) for index in range(count)]
        groups.append(PausedGroup(group_id, count + draw(st.integers(0, 2)), age, members))
    return groups


@settings(max_examples=30, deadline=None)
@given(paused_groups())
def test_what_is_read_is_what_was_written(tmp_path_factory, groups):
    path = tmp_path_factory.getbasetemp() / "paused_groups.parquet"
    write_paused_groups(groups, path)
    assert list(map(comparable, read_paused_groups(path))) == list(map(comparable, groups))


def comparable(group: PausedGroup) -> PausedGroup:
    """With all chunks of routed experts as one list."""
    return replace(
        group,
        states=[
            replace(state, routed_experts=[row for chunk in state.routed_experts for row in chunk.tolist()])
            for state in group.states
        ],
    )


def test_routed_experts_keep_their_type_and_old_files_have_none(tmp_path):
    path = tmp_path / "paused.parquet"
    rows = make_rows(7, dtype=np.int16)
    states = [TrajectoryState([], 3, 0, routed_experts=[rows[:4], rows[4:]]), TrajectoryState([], 3, 1)]
    write_paused_groups([PausedGroup(3, 2, 0, states)], path)
    (group,) = read_paused_groups(path)
    ((read,), none) = (state.routed_experts for state in group.states)
    assert none == [] and read.dtype == np.int16
    np.testing.assert_array_equal(read, rows)
    pq.write_table(pq.read_table(path).drop_columns("routed_experts"), path)
    (group,) = read_paused_groups(path)
    assert [state.routed_experts for state in group.states] == [[], []]


def test_damaged_routed_experts_are_named(tmp_path):
    path = tmp_path / "paused.parquet"
    states = [TrajectoryState([], 3, index, routed_experts=[make_rows(4)]) for index in range(3)]
    write_paused_groups([PausedGroup(3, 3, 0, states)], path)
    table = pq.read_table(path)
    values = table["routed_experts"].to_pylist()
    values[1]["data"] = values[1]["data"][:-1]
    place = table.column_names.index("routed_experts")
    pq.write_table(table.set_column(place, "routed_experts", pa.array(values, stored_type())), path)
    with pytest.raises(UnreadableFile, match=r"paused.parquet, row 1: cannot be read: routed_experts has 23 bytes"):
        read_paused_groups(path)


def test_branching_decides_the_same_after_a_restart(tmp_path):
    config = BranchingConfig(enable=True, initial_rollouts=2, beam_size=3, timing="before_tool_result")
    branching = EntropyBranching(config, 8, 320, seed=5)
    branching._initial, branching._latest = {0: [0.5], 1: [0.25]}, {0: [1.0, 0.5]}
    state = TrajectoryState([], 3, 0, seed=11, turn=1)
    forks: list[TrajectoryState] = []
    for _ in range(3):
        branching._fork_by_chance(state, forks.append)
    group = PausedGroup(3, 8, 1, [replace(state, age=1)], branching.state_dict())
    write_paused_groups([group], tmp_path / "paused.parquet")
    (read,) = read_paused_groups(tmp_path / "paused.parquet")
    restored = EntropyBranching(config, 8, 320, seed=6)
    restored.load_state_dict(read.branching)
    expected: list[TrajectoryState] = []
    actual: list[TrajectoryState] = []
    for _ in range(3):
        branching._fork_by_chance(state, expected.append)
        restored._fork_by_chance(state, actual.append)
    assert actual == expected and forks + expected
    assert restored.top_up() == branching.top_up()


def make_config(*overrides: str):
    return load_config(
        None, ["rollout.partial.enable=true", "rollout.engine.random_seed=7", "rollout.train.n=2", *overrides]
    )


def through_a_file(manager: RolloutManager, path) -> list[PausedGroup]:
    write_paused_groups(manager.finish_step(), path)
    return read_paused_groups(path)


def test_another_manager_goes_on_where_the_first_one_was(tokenizer, tmp_path):
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            config = make_config(*traced_rows.OVERRIDES)
            async with RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as manager:
                async with aclosing(manager.stream(PROMPTS, TWO)) as stream:
                    first = await anext(stream)
                paused = through_a_file(manager, tmp_path / "paused.parquet")
            engine.version = 1
            async with RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as manager:
                manager.restore_paused(paused, reversed(PROMPTS))
                assert len(manager.paused_group_ids) == 5
                second = await manager.generate_groups([], TWO)
                return engine, first, paused, second, manager.statistics

    engine, first, paused, second, statistics = asyncio.run(scenario())
    assert sorted([first[0].group_id, *(group[0].group_id for group in second)]) == [p.group_id for p in PROMPTS]
    before = {(state.group_id, state.index): state for group in paused for state in group.states}
    assert len(before) == 10
    unfinished = [state for state in before.values() if state.finish_reason is None]
    assert statistics.resumed_trajectories == len(unfinished) > 2
    assert any(state.routed_experts for state in unfinished)
    assert any(state.response_ids[-1] in engine.words for state in unfinished), "none was paused inside a turn"
    for trajectory in (trajectory for group in second for trajectory in group):
        state = before[(trajectory.group_id, trajectory.index)]
        known = len(state.response_ids)
        assert trajectory.response_ids[:known].tolist() == state.response_ids
        assert trajectory.rollout_log_probs[:known].tolist() == pytest.approx(state.log_probs)
        assert trajectory.weight_versions[:known].tolist() == state.weight_versions
        sampled = trajectory.loss_mask
        ids, log_probs = engine.answer(state.seed)
        assert trajectory.response_ids[sampled].tolist() == ids
        assert trajectory.rollout_log_probs[sampled].tolist() == pytest.approx(log_probs)
        assert set(trajectory.weight_versions[known:][sampled[known:]]) <= {1}
        # Rows that were known before are not asked for again: an engine with new weights would send others.
        traced_rows.check(trajectory)
        rows = [row for chunk in state.routed_experts for row in chunk.tolist()]
        assert trajectory.routed_experts[: len(rows)].tolist() == rows
        assert trajectory.prompt_ids.tolist() == [1, 2, 3] and trajectory.extra_info == {"row": trajectory.group_id}
        assert len(trajectory.tool_calls) == 1 and trajectory.finish_reason is FinishReason.STOP


def test_calls_without_a_result_are_made_again(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_manager, "STOP_SECONDS", 0.2)

    async def scenario():
        async with AbortableEngine(tokenizer, seconds_per_token=0.0) as engine:
            async with RolloutManager(make_config(), tokenizer, [engine.url], ScriptedTools(seconds=30)) as manager:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(manager.stream(PROMPTS[:1], TWO)), 0.3)
                paused = through_a_file(manager, tmp_path / "paused.parquet")
            tools = ScriptedTools()
            async with RolloutManager(make_config(), tokenizer, [engine.url], tools) as manager:
                manager.restore_paused(paused, PROMPTS)
                return paused, await manager.generate_groups([], TWO), tools

    paused, (group,), tools = asyncio.run(scenario())
    assert [len(state.pending_calls) for state in paused[0].states] == [1, 1] and len(tools.calls) == 2
    assert all(len(t.tool_calls) == 1 and t.finish_reason is FinishReason.STOP for t in group)


async def stopped(manager: RolloutManager, prompts: list[Prompt]) -> None:
    """A training stream that is left before any group is complete."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(manager.stream(prompts, TWO)), 0.15)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(rollout_manager, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(rollout_manager, "ABORT_REPEAT_SECONDS", 0.05)


def test_calls_that_outlast_steps_are_made_once(tokenizer, impatient):
    async def scenario():
        tools = ScriptedTools(seconds=1.5)
        async with (
            AbortableEngine(tokenizer, seconds_per_token=0.0) as engine,
            RolloutManager(make_config(), tokenizer, [engine.url], tools) as manager,
        ):
            await stopped(manager, PROMPTS[:1])
            stored = manager.finish_step()
            await stopped(manager, [])
            manager.finish_step()
            assert tools.running == 2
            groups = await manager.generate_groups([], TWO)
            return stored, groups, tools, manager.statistics

    (stored,), (group,), tools, statistics = asyncio.run(scenario())
    assert len(tools.calls) == 2 and statistics.resumed_trajectories == 4
    assert all(len(t.tool_calls) == 1 and t.finish_reason is FinishReason.STOP for t in group)
    assert [len(state.pending_calls) for state in stored.states] == [1, 1], "a restarted run makes them again"


def test_calls_that_end_between_two_steps_are_made_once(tokenizer, impatient):
    async def scenario():
        tools = ScriptedTools(seconds=0.4)
        async with (
            AbortableEngine(tokenizer, seconds_per_token=0.0) as engine,
            RolloutManager(make_config(), tokenizer, [engine.url], tools) as manager,
        ):
            await stopped(manager, PROMPTS[:1])
            await asyncio.sleep(0.5)
            (paused,) = manager.finish_step()
            return paused, await manager.generate_groups([], TWO), tools

    paused, (group,), tools = asyncio.run(scenario())
    assert [len(state.tool_calls) for state in paused.states] == [1, 1]
    assert all(t.finish_reason is FinishReason.STOP for t in group) and len(tools.calls) == 2


@pytest.mark.parametrize("end", ["max_age", "drop", "abort", "close"])
def test_calls_of_trajectories_that_are_dropped_are_ended(tokenizer, impatient, end):
    async def scenario():
        tools = ScriptedTools(seconds=30)
        async with AbortableEngine(tokenizer, seconds_per_token=0.0) as engine:
            config = make_config("rollout.partial.max_age=0" if end == "max_age" else "rollout.partial.max_age=9")
            async with RolloutManager(config, tokenizer, [engine.url], tools) as manager:
                await stopped(manager, PROMPTS[:1])
                assert tools.running == 2
                if end == "max_age":
                    manager.finish_step()
                elif end == "drop":
                    manager.drop_paused()
                elif end == "abort":
                    tools.seconds = 0.0
                    async with aclosing(manager.stream(PROMPTS[1:2], TWO)) as stream:
                        await anext(stream)
                        with pytest.raises(StopAsyncIteration):
                            await stream.asend(Changes(abort=[PROMPTS[0].group_id]))
                if end != "close":
                    await asyncio.sleep(0.05)
                    assert tools.running == 0
            assert tools.running == 0

    asyncio.run(scenario())


def test_groups_that_branch_no_more_are_filled_from_the_prompt(tokenizer):
    async def scenario():
        async with AbortableEngine(tokenizer, seconds_per_token=0.0) as engine:
            branching = {"started": 1}
            half = PausedGroup(4, 3, 1, [TrajectoryState([], 4, 0, seed=8)], branching)
            async with RolloutManager(make_config(), tokenizer, [engine.url], ScriptedTools()) as manager:
                with pytest.raises(ValueError, match="prompt of the paused group 4 is missing"):
                    manager.restore_paused([half], PROMPTS[1:])
                manager.restore_paused([half], PROMPTS)
                return await manager.generate_groups([], TWO)

    (group,) = asyncio.run(scenario())
    assert [(t.group_id, t.index) for t in group] == [(4, 0), (4, 1), (4, 2)]
