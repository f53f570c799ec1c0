"""Demonstrations for the demo's supervised fine-tuning: good tool use mixed with guesses and mistakes.

The mix is deliberate. A model fine-tuned on perfect traces would leave reinforcement learning nothing to teach; here
it guesses a third of the time, often runs code that is wrong, and recovers from an error less than half of the time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from megatron_retool.data.demo.facts import value_in
from megatron_retool.data.demo.problems import FactProblem, Problem, Snippets
from megatron_retool.data.demo.tool_output import ToolOutput
from megatron_retool.data.tagged_traces import Message, tool_call, tool_result
from tools.code_interpreter_tool import CodeInterpreterTool
from tools.search.tool import SearchTool

SYSTEM_PROMPT = "Solve the problem. Put the answer in \\boxed{}."
WORDS_SYSTEM_PROMPT = (
    "Solve the problem. You can run Python by writing\n"
    '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>\n'
    "and are told what it prints. Put the answer in \\boxed{}."
)
"""For chat templates without tools, which show neither a schema nor a call."""


@dataclass(frozen=True)
class DemoTools:
    """What the tools return, for demonstrations."""

    run: Callable[[str], ToolOutput]
    """Of a snippet."""
    search: Callable[[str], ToolOutput] | None = None
    """Of a query; only fact problems need it."""


@dataclass(frozen=True)
class TraceMix:
    """Shares of the kinds of trace in a family; in the rest of them the tool call fails."""

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
WORDS_MIX = TraceMix(guess=0.30, correct=0.35, wrong=0.20)
"""Of every family of word problems."""
SEARCH_MIX = TraceMix(guess=0.30, correct=0.50, wrong=0.10)
AFTER_SEARCH_MIX = TraceMix(guess=0.20, correct=0.40, wrong=0.20)
"""For the code that a found value needs; the guess is the found value itself."""
RETRY_SHARE = 0.4
"""Share of the traces with a failing call that then make the right one; the others fall back on a guess."""


def prompt_messages(question: str, system_prompt: str = SYSTEM_PROMPT) -> list[Message]:
    """System prompt and question."""
    return [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]


def with_calls_in_content(messages: list[Message]) -> list[Message]:
    """``messages`` for a chat template that leaves ``tool_calls`` out: calls are written as hermes does."""
    written = []
    for message in messages:
        message = dict(message)
        for call in message.pop("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            message["content"] = f"{message['content']}\n<tool_call>\n{text}\n</tool_call>".lstrip("\n")
        written.append(message)
    return written


def code_call(code: str, content: str = "Let me run code.") -> Message:
    """An assistant's message that runs code."""
    return tool_call(CodeInterpreterTool.name, {"code": code}, content)


def search_call(query: str, content: str = "Let me search.") -> Message:
    """An assistant's message that searches."""
    return tool_call(SearchTool.name, {"query": query}, content)


def final_answer(answer: object, lead: str = "The answer is") -> Message:
    """An assistant's message with the answer in a box."""
    return {"role": "assistant", "content": f"{lead} \\boxed{{{answer}}}."}


def _guess(rng: random.Random, answer: int) -> Message:
    digits = len(str(abs(answer)))
    lowest = 10 ** (digits - 1) if digits > 1 else 0
    return final_answer(rng.randint(lowest, 10**digits - 1), "I think it is")


def trace(
    rng: random.Random, problem: Problem | FactProblem, tools: DemoTools, system_prompt: str = SYSTEM_PROMPT
) -> tuple[list[Message], str]:
    """A conversation that works on ``problem`` and its kind: guess, correct, wrong, retry or give_up.

    Whatever ``tools`` return is what the conversation shows, so a demonstration never claims an output that the tool
    would not give.
    """
    messages = prompt_messages(problem.question, system_prompt)
    if isinstance(problem, FactProblem):
        steps, kind = _search_steps(rng, problem, tools)
        return messages + steps, kind
    mix, draw = TRACE_MIX.get(problem.family, WORDS_MIX), rng.random()
    if draw < mix.guess:
        return [*messages, _guess(rng, problem.answer)], "guess"
    steps, kind = _code_steps(rng, problem.code, problem.answer, mix, draw, tools)
    return messages + steps, kind


