"""The terminal's conversation, with a model whose turns are given."""

from __future__ import annotations

import asyncio
import io
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_retool.config import MultiTurnConfig, SamplingConfig, load_config
from megatron_retool.serving import chat as chat_module
from megatron_retool.serving.chat import Chat, Lines, PiecewiseSampler
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult, StopConditions
from sglang_rollout.gateway.interface import TurnRequest
from sglang_rollout.gateway.rendering import ContextRenderer
from tests.kit.markov_policy import ANSWER, CALL, WORD
from tests.serving.scripted_model import Script, counting_tools


def talk(tokenizer, script, *lines: str, tools=None, context: int = 4096, **settings) -> tuple[str, str]:
    """What is written as answers and as notes where ``lines`` are typed."""
    answers, notes = io.StringIO(), io.StringIO()
    service = SimpleNamespace(
        config=load_config(None, [f"rollout.engine.context_length={context}"]),
        tokenizer=tokenizer,
        renderer=ContextRenderer(tokenizer, MultiTurnConfig()),
        tools=tools,
        sampler=script,
    )

    async def run() -> None:
        reader, writer = os.pipe()
        try:
            os.write(writer, "\n".join(lines).encode())
        finally:
            os.close(writer)
        async with Chat(service, Console(file=answers, width=100), Console(file=notes, width=100), **settings) as chat:
            await chat.talk(Lines(reader))
        os.close(reader)

    asyncio.run(run())
    return answers.getvalue(), notes.getvalue()


def test_calls_and_results_are_shown_and_the_conversation_goes_on(tokenizer):
    script = Script(tokenizer, [WORD, CALL], [ANSWER])
    tools, counter = counting_tools()
    answers, notes = talk(tokenizer, script, "How many?", "", "And again?", "/quit", "never asked", tools=tools)
    assert answers.count(ANSWER) == 2 and "print(6*7)" not in answers
    assert notes.count("print(6*7)") == 2 and notes.count("calls code_interpreter") == 2
    assert "code_interpreter: ok" in notes
    assert [session["count"] for session in counter.closed] == [2], "one session of the tools for the conversation"
    assert len(script.contexts) == 4
    for earlier, later in zip(script.contexts, script.contexts[1:], strict=False):
        assert later[: len(earlier)] == earlier


def test_reset_forgets(tokenizer):
    script = Script(tokenizer, [WORD])
    tools, counter = counting_tools()
    _, notes = talk(tokenizer, script, "one", "/reset", "two", "/what", tools=tools, system="Be brief.")
    assert "started over" in notes and len(counter.closed) == 2
    assert notes.count(chat_module.HELP) == 2, "an unknown command is answered with the known ones"
    last = tokenizer.decode(script.contexts[-1])
    assert "two" in last and "one<" not in last and "Be brief." in last


def test_a_context_that_is_full_is_said_and_the_question_forgotten(tokenizer):
    script = Script(tokenizer, [WORD])
    answers, notes = talk(tokenizer, script, "short", "long " * 200, "short again", context=400)
    assert "no answer: This model's maximum context length is" in notes and answers.count(WORD) == 2
    assert "long" not in tokenizer.decode(script.contexts[-1])


def test_what_a_model_writes_is_no_command_to_the_terminal(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids, **_: "\x1b[2J\x1b]0;title\x07[red]text[/red]")
    answers, _ = talk(tokenizer, Script(tokenizer, [WORD]), "hello")
    assert "\x1b" not in answers and "\x07" not in answers and "[red]text[/red]" in answers


class Letters:
    """Samples the ids 0, 1, 2, … by their place, ends after ``length``, and gives log-probs by place."""

    def __init__(self, length: int) -> None:
        self.length, self.requests = length, []

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        self.requests.append(request)
        begin = len(state.response_ids)
        ids = list(range(begin, min(begin + request.max_new_tokens, self.length)))
        reason = "stop" if ids[-1] == self.length - 1 else "length"
        state.seconds -= 1.0
        return GenerateResult(
            ids, [-float(i) for i in ids], [0] * len(ids), reason, ids[-1] if reason == "stop" else None
        )


@pytest.mark.parametrize(("length", "room"), [(1, 100), (16, 100), (50, 100), (100, 50), (100, 48), (100, 16)])
def test_pieces_are_the_turn(length: int, room: int):
    whole, pieces, seen = Letters(length), Letters(length), []
    request = TurnRequest(room, SamplingConfig(), StopConditions((7,)), 60.0)
    state = TrajectoryState([1], 0, 0)
    sampled = asyncio.run(PiecewiseSampler(pieces, lambda ids: seen.append(len(ids))).generate(state, request))
    expected = asyncio.run(whole.generate(TrajectoryState([1], 0, 0), request))
    assert (sampled.output_ids, sampled.log_probs) == (expected.output_ids, expected.log_probs)
    assert (sampled.finish_reason, sampled.matched_stop) == (expected.finish_reason, expected.matched_stop)
    assert seen == sorted(seen) and seen[-1] == len(sampled.output_ids) and len(seen) == len(pieces.requests)
    assert state.response_ids == [] and state.seconds == -float(len(pieces.requests))
    with_text = TurnRequest(room, SamplingConfig(), StopConditions((7,), ("end",)), 60.0)
    pieces.requests.clear()
    asyncio.run(PiecewiseSampler(pieces, seen.append).generate(state, with_text))
    assert pieces.requests == [with_text], "a text may lie across two pieces"
