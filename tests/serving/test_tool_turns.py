"""Tool calls that the server runs itself, and the history that a client never sees."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.config import MultiTurnConfig
from megatron_retool.serving.tool_turns import HiddenTurns, until_final
from sglang_rollout.gateway.conversation import ConversationAnswer, SpokenCall
from tests.kit.scripted import ScriptedTools

LIMITS = MultiTurnConfig(max_assistant_turns=4, max_tool_calls=3)
QUESTION = [{"role": "user", "content": "How many?"}]


def answer(content: str, *calls: SpokenCall, prompt_tokens: int = 10) -> ConversationAnswer:
    reason = "tool_calls" if calls else "stop"
    return ConversationAnswer(content, calls, reason, prompt_tokens, cached_tokens=0, sampled_tokens=5)


def call(number: int = 0, arguments: str = '{"code": "1"}', error: str | None = None) -> SpokenCall:
    return SpokenCall(f"call_{number}", "code_interpreter", arguments, raw=arguments, error=error)


def ask(script: list[ConversationAnswer], asked: list[list[dict]]):
    answers = iter(script)

    async def next_answer(messages):
        asked.append(messages)
        return next(answers)

    return next_answer


def test_calls_are_run_until_there_are_none() -> None:
    tools, asked = ScriptedTools(), []
    script = [
        answer("Let me see.", call(1), call(2)),
        answer("", call(3, "{", error="Error: no JSON"), prompt_tokens=40),
        answer("42", prompt_tokens=60),
    ]
    finished = asyncio.run(until_final(ask(script, asked), tools, LIMITS, QUESTION))
    assert [each["role"] for each in finished.turns] == ["assistant", "tool", "tool", "assistant", "tool"]
    assert [each["tool_call_id"] for each in finished.turns if each["role"] == "tool"] == ["call_1", "call_2", "call_3"]
    assert asked[-1] == [*QUESTION, *finished.turns]
    assert tools.calls == [("code_interpreter", {"code": "1"})] * 2, "a malformed call is told the model, and not run"
    assert finished.turns[-1]["content"] == "Error: no JSON"
    final = finished.answer()
    assert (final.content, final.finish_reason, final.calls) == ("42", "stop", ())
    assert (final.prompt_tokens, final.sampled_tokens) == (10, 55), "all that followed the client's prompt"


def test_limits_end_an_answer_without_its_calls() -> None:
    for script in ([answer("", call())] * 4, [answer("", call(1), call(2)), answer("", call(3), call(4))]):
        finished = asyncio.run(until_final(ask(script, []), ScriptedTools(), LIMITS, QUESTION))
        assert finished.at_limit and len(finished.answers) == len(script)
        assert finished.answer().calls == () and finished.answer().finish_reason == "length"


def test_without_tools_the_first_answer_is_final() -> None:
    finished = asyncio.run(until_final(ask([answer("", call())], []), None, LIMITS, QUESTION))
    assert finished.turns == [] and not finished.at_limit


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.integers(0, 2)), min_size=1, max_size=6))
def test_a_client_s_history_is_made_whole(rounds: list[tuple[str, str, int]]) -> None:
    """Whatever is said, equal questions and answers among it."""
    hidden, seen, whole = HiddenTurns(), [], []
    for place, (question, text, calls) in enumerate(rounds):
        seen.append({"role": "user", "content": question})
        whole.append(seen[-1])
        turns = [
            message
            for number in range(calls)
            for message in (
                answer(f"{place}", call(number)).message(),
                {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{place} {number}"},
            )
        ]
        hidden.keep(seen, None, answer(text), turns)
        seen.append(answer(text).message())
        whole += [*turns, seen[-1]]
        assert hidden.whole(seen, None) == whole
        # White space does not count: clients trim answers.
        trimmed = [*seen[:-1], {**seen[-1], "content": seen[-1]["content"].strip()}]
        assert hidden.whole(trimmed, None)[:-1] == whole[:-1]
        assert hidden.whole(seen, [{"type": "function"}]) == seen, "other tools, another conversation"


def test_hidden_turns_are_forgotten_in_order_of_use() -> None:
    hidden, turns = HiddenTurns(most=2), [answer("", call()).message()]
    said = [[{"role": "user", "content": text}] for text in "abc"]
    hidden.keep(said[0], None, answer("1"), turns)
    hidden.keep(said[1], None, answer("1"), turns)
    assert len(hidden.whole([*said[0], answer("1").message()], None)) == 3
    hidden.keep(said[2], None, replace(answer("1")), turns)
    assert [len(hidden.whole([*each, answer("1").message()], None)) for each in said] == [3, 2, 3]
