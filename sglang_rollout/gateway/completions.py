"""OpenAI's Completions: a request's JSON to a ``TextCall``, answers to an object or to the chunks of a stream.

Benchmarks that compare how likely texts are ask this way: lm-eval's ``local-completions`` sends token ids with echo and
logprobs, and reads the log-probs of the last ones.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.gateway import fields, request_fields
from sglang_rollout.gateway.conversation import TextAnswer, TextCall
from sglang_rollout.gateway.errors import invalid

MOST_ANSWERS = 256
"""Of one request, to all its prompts."""
MOST_LIKELIEST = 20
DEFAULT_TOKENS = 16
"""OpenAI's, where a request does not say max_tokens."""


@dataclass(frozen=True)
class CompletionRequest:
    """A call and what its answer must look like."""

    call: TextCall
    stream: bool
    include_usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


def read(body: fields.Json) -> CompletionRequest:
    """The request in ``body``.

    Raises:
        ApiError: 400, naming the field.
    """
    request_fields.check(body, request_fields.COMPLETIONS)
    options = fields.mapping(body, "stream_options")
    request_fields.check(options, request_fields.STREAM_OPTIONS, "stream_options.")
    prompts, choices = _prompts(body.get("prompt")), fields.integer(body, "n", 1) or 1
    if len(prompts) * choices > MOST_ANSWERS:
        raise invalid("prompt", f"at most {MOST_ANSWERS} answers at a time, got {len(prompts)} prompts x n={choices}")
    most = fields.integer(body, "max_tokens", 0)
    likeliest = fields.integer(body, "logprobs", 0)
    if likeliest is not None and likeliest > MOST_LIKELIEST:
        raise invalid("logprobs", f"expected at most {MOST_LIKELIEST}, got {likeliest}")
    call = TextCall(
        prompts=prompts,
        max_tokens=DEFAULT_TOKENS if most is None else most,
        choices=choices,
        echo=fields.flag(body, "echo"),
        log_probs=likeliest,
        stop=fields.texts(body, "stop"),
        seed=fields.integer(body, "seed", 0),
        model=fields.text(body, "model", default=""),
        sampling=fields.sampling(body),
        steered=fields.steered(body),
    )
    return CompletionRequest(
        call, fields.flag(body, "stream"), fields.flag(options, "include_usage", "stream_options.")
    )


def _prompts(given: Any) -> list[str | list[int]]:
    """A text, a list of texts, token ids, or lists of those."""
    if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
        given = [given]
    if not isinstance(given, list) or not given:
        raise invalid("prompt", "expected a string, token ids, or an array of either, and none empty")
    for place, prompt in enumerate(given):
        if not prompt or not (isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_id, prompt)))):
            where = "prompt" if len(given) == 1 else f"prompt[{place}]"
            raise invalid(where, "expected a string or token ids, and at least one of them")
    return given


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def completion(request: CompletionRequest, answers: Sequence[TextAnswer], model: str) -> dict[str, Any]:
    """The ``text_completion`` object.

    Args:
        answers: of the first prompt, then of the second, …
    """
    choices = [_choice(index, answer) for index, answer in enumerate(answers)]
    return {**_head(request, model), "choices": choices, "usage": _usage(request, answers)}


def chunks(request: CompletionRequest, answers: Sequence[TextAnswer], model: str) -> Iterator[dict[str, Any]]:
    """The ``text_completion`` objects of a stream, one for each answer, without the closing [DONE]."""
    head = _head(request, model)
    for index, answer in enumerate(answers):
        yield {**head, "choices": [_choice(index, answer)], **({"usage": None} if request.include_usage else {})}
    if request.include_usage:
        yield {**head, "choices": [], "usage": _usage(request, answers)}


def _head(request: CompletionRequest, model: str) -> dict[str, Any]:
    name = request.call.model or model
    return {"id": request.id, "object": "text_completion", "created": request.created, "model": name}


def _choice(index: int, answer: TextAnswer) -> dict[str, Any]:
    shown = None if answer.tokens is None else _log_probs(answer)
    return {"index": index, "text": answer.text, "finish_reason": answer.finish_reason, "logprobs": shown}


def _log_probs(answer: TextAnswer) -> dict[str, Any]:
    offset = 0
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for token in answer.tokens or ():
        offsets.append(offset)
        offset += len(token.text)
        # The token itself is shown whether it is among the likeliest or not.
        top: dict[str, float] = {}
        for text, log_prob in [*token.likeliest, (token.text, token.log_prob)]:
            if log_prob is not None:
                top.setdefault(text, log_prob)
        tops.append(top or None)
    return {
        "tokens": [token.text for token in answer.tokens or ()],
        "token_logprobs": [token.log_prob for token in answer.tokens or ()],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _usage(request: CompletionRequest, answers: Sequence[TextAnswer]) -> dict[str, Any]:
    of_prompts = answers[:: request.call.choices]
    prompt, sampled = sum(each.prompt_tokens for each in of_prompts), sum(each.sampled_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(min(e.prompt_tokens, e.cached_tokens) for e in of_prompts)},
    }
