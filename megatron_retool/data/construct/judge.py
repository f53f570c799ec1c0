"""From a model's rewriting to a row for fine-tuning: the code is run, its outputs put in, format and answer checked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from answer_equality.score import compute_score, extract_answer
from code_interpreter.client import CodeInterpreterClient, SandboxUnavailable
from code_interpreter.protocol import Outcome
from megatron_retool.chat_endpoint import ChatReply
from megatron_retool.config import CodeInterpreterConfig
from megatron_retool.data.tagged_traces import Message, TracedCall, TraceError, conversation, parse_trace
from tools.code_interpreter_tool import describe
from untrusted import without_surrogates

_ERROR_SHOWN = re.compile(r"Traceback \(most recent|\b\w*(?:Error|Exception)\b")
_OPENING, _CLOSING = "<rewritten>", "</rewritten>"


@dataclass(frozen=True)
class CodeOutput:
    """Of a block of code, as a model is shown it in training."""

    text: str
    succeeded: bool


Run = Callable[[str], Awaitable[CodeOutput]]


@dataclass(frozen=True)
class RewriteVerdict:
    """What came of one reply.

    Attributes:
        reason: why it is rejected, one of a few, to count by; None: it is accepted.
        detail: more about it, for people.
        messages: the conversation, where it is accepted.
        calls: blocks of code that ran.
        replaced: of these, outputs that are others than the model wrote.
    """

    reason: str | None
    detail: str = ""
    messages: list[Message] = field(default_factory=list)
    calls: int = 0
    replaced: int = 0


async def judge(reply: ChatReply, prompt: list[Message], answer: Any, run: Run) -> RewriteVerdict:
    """Run the code of ``reply`` and decide whether it becomes a row.

    Rejected are, in this order: a reply that was cut off; tags that are not closed or stand alone; a trace without
    code; no answer in a box after the last block; a wrong answer; code that fails where the reply does not show an
    error, or prints nothing. What the code prints does not change the reply's answer, so that is looked at first.

    Args:
        prompt: the row's messages before the first assistant turn.
        answer: the ground truth, as the grader takes it.
        run: from code to its output.

    Raises:
        SandboxUnavailable: nothing is known about the code.
    """
    if reply.finish_reason == "length":
        return RewriteVerdict("cut off", "the endpoint ended it at max_tokens")
    try:
        trace = parse_trace(_rewritten(without_surrogates(reply.text)))
    except TraceError as error:
        return RewriteVerdict(error.reason, str(error))
    if not trace.calls:
        return RewriteVerdict("no code")
    predicted = extract_answer(trace.answer)
    if "\\boxed" not in trace.answer or predicted is None:
        return RewriteVerdict("no boxed answer", trace.answer[-200:])
    score = await asyncio.to_thread(compute_score, "", trace.answer, answer, {"final_turn": trace.answer})
    if not score["acc"]:
        return RewriteVerdict("wrong answer", f"{predicted} instead of {answer}")
    outputs: list[str] = []
    for number, call in enumerate(trace.calls, 1):
        output = await run(call.code)
        reason = _fault(call, output)
        if reason is not None:
            return RewriteVerdict(reason, f"block {number}: {output.text[-500:]}", calls=number)
        outputs.append(output.text)
    replaced = sum(call.output != output.strip() for call, output in zip(trace.calls, outputs, strict=True))
    return RewriteVerdict(None, "", conversation(prompt, trace, outputs), len(outputs), replaced)


def _rewritten(text: str) -> str:
    """What stands between the tags that the prompt asks for; the whole text where there are none."""
    start = text.rfind(_OPENING)
    if start < 0:
        return text
    end = text.find(_CLOSING, start)
    if end < 0:
        raise TraceError("unclosed block", f"{_OPENING} at character {start} is never closed")
    return text[start + len(_OPENING) : end]


def _fault(call: TracedCall, output: CodeOutput) -> str | None:
    """Why the trace cannot continue from this output."""
    if output.succeeded:
        return None if output.text.strip() else "code printed nothing"
    # A failure that the reply knows of is a lesson; after any other one its next sentence makes no sense.
    return None if call.output is not None and _ERROR_SHOWN.search(call.output) else "code failed"


def runner(client: CodeInterpreterClient, config: CodeInterpreterConfig) -> Run:
    """Runs code on a sandbox under the limits of ``config``, and words its output as training does."""

    async def run(code: str) -> CodeOutput:
        result = await client.run_code(
            code,
            run_timeout=config.run_timeout_seconds,
            memory_limit_mb=config.memory_limit_mb,
            print_last_expression=config.print_last_expression,
        )
        if result.outcome in (Outcome.SANDBOX_ERROR, Outcome.BUSY):
            raise SandboxUnavailable(f"the sandbox failed: {result.message}")
        return CodeOutput(describe(result, config), result.ok)

    return run
