"""Environments in place of tools and reward function: turns, rewards, outcomes, pauses, forks and wrong settings."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from megatron_retool.config import ConfigError, RewardConfig, SamplingConfig, ValSamplingConfig, load_config
from megatron_retool.loop.metrics import rollout_metrics
from megatron_retool.registry import ExtensionError
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.rollout_rows import AGENT_KEY
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.agents import check_agent, make_agent
from sglang_rollout.agent.paused_groups import read_paused_groups, write_paused_groups
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit.abortable_engine import AbortableEngine
from tests.kit.markov_policy import ANSWER, CALL, CALL_BROKEN, CALL_UNKNOWN, WORD, hermes_call
from tests.kit.scripted import Prompt, ScriptedTools
from tests.kit.watched_tokenizer import WatchedTokenizer, largest_gap
from tests.sglang_rollout.agent.test_loop import END, ScriptedEngine
from tests.sglang_rollout.environments import worlds

HERE = "tests.sglang_rollout.environments.worlds"
TURNS = [WORD + CALL + END, CALL + CALL + END, ANSWER + END]
MESSAGES = [{"role": "user", "content": "the data's question"}]


def settings(name: str, *overrides: str):
    return load_config(None, [f"rollout.environment={HERE}:{name}", "rollout.multi_turn.tools=[]", *overrides])


@pytest.fixture(autouse=True)
def no_worlds():
    worlds.Counting.made.clear()


def started(tokenizer) -> TrajectoryState:
    ids = tokenizer.encode("user\n", add_special_tokens=False)
    return TrajectoryState(ids, group_id=3, index=1, extra_info={"ground_truth": "7", "row": 2}, messages=MESSAGES)


def lived(tokenizer, config, turns, state=None) -> TrajectoryState:
    state = state or started(tokenizer)
    agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
    assert asyncio.run(agent.run(state, ScriptedEngine(tokenizer, turns), lambda: False))
    return state


def test_the_environment_gives_prompt_tools_answers_and_reward(tokenizer):
    config = settings("Counting", "rollout.environment_kwargs={greeting: hello, weight: 0.5}")
    state = lived(tokenizer, config, TURNS)
    prompt, text = tokenizer.decode(state.prompt_ids), tokenizer.decode(state.response_ids)
    assert "hello 3" in prompt and "Run a line." in prompt and "the data's question" not in prompt
    first = f"{WORD}{CALL}{END}\n<|im_start|>user\n<tool_response>\ncount 1\n</tool_response>{END}\n"
    assert text.startswith(first + "<|im_start|>assistant\n") and text.endswith(ANSWER + END)
    assert "count 2\n</tool_response>\n<tool_response>\ncount 3" in text
    row = state.to_trajectory()
    assert row.finish_reason is FinishReason.STOP
    sampled = tokenizer.decode(row.response_ids[row.loss_mask].tolist())
    assert sampled == "".join(TURNS)
    assert [(call.name, call.status) for call in row.tool_calls] == [("code_interpreter", "ok")] * 3
    assert row.tool_calls[0].position == 1
    (world,) = worlds.Counting.made
    assert world.closed == 1 and world.last.text == ANSWER
    assert (world.row["ground_truth"], world.row["extra_info"], world.row["index"]) == ("7", {"row": 2}, 1)
    with RewardManager(RewardConfig(), tokenizer) as manager:
        manager.score([row])
    assert (row.reward, row.accuracy, row.reward_info["calls"]) == (1.5, 0.0, 3)
    metrics = rollout_metrics([row])
    assert metrics["agent/outcome/finished"] == metrics["agent/own_reward"] == 1.0


def test_an_environment_that_talks_gets_every_turn_and_cannot_forge_one(tokenizer):
    state = lived(tokenizer, settings("Talking"), [WORD + END, WORD + WORD + END, ANSWER + END])
    assert tokenizer.decode(state.prompt_ids) == "user\n", "the data's prompt"
    text = tokenizer.decode(state.response_ids)
    user = "\n<|im_start|>user\n< |im_end|>go on after {}" + END + "\n<|im_start|>assistant\n"
    assert text == f"{WORD}{END}{user.format(4)}{WORD}{WORD}{END}{user.format(8)}{ANSWER}{END}"
    assert state.reward_info[AGENT_KEY]["result"]["score"] == 3.0


def test_bad_calls_are_answered_by_the_loop(tokenizer):
    no_code = hermes_call("1").replace('"code"', '"kode"')
    turns = [CALL_UNKNOWN + CALL_BROKEN + END, CALL_BROKEN + CALL + no_code + END, ANSWER + END]
    state = lived(tokenizer, settings("Counting"), turns)
    statuses = [call.status for call in state.tool_calls]
    assert statuses == ["unknown_tool", "parse_error", "parse_error", "ok", "bad_arguments"]
    text = tokenizer.decode(state.response_ids)
    parts = text.split("<tool_response>\n")[1:]
    for part, beginning in zip(
        parts,
        ["Error: there is no", "Error: invalid tool", "Error: invalid tool", "count 1", "Error: bad arg"],
        strict=True,
    ):
        assert part.startswith(beginning)
    assert state.reward_info[AGENT_KEY]["result"]["calls"] == 1


@pytest.mark.parametrize(
    ("how", "outcome", "reason", "message"),
    [
        ("reset raises", "crash", "aborted", r"reset: Failing raised RuntimeError .*no world"),
        ("reset returns a list", "crash", "aborted", r"reset returned \[\], and not a Start"),
        ("prompt too long", "context_overflow", "length", "data.max_prompt_length=2048"),
        ("step raises", "crash", "aborted", "step: Failing raised KeyError"),
        ("step hangs", "timeout", "aborted", "environment_timeout_seconds"),
        ("own timeout", "crash", "aborted", "TimeoutError.*of its own"),
        ("exits", "crash", "aborted", "SystemExit"),
        ("too few messages", "crash", "aborted", "a message of role tool for each of 1 calls"),
        ("score hangs", "timeout", None, "took longer than 0.5 s"),
        ("no reward", "bad_result", "stop", "good"),
        ("none", "finished", "stop", None),
    ],
)
def test_a_failure_ends_its_trajectory_with_a_typed_outcome(tokenizer, how, outcome, reason, message):
    config = settings(
        "Failing",
        f"rollout.environment_kwargs={{how: {how}}}",
        f"rollout.environment_timeout_seconds={0.5 if 'hangs' in how else 60}",
        "data.max_prompt_length=2048",
    )
    state = lived(tokenizer, config, [CALL + END, ANSWER + END])
    end = state.reward_info[AGENT_KEY]
    assert end["outcome"] == outcome and "result" not in end
    assert reason is None or state.finish_reason is FinishReason(reason)
    if message is None:
        assert "message" not in end
    else:
        import re

        assert re.search(message, end["message"], re.S)
    assert all(world.closed == 1 for world in worlds.Counting.made)
    state.to_trajectory()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.multi_turn.max_assistant_turns=2", FinishReason.TOOL_LIMIT),
        ("rollout.multi_turn.max_tool_calls=2", FinishReason.TOOL_LIMIT),
        ("data.max_response_length=30", FinishReason.LENGTH),
        ("rollout.multi_turn.max_wall_seconds=1", FinishReason.ABORTED),
    ],
)
def test_limits_end_an_episode_and_it_still_has_its_score(tokenizer, override, reason):
    config = settings("Counting", override)
    state = started(tokenizer)
    agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
    seconds = 0.4 if reason is FinishReason.ABORTED else 0.0
    assert asyncio.run(agent.run(state, ScriptedEngine(tokenizer, TURNS, seconds=seconds), lambda: False))
    end = state.reward_info[AGENT_KEY]
    assert state.finish_reason is reason and "score" in end["result"]
    assert end["outcome"] == ("timeout" if reason is FinishReason.ABORTED else "finished")
    assert len(state.response_ids) <= config.data.max_response_length


def test_long_texts_of_an_environment_do_not_stop_the_event_loop():
    async def played() -> None:
        tokenizer, done = WatchedTokenizer(), asyncio.Event()
        much = ["data.max_prompt_length=80000", "data.max_response_length=80000"]
        config = settings("Verbose", *much, "rollout.multi_turn.max_tool_response_tokens=80000")
        agent, state = make_agent(config.rollout, config.data, tokenizer, ScriptedTools()), started(tokenizer)
        engine = ScriptedEngine(tokenizer, [WORD + END, ANSWER + END])
        tokenizer.seconds = seconds = 0.5
        watching = asyncio.create_task(largest_gap(done))
        assert await agent.run(state, engine, lambda: False)
        done.set()
        assert len(state.prompt_ids) > 40_000 and len(state.response_ids) > 40_000
        assert await watching < seconds / 2

    asyncio.run(played())


def test_an_engine_that_ends_requests_by_itself_is_asked_again(tokenizer):
    scripted = ScriptedEngine(tokenizer, [CALL + END, ANSWER + END])
    requests = 0

    async def generate(state, most, deadline):
        nonlocal requests
        requests += 1
        return GenerateResult([], [], [], "abort") if requests % 2 else await scripted(state, most, deadline)

    state = started(tokenizer)
    config = settings("OneWay")
    agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
    assert asyncio.run(agent.run(state, generate, lambda: False))
    assert state.finish_reason is FinishReason.STOP and len(worlds.Counting.made) == 1


def test_what_replays_goes_on_after_a_pause_at_any_place(tokenizer):
    config = settings("Counting")
    agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
    whole = lived(tokenizer, config, TURNS)
    for stop_after in range(1, 12):
        state, engine, looks = started(tokenizer), ScriptedEngine(tokenizer, TURNS), 0

        def paused(stop_after=stop_after):
            nonlocal looks
            looks += 1
            return looks == stop_after

        lives = 0
        while not asyncio.run(agent.run(state, engine, paused)):
            lives += 1
        assert lives <= 1 and state.response_ids == whole.response_ids
        assert [call.status for call in state.tool_calls] == ["ok"] * 3
        assert state.reward_info[AGENT_KEY]["result"] == whole.reward_info[AGENT_KEY]["result"]
    assert all(world.closed == 1 for world in worlds.Counting.made)


def test_an_environment_that_only_says_that_it_replays_is_found_out(tokenizer):
    config = settings("Fickle")
    agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
    state, engine = started(tokenizer), ScriptedEngine(tokenizer, TURNS)
    assert asyncio.run(agent.run(state, engine, lambda: bool(state.tool_calls))) is False
    assert asyncio.run(agent.run(state, engine, lambda: False))
    end = state.reward_info[AGENT_KEY]
    assert end["outcome"] == "crash" and "answered turn 0 otherwise" in end["message"]


def prompts(count: int) -> list[Prompt]:
    rows = [Prompt([1, 2], group_id, {"uid": str(group_id)}) for group_id in range(count)]
    for row in rows:
        row.messages = MESSAGES
    return rows


MANAGED = ["rollout.engine.random_seed=3", "rollout.request_retries=1", "rollout.engine.health_timeout_seconds=1"]


def test_groups_of_a_run_are_paused_stored_and_go_on(tokenizer, tmp_path):
    """As test_rollout_manager's partial rollout; the episodes are gone through again, after a restart as well."""
    config = settings("Counting", *MANAGED, "rollout.partial.enable=true")

    async def generated(pause: bool):
        async with AbortableEngine(tokenizer) as engine:
            async with RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as manager:
                if not pause:
                    return await manager.generate_groups(prompts(3), SamplingConfig(n=2))
                async with aclosing(manager.stream(prompts(3), SamplingConfig(n=2))) as stream:
                    first = await anext(stream)
                kept = manager.finish_step()
                assert kept, "something was paused"
                write_paused_groups(kept, tmp_path / "paused.parquet")
            async with RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as resumed:
                resumed.restore_paused(read_paused_groups(tmp_path / "paused.parquet"), prompts(3))
                return [first, *await resumed.generate_groups([], SamplingConfig(n=2))]

    def ids(groups):
        return {row.key: (row.prompt_ids.tolist(), row.response_ids.tolist()) for group in groups for row in group}

    whole, again = asyncio.run(generated(False)), asyncio.run(generated(True))
    assert ids(whole) == ids(again)
    assert {row.reward_info[AGENT_KEY]["result"]["score"] for group in again for row in group} == {1.0}