def _code_steps(
    rng: random.Random, code: Snippets, answer: int, mix: TraceMix, draw: float, tools: DemoTools
) -> tuple[list[Message], str]:
    """Code, its output and the answer; what kind is decided by ``draw``, of [mix.guess, 1)."""
    if draw < mix.guess + mix.correct + mix.wrong:
        kind = "correct" if draw < mix.guess + mix.correct else "wrong"
        snippet = code.correct if kind == "correct" else rng.choice(code.wrong)
        output = tools.run(snippet).text
        return [code_call(snippet), tool_result(output), final_answer(output.strip())], kind
    # A tool that prints the last expression turns "nothing printed" into a success: then that is no failing snippet.
    snippet = rng.choice([snippet for snippet in code.failing if not tools.run(snippet).succeeded])
    steps = [code_call(snippet), tool_result(tools.run(snippet).text)]
    if rng.random() < RETRY_SHARE:
        output = tools.run(code.correct).text
        steps += [code_call(code.correct, "The code failed. Let me fix it."), tool_result(output)]
        return [*steps, final_answer(output.strip())], "retry"
    return [*steps, _guess(rng, answer)], "give_up"


def _search_steps(rng: random.Random, problem: FactProblem, tools: DemoTools) -> tuple[list[Message], str]:
    """A search, then the answer or the code that the found value needs."""
    assert tools.search is not None
    fact, draw = problem.fact, rng.random()
    if draw < SEARCH_MIX.guess:
        return [_guess(rng, problem.answer)], "guess"
    kind, steps, query = "correct", [], fact.query
    if draw >= SEARCH_MIX.guess + SEARCH_MIX.correct + SEARCH_MIX.wrong:
        failing = rng.choice(fact.failing_queries)
        steps = [search_call(failing), tool_result(tools.search(failing).text)]
        if rng.random() >= RETRY_SHARE:
            return [*steps, _guess(rng, problem.answer)], "give_up"
        kind, content = "retry", "Nothing was found. Let me search again."
        steps.append(search_call(fact.query, content))
    else:
        if draw >= SEARCH_MIX.guess + SEARCH_MIX.correct:
            kind, query = "wrong", rng.choice(fact.wrong_queries)
        steps.append(search_call(query))
    result = tools.search(query).text
    steps.append(tool_result(result))
    value = value_in(result)
    if problem.code_for is None:
        return [*steps, final_answer(value)], kind
    draw = rng.random()
    if draw < AFTER_SEARCH_MIX.guess:
        return [*steps, final_answer(value)], "wrong"
    more, code_kind = _code_steps(rng, problem.code_for(value), problem.answer, AFTER_SEARCH_MIX, draw, tools)
    return steps + more, kind if kind == "wrong" or code_kind == "correct" else code_kind


def snippet(rng: random.Random, problem: Problem | FactProblem, tools: DemoTools) -> list[Message]:
    """A short piece of a conversation for the first training stage, cut exactly as it stands in a whole one.

    Half of them are a tool result and the answer that repeats it: reinforcement learning can only reward code whose
    output the model copies digit by digit, and that copying has to be taught first. The other half are a question and
    the call for it (sometimes one that gives a wrong value), for a fact's question also what follows its result.
    """
    repeat = rng.random() < 0.5
    if isinstance(problem, FactProblem):
        return _fact_snippet(rng, problem, repeat, tools)
    if repeat:
        value = rng.randint(0, 10 ** rng.randint(1, 6) - 1)
        return [tool_result(str(value)), final_answer(value)]
    code = rng.choice((problem.code.correct, *problem.code.wrong))
    return [{"role": "user", "content": problem.question}, code_call(code)]


def _fact_snippet(rng: random.Random, problem: FactProblem, repeat: bool, tools: DemoTools) -> list[Message]:
    assert tools.search is not None
    fact = problem.fact
    question = {"role": "user", "content": problem.question}
    if not repeat:
        return [question, search_call(rng.choice((fact.query, *fact.wrong_queries)))]
    result = [question, search_call(fact.query), tool_result(tools.search(fact.query).text)]
    if problem.code_for is None:
        return [*result, final_answer(fact.value)]
    code = problem.code_for(fact.value)
    return [*result, code_call(rng.choice((code.correct, *code.wrong)))]
