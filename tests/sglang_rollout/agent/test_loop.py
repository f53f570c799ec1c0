from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from megatron_retool.config import MultiTurnConfig, RewardConfig
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.long_texts import LARGE
from sglang_rollout.agent.loop import AgentLoop, AgentSetup
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from tests.kit.markov_policy import (
    ANSWER,
    CALL,
    CALL_BROKEN,
    CALL_LONG,
    CALL_UNKNOWN,
    WORD,
    hermes_call,
)
from tests.kit.scripted import ScriptedTools
from tests.kit.watched_tokenizer import WatchedTokenizer, largest_gap
from tools.tool import ToolResult

END = "<|im_end|>"


class ScriptedEngine:
    """Answers each request with the next turn of a script; keeps what it was asked."""

    def __init__(self, tokenizer, turns: list[str], reason: str = "stop", seconds: float = 0.0) -> None:
        self.tokenizer, self.turns, self.reason, self.seconds = tokenizer, list(turns), reason, seconds
        self.requests: list[tuple[list[int], int]] = []
        self.version = 5

    async def __call__(self, state: TrajectoryState, max_new_tokens: int, deadline: float) -> GenerateResult:
        self.requests.append((state.prompt_ids + state.response_ids, max_new_tokens))
        await asyncio.sleep(min(self.seconds, deadline))
        if self.seconds > deadline:
            return GenerateResult([], [], [], "abort")
        ids = self.tokenizer.encode(self.turns.pop(0), add_special_tokens=False)
        reason, matched = self.reason, ids[-1]
        if len(ids) > max_new_tokens:
            ids, reason = ids[:max_new_tokens], "length"
        log_probs = [-0.5 - 0.01 * position for position in range(len(ids))]
        return GenerateResult(ids, log_probs, [self.version] * len(ids), reason, matched if reason == "stop" else None)


def make_loop(tokenizer, tools=None, max_response_length=2000, **limits) -> AgentLoop:
    config = MultiTurnConfig(**{"max_tool_response_tokens": 60, **limits})
    return AgentLoop(AgentSetup(config, tokenizer, tools or ScriptedTools(), max_response_length))


def run(loop: AgentLoop, engine: ScriptedEngine, prompt: str = "user\n") -> TrajectoryState:
    state = TrajectoryState(engine.tokenizer.encode(prompt, add_special_tokens=False), group_id=3, index=1)
    assert asyncio.run(loop.run(state, engine))
    return state


def test_two_turns_with_a_tool(tokenizer):
    engine = ScriptedEngine(tokenizer, [WORD + CALL + END, ANSWER + END])
    loop = make_loop(tokenizer)
    state = run(loop, engine)
    trajectory = state.to_trajectory()
    assert trajectory.finish_reason is FinishReason.STOP
    text = tokenizer.decode(trajectory.response_ids.tolist())
    assert text == (
        f"{WORD}{CALL}{END}\n<|im_start|>user\n<tool_response>\n42\n</tool_response>{END}\n<|im_start|>assistant\n"
        f"{ANSWER}{END}"
    )
    sampled = tokenizer.decode(trajectory.response_ids[trajectory.loss_mask].tolist())
    assert sampled == WORD + CALL + END + ANSWER + END
    assert trajectory.turn_ids[trajectory.loss_mask].tolist() == [0, 0, 0, 1, 1]
    assert set(trajectory.weight_versions[trajectory.loss_mask].tolist()) == {5}
    assert set(trajectory.weight_versions[~trajectory.loss_mask].tolist()) == {-1}
    assert np.all(trajectory.rollout_log_probs[trajectory.loss_mask] < 0)
    (call,) = trajectory.tool_calls
    assert (call.name, call.status, call.output_tokens, call.output_truncated) == ("code_interpreter", "ok", 2, False)
    assert call.position == 1
    # The second request is the first one's ids, what was sampled, and the result: nothing re-tokenised.
    first, second = (request for request, _ in engine.requests)
    assert second[: len(first)] == first
    assert second[len(first) :] == trajectory.response_ids[: len(second) - len(first)].tolist()