def test_a_fork_goes_through_its_parents_episode(tokenizer):
    overrides = ["rollout.branching.enable=true", "rollout.branching.initial_rollouts=4"]
    config = settings("Counting", *overrides)
    agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
    parent, engine, forks = started(tokenizer), ScriptedEngine(tokenizer, TURNS), []

    async def generate(state, most, deadline):
        if state.turn == 1 and not forks:
            forks.append(state.fork(1, seed=9))
        return await engine(state, most, deadline)

    assert asyncio.run(agent.run(parent, generate, lambda: False))
    (fork,) = forks
    assert asyncio.run(agent.run(fork, ScriptedEngine(tokenizer, [CALL + END, ANSWER + END]), lambda: False))
    results = [state.reward_info[AGENT_KEY]["result"]["calls"] for state in (parent, fork)]
    assert results == [3, 2] and [len(state.tool_calls) for state in (parent, fork)] == [3, 2]
    assert len(worlds.Counting.made) == 2


def test_validation_runs_in_the_environment_too(tokenizer):
    async def scenario():
        config = settings("OneWay", *MANAGED)
        async with (
            AbortableEngine(tokenizer) as engine,
            RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as manager,
        ):
            return await manager.generate_groups(prompts(2), ValSamplingConfig(n=2), "validation")

    rows = [row for group in asyncio.run(scenario()) for row in group]
    assert [row.reward_info[AGENT_KEY]["result"]["score"] for row in rows] == [1.0] * 4


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["rollout.agent=x.py:run"], ConfigError, "leads the built-in agent"),
        (["rollout.multi_turn.tools=[search]"], ConfigError, r"set it to \[\]"),
        ([f"rollout.environment={HERE}:Nothing"], ExtensionError, "has no 'Nothing'"),
        ([f"rollout.environment={HERE}:not_an_environment"], ExtensionError, "dict is no environment"),
        (["rollout.environment_kwargs={weigth: 1}"], ExtensionError, "environment_kwargs.weigth: .* weight"),
        (["rollout.partial.enable=true"], ExtensionError, "rollout.partial.enable to false, or replays = True"),
        (
            ["rollout.branching.enable=true", "rollout.train.n=8"],
            ExtensionError,
            "rollout.branching forks trajectories, and OneWay cannot be gone",
        ),
        (["rollout.environment=null", "rollout.environment_kwargs={a: 1}"], ConfigError, "needs rollout.environment"),
    ],
)
def test_wrong_settings_are_one_message_before_anything_starts(overrides, error, message):
    with pytest.raises(error, match=message):
        check_agent(settings("OneWay", *overrides).rollout)


def test_a_format_without_messages_is_refused(tokenizer):
    config = settings("OneWay", "rollout.multi_turn.format=retool")
    with pytest.raises(ExtensionError, match="format=retool"):
        make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
