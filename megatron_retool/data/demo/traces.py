"""Demonstrations for the demo's supervised fine-tuning: good tool use mixed with guesses and mistakes.

The mix is deliberate. A model fine-tuned on perfect traces would leave reinforcement learning nothing to teach; here
it guesses a third of the time, often runs code that is wrong, and recovers from an error less than half of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_retool.data.demo.problems import Problem
from tools.code_interpreter.tool import CodeInterpreterTool

SYSTEM_PROMPT = "Solve the problem. Put the answer in \\boxed{}."

RunSnippet = Callable[[str], "ToolOutput"]


@dataclass(frozen=True)
class ToolOutput:
    """What the tool hands to the model for one snippet."""

    text: str
    succeeded: bool
    """It ran without an error and printed something."""


@dataclass(frozen=True)
class TraceMix:
    """Shares of the kinds of trace in a family; the rest of the probability runs failing code."""

    guess: float
    correct: float
    wrong: float


TRACE_MIX = {
    "arithmetic": TraceMix(guess=0.30, correct=0.40, wrong=0.15),
    "gcd": TraceMix(guess=0.30, correct=0.30, wrong=0.10),
    "power_modulo": TraceMix(guess=0.30, correct=0.22, wrong=0.28),
    "range_sum": TraceMix(guess=0.30, correct=0.18, wrong=0.32),
    "digit_sum": TraceMix(guess=0.35, correct=0.15, wrong=0.20),
    "divisor_count": TraceMix(guess=0.35, correct=0.12, wrong=0.28),
}
RETRY_SHARE = 0.4
"""Share of the traces with failing code that then run the right code; the others fall back on a guess."""

Message = dict[str, Any]


def prompt_messages(question: str) -> list[Message]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def tool_call(code: str, content: str = "Let me run code.") -> Message:
    call = {"type": "function", "function": {"name": CodeInterpreterTool.name, "arguments": {"code": code}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def tool_result(output: str) -> Message:
    return {"role": "tool", "content": output}


def final_answer(answer: object, lead: str = "The answer is") -> Message:
    return {"role": "assistant", "content": f"{lead} \\boxed{{{answer}}}."}


def _guess(rng: random.Random, answer: int) -> Message:
    digits = len(str(abs(answer)))
    lowest = 10 ** (digits - 1) if digits > 1 else 0
    return final_answer(rng.randint(lowest, 10**digits - 1), "I think it is")


def trace(rng: random.Random, problem: Problem, run: RunSnippet) -> tuple[list[Message], str]:
    """A conversation that works on ``problem`` and its kind: guess, correct, wrong, retry or give_up.

    ``run`` is the tool: whatever it returns is what the conversation shows, so a demonstration never claims an output
    that the tool would not give.
    """
    mix = TRACE_MIX[problem.family]
    messages = prompt_messages(problem.question)
    draw = rng.random()
    if draw < mix.guess:
        return [*messages, _guess(rng, problem.answer)], "guess"
    if draw < mix.guess + mix.correct + mix.wrong:
        kind = "correct" if draw < mix.guess + mix.correct else "wrong"
        code = problem.correct if kind == "correct" else rng.choice(problem.wrong)
        output = run(code).text
        return [*messages, tool_call(code), tool_result(output), final_answer(output.strip())], kind
    # A tool that prints the last expression turns "nothing printed" into a success: then that is no failing snippet.
    failing = [code for code in problem.failing if not run(code).succeeded]
    code = rng.choice(failing)
    messages += [tool_call(code), tool_result(run(code).text)]
    if rng.random() < RETRY_SHARE:
        output = run(problem.correct).text
        messages += [tool_call(problem.correct, "The code failed. Let me fix it."), tool_result(output)]
        return [*messages, final_answer(output.strip())], "retry"
    return [*messages, _guess(rng, problem.answer)], "give_up"


def snippet(rng: random.Random, problem: Problem) -> list[Message]:
    """A short piece of a conversation for the first training stage, cut exactly as it stands in a whole one.

    Half of them are a tool result and the answer that repeats it: reinforcement learning can only reward code whose
    output the model copies digit by digit, and that copying has to be taught first. The other half are a question and
    the code for it (sometimes code that prints a wrong value).
    """
    if rng.random() < 0.5:
        value = rng.randint(0, 10 ** rng.randint(1, 6) - 1)
        return [tool_result(str(value)), final_answer(value)]
    code = rng.choice((problem.correct, *problem.wrong))
    return [{"role": "user", "content": problem.question}, tool_call(code)]