@pytest.mark.parametrize(
    ("call", "status", "told"),
    [
        (CALL_BROKEN, "parse_error", "Invalid \\escape"),
        (CALL_UNKNOWN, "unknown_tool", "unknown tool no_such_tool"),
        (hermes_call("raise"), "error", "the tool failed: RuntimeError"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_counted(tokenizer, call, status, told):
    engine = ScriptedEngine(tokenizer, [call + END, ANSWER + END])
    trajectory = run(make_loop(tokenizer), engine).to_trajectory()
    assert trajectory.finish_reason is FinishReason.STOP
    assert [c.status for c in trajectory.tool_calls] == [status]
    assert told in tokenizer.decode(trajectory.response_ids.tolist())


def test_long_tool_output_is_cut_and_marked(tokenizer):
    engine = ScriptedEngine(tokenizer, [CALL_LONG + END, ANSWER + END])
    (call,) = run(make_loop(tokenizer), engine).tool_calls
    assert call.output_truncated and call.output_tokens <= 60


class LongTools(ScriptedTools):
    """A tool that says a lot."""

    async def call(self, name, arguments):
        return ToolResult("ok", "z" * (2 * LARGE))


def test_a_long_result_does_not_stop_the_event_loop():
    async def lived() -> None:
        tokenizer = WatchedTokenizer()
        loop = make_loop(tokenizer, LongTools(), max_response_length=100_000, max_tool_response_tokens=90_000)
        engine = ScriptedEngine(tokenizer, [CALL + END, ANSWER + END])
        state = TrajectoryState([1], group_id=0, index=0)
        tokenizer.seconds = seconds = 0.5
        done = asyncio.Event()
        watching = asyncio.create_task(largest_gap(done))
        began = time.monotonic()
        assert await loop.run(state, engine)
        assert time.monotonic() - began > seconds and len(state.response_ids) > 2 * LARGE
        done.set()
        assert await watching < seconds / 2

    asyncio.run(lived())


def test_calls_of_one_turn_run_side_by_side(tokenizer):
    tools = ScriptedTools(seconds=0.02)
    engine = ScriptedEngine(tokenizer, [CALL + WORD + CALL + CALL + END, WORD + CALL + END, ANSWER + END])
    state = run(make_loop(tokenizer, tools), engine)
    assert tools.most_running == 3
    assert [call.position for call in state.tool_calls] == [0, 2, 3, state.turn_ids.index(1) + 1]
    assert 0.04 <= state.to_trajectory().timing.tools < 0.02 * 4 + state.seconds


def test_turn_limit(tokenizer):
    engine = ScriptedEngine(tokenizer, [CALL + END] * 5)
    state = run(make_loop(tokenizer, max_assistant_turns=3), engine)
    assert state.finish_reason is FinishReason.TOOL_LIMIT
    assert len(state.tool_calls) == 2 and max(state.turn_ids) == 2


def test_call_limit_counts_calls_not_turns(tokenizer):
    engine = ScriptedEngine(tokenizer, [CALL + CALL + END, CALL + CALL + END, ANSWER + END])
    tools = ScriptedTools()
    state = run(make_loop(tokenizer, tools, max_tool_calls=3), engine)
    assert state.finish_reason is FinishReason.TOOL_LIMIT
    assert len(state.tool_calls) == len(tools.calls) == 2


class StopsAtTag(ScriptedEngine):
    """Ends turns at a closing tag, as an engine does with a stop string."""

    async def __call__(self, state, max_new_tokens, deadline):
        result = await super().__call__(state, max_new_tokens, deadline)
        return dataclasses.replace(result, matched_stop="</python>") if result.finish_reason == "stop" else result


PYTHON = "<python>print(6*7)</python>"


@pytest.mark.parametrize("limit", [{"max_tool_calls": 1}, {"max_assistant_turns": 2}])
def test_a_tag_format_may_end_with_eos_at_the_limit(tokenizer, limit):
    def ended(at_tool_limit):
        loop = make_loop(tokenizer, format="arpo", at_tool_limit=at_tool_limit, **limit)
        return run(loop, StopsAtTag(tokenizer, [PYTHON, PYTHON])).to_trajectory()

    plain, with_eos = ended("stop"), ended("append_eos")
    assert plain.finish_reason is with_eos.finish_reason is FinishReason.TOOL_LIMIT
    assert len(plain.tool_calls) == len(with_eos.tool_calls) == 1
    assert tokenizer.decode(plain.response_ids.tolist()).endswith("</python>")
    # The policy did not sample it: no loss, no log-prob, no turn, no weights.
    assert with_eos.response_ids.tolist() == [*plain.response_ids.tolist(), tokenizer.eos_token_id]
    assert with_eos.loss_mask.tolist() == [*plain.loss_mask.tolist(), False]
    assert with_eos.rollout_log_probs.tolist() == [*plain.rollout_log_probs.tolist(), 0.0]
    assert with_eos.turn_ids.tolist() == [*plain.turn_ids.tolist(), -1]
    assert with_eos.weight_versions.tolist() == [*plain.weight_versions.tolist(), -1]
    assert with_eos.num_turns == plain.num_turns == 3


def test_eos_at_the_limit_is_never_written_twice_nor_beyond_the_length(tokenizer):
    engine = ScriptedEngine(tokenizer, [CALL + CALL + END])
    state = run(make_loop(tokenizer, max_tool_calls=1, at_tool_limit="append_eos"), engine)
    assert state.finish_reason is FinishReason.TOOL_LIMIT and state.response_ids.count(tokenizer.eos_token_id) == 1
    length = len(tokenizer.encode(PYTHON, add_special_tokens=False))
    for room in (0, 1):
        loop = make_loop(
            tokenizer, max_response_length=length + room, format="arpo", max_tool_calls=0, at_tool_limit="append_eos"
        )
        state = run(loop, StopsAtTag(tokenizer, [PYTHON]))
        assert state.finish_reason is FinishReason.TOOL_LIMIT and len(state.response_ids) == length + room


def test_an_answer_in_the_last_turn_is_a_stop(tokenizer):
    engine = ScriptedEngine(tokenizer, [CALL + END, ANSWER + END])
    assert run(make_loop(tokenizer, max_assistant_turns=2), engine).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 40, 60, 61, 62, 200])
def test_the_response_never_exceeds_its_limit_and_columns_agree(tokenizer, limit):
    engine = ScriptedEngine(tokenizer, [WORD + CALL + END] * 20)
    state = run(make_loop(tokenizer, max_response_length=limit, max_assistant_turns=20, max_tool_calls=20), engine)
    assert state.finish_reason is FinishReason.LENGTH
    trajectory = state.to_trajectory()
    assert len(trajectory.response_ids) == limit
    for asked, most in engine.requests:
        assert len(asked) - len(state.prompt_ids) + most == limit


def test_a_tool_result_that_reaches_the_limit_is_cut_there(tokenizer):
    engine = ScriptedEngine(tokenizer, [CALL + END, ANSWER + END])
    full = run(make_loop(tokenizer), ScriptedEngine(tokenizer, [CALL + END, ANSWER + END])).response_ids
    state = run(make_loop(tokenizer, max_response_length=20), engine)
    trajectory = state.to_trajectory()
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.response_ids.tolist() == full[:20]
    assert trajectory.loss_mask.tolist() == [True, True] + [False] * 18
    assert len(trajectory.tool_calls) == 1


def test_no_tool_runs_when_its_result_could_not_be_shown(tokenizer):
    tools = ScriptedTools()
    state = run(make_loop(tokenizer, tools, max_response_length=2), ScriptedEngine(tokenizer, [CALL + END]))
    assert state.finish_reason is FinishReason.LENGTH and tools.calls == []


def test_context_length_limits_too(tokenizer):
    loop = AgentLoop(AgentSetup(MultiTurnConfig(), tokenizer, ScriptedTools(), 1000, context_length=30))
    state = run(loop, ScriptedEngine(tokenizer, [WORD * 100]), prompt="x" * 20)
    assert state.finish_reason is FinishReason.LENGTH and len(state.response_ids) == 10


def test_wall_time_ends_a_request(tokenizer):
    loop = make_loop(tokenizer, max_wall_seconds=0.05)
    state = run(loop, ScriptedEngine(tokenizer, [WORD + END], seconds=5.0))
    assert state.finish_reason is FinishReason.ABORTED


def test_wall_time_ends_a_tool(tokenizer):
    loop = make_loop(tokenizer, ScriptedTools(seconds=5.0), max_wall_seconds=0.1)
    state = run(loop, ScriptedEngine(tokenizer, [CALL + END]))
    assert state.finish_reason is FinishReason.ABORTED
    state.to_trajectory()


def test_a_paused_trajectory_goes_on_with_the_ids_it_had(tokenizer):
    loop = make_loop(tokenizer)
    state = TrajectoryState([1, 2], group_id=0, index=0)
    word = tokenizer.encode(WORD, add_special_tokens=False)

    async def interrupted(current, max_new_tokens, deadline):
        return GenerateResult(word * 3, [-1.0] * 3, [5] * 3, "abort")

    assert asyncio.run(loop.run(state, interrupted)) is False
    assert state.finish_reason is None and state.response_ids == word * 3
    engine = ScriptedEngine(tokenizer, [WORD + CALL + END, ANSWER + END])
    engine.version = 6
    assert asyncio.run(loop.run(state, engine))
    trajectory = state.to_trajectory()
    assert engine.requests[0][0] == [1, 2] + word * 3
    assert trajectory.weight_versions[trajectory.loss_mask].tolist() == [5, 5, 5, 6, 6, 6, 6, 6]
    # The interrupted turn is one turn, and the call in it was found.
    assert trajectory.turn_ids[trajectory.loss_mask].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [c.status for c in trajectory.tool_calls] == ["ok"]


def test_calls_that_were_cut_off_run_again(tokenizer):
    tools = ScriptedTools(seconds=5.0)
    loop, engine = make_loop(tokenizer, tools), ScriptedEngine(tokenizer, [CALL + END, ANSWER + END])
    state = TrajectoryState([1], 0, 0)

    async def interrupted():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.run(state, engine), 0.1)

    asyncio.run(interrupted())
    assert len(state.pending_calls) == 1 and state.tool_calls == [] and state.finish_reason is None
    tools.seconds = 0.0
    assert asyncio.run(loop.run(state, engine))
    whole = run(make_loop(tokenizer), ScriptedEngine(tokenizer, [CALL + END, ANSWER + END]))
    assert state.response_ids == whole.response_ids and len(state.tool_calls) == 1 and len(tools.calls) == 2


def test_older_tokens_can_be_taken_out_of_the_loss(tokenizer):
    state = TrajectoryState([1], 0, 0, finish_reason=FinishReason.STOP)
    state.append_sampled(GenerateResult([7, 8], [-1.0, -2.0], [3, 4], "stop"))
    trajectory = state.to_trajectory(oldest_version=4)
    assert trajectory.loss_mask.tolist() == [False, True]
    assert trajectory.rollout_log_probs.tolist() == [0.0, -2.0]


def test_tokens_taken_out_of_the_loss_still_belong_to_their_turn(tokenizer):
    """The reward reads the last turn, also where a pause or a slow neighbour made it older than the weights."""
    state = run(make_loop(tokenizer), ScriptedEngine(tokenizer, [CALL + END, "\\boxed{42}" + END]))
    state.extra_info = {"ground_truth": "42"}
    current, masked = state.to_trajectory(), state.to_trajectory(oldest_version=6)
    assert current.loss_mask.any() and not masked.loss_mask.any()
    assert masked.turn_ids.tolist() == current.turn_ids.tolist() and masked.num_turns == current.num_turns == 3
    with RewardManager(RewardConfig(), tokenizer) as manager:
        manager.score([current, masked])
    assert masked.reward == current.reward == 1.0


def test_pausing_before_a_turn_sends_no_request(tokenizer):
    engine = ScriptedEngine(tokenizer, [ANSWER + END])
    state = TrajectoryState([1], 0, 0)
    assert asyncio.run(make_loop(tokenizer).run(state, engine, lambda: True)) is False
    assert engine.requests == []


def test_a_fork_shares_nothing_that_changes(tokenizer):
    state = TrajectoryState([1], 0, 0)
    state.append_sampled(GenerateResult([7], [-1.0], [3], "stop"))
    branch = state.fork(index=4, seed=9)
    branch.append_sampled(GenerateResult([8], [-1.0], [3], "stop"))
    assert state.response_ids == [7] and branch.response_ids == [7, 8]
    assert (branch.group_id, branch.index, branch.seed) == (0, 4, 9)


@pytest.mark.parametrize("format_name", ["retool", "arpo"])
def test_tag_formats_stop_at_the_closing_tag_by_string(tokenizer, format_name):
    loop = make_loop(tokenizer, format=format_name)
    closing = {"retool": ("</code>",), "arpo": ("</search>", "</python>")}[format_name]
    assert loop.stop.strings == closing
    assert loop.stop.token_ids == (tokenizer.eos_token_id,)
    assert not make_loop(tokenizer).stop.strings, "then the engine needs no tokenizer"


def test_retool_loop(tokenizer):
    class StopString(ScriptedEngine):
        async def __call__(self, state, max_new_tokens, deadline):
            result = await super().__call__(state, max_new_tokens, deadline)
            return GenerateResult(
                result.output_ids,
                result.log_probs,
                result.weight_versions,
                "stop",
                "</code>" if self.turns else tokenizer.eos_token_id,
            )

    engine = StopString(tokenizer, ["<code>\n```python\nprint(6*7)\n```\n</code>", "<answer>42</answer>" + END])
    tools = ScriptedTools()
    trajectory = run(make_loop(tokenizer, tools, format="retool"), engine).to_trajectory()
    assert tools.calls == [("code_interpreter", {"code": "print(6*7)"})]
    assert "</code>\n<interpreter>\n42\n</interpreter>\n<answer>" in tokenizer.decode(trajectory.response_ids.tolist())
    assert trajectory.finish_reason is FinishReason.STOP
    assert trajectory.num_turns == 3
