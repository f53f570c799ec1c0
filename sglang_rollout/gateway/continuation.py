"""Continues texts as they are, without a chat template: what ``completions.py`` asks for.

Nothing that is sampled here is kept, so this is for served models only: a run trains on conversations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_retool.config import SamplingConfig
from sglang_rollout.agent.long_texts import in_thread
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult, RankedText, Steering
from sglang_rollout.engine.router import NoEngineAvailable
from sglang_rollout.gateway.conversation import TextAnswer, TextCall, TextToken
from sglang_rollout.gateway.errors import ApiError, context_overflow, invalid, unsupported
from sglang_rollout.gateway.interface import Ranker, Sampler, SessionLimits, TurnRequest
from sglang_rollout.gateway.rendering import ContextRenderer
from sglang_rollout.gateway.session_tree import seed_of
from sglang_rollout.session import RolloutError


async def continued(
    call: TextCall,
    sampling: SamplingConfig,
    steering: Steering,
    limits: SessionLimits,
    renderer: ContextRenderer,
    sampler: Sampler,
) -> list[TextAnswer]:
    """The answers to the first prompt, then those to the second, …

    Raises:
        ApiError: a prompt has no room or no such token, the engines give no log-probs of it, or cannot answer.
    """
    assert limits.context_length is not None
    if call.log_probs is not None and not isinstance(sampler, Ranker):
        raise unsupported("logprobs", "the engines do not say which tokens are likely")
    prompts = [
        await _ids(prompt, place, call, limits.context_length, renderer) for place, prompt in enumerate(call.prompts)
    ]
    try:
        return await _together(
            _answer(call, choice, ids, sampling, steering, limits, renderer, sampler)
            for ids in prompts
            for choice in range(call.choices)
        )
    except (RolloutError, NoEngineAvailable) as error:
        raise ApiError(503, f"the engines cannot answer: {error}", code="engines_unavailable") from error


async def _ids(prompt: str | list[int], place: int, call: TextCall, most: int, renderer: ContextRenderer) -> list[int]:
    where = "prompt" if len(call.prompts) == 1 else f"prompt[{place}]"
    if isinstance(prompt, str):
        if len(prompt) > most * renderer.longest_token:
            raise context_overflow(len(prompt) // renderer.longest_token, most, "context_length")
        prompt = await in_thread(renderer.text_prompt, prompt)
    elif not all(0 <= token < renderer.vocabulary_size for token in prompt):
        raise invalid(where, f"expected token ids from 0 to {renderer.vocabulary_size - 1}")
    if not prompt:
        raise invalid(where, "it has no token")
    # What follows may be cut; a prompt that is to be scored must fit.
    if len(prompt) > most or (len(prompt) == most and call.max_tokens > 0):
        raise context_overflow(len(prompt), most, "context_length")
    return prompt


async def _answer(
    call: TextCall,
    choice: int,
    prompt: list[int],
    sampling: SamplingConfig,
    steering: Steering,
    limits: SessionLimits,
    renderer: ContextRenderer,
    sampler: Sampler,
) -> TextAnswer:
    assert limits.context_length is not None
    sampled, ranked = GenerateResult([], [], [], "length"), None
    stop = replace(renderer.stop, strings=(*renderer.stop.strings, *call.stop))
    greedy = sampling.temperature == 0 and not steering.penalties
    ranker = sampler if isinstance(sampler, Ranker) else None
    if ranker is not None and call.log_probs is not None and call.max_tokens <= 1 and greedy:
        # The pass over the prompt gives the one token that is wanted, or none.
        ranked = await ranker.rank(prompt, max(call.log_probs, 1))
        token, log_prob = ranked.likeliest[-1][0]
        if call.max_tokens:
            ends = token in stop.token_ids
            sampled = GenerateResult([token], [log_prob], [0], "stop" if ends else "length")
    else:
        if call.max_tokens:
            seed = None if call.seed is None else seed_of(call.seed, choice)
            room = min(call.max_tokens, limits.context_length - len(prompt))
            request = TurnRequest(room, sampling, stop, limits.max_wall_seconds, steering)
            sampled = await sampler.generate(TrajectoryState(prompt, 0, 0, seed=seed), request)
        if ranker is not None and call.log_probs is not None:
            ranked = await ranker.rank([*prompt, *sampled.output_ids], max(call.log_probs, 1))
    return await in_thread(_shown, call, prompt, sampled, ranked, renderer)


def _shown(
    call: TextCall, prompt: list[int], sampled: GenerateResult, ranked: RankedText | None, renderer: ContextRenderer
) -> TextAnswer:
    text = renderer.continuation(sampled, call.stop)
    tokens = None
    if ranked is not None:
        start = 0 if call.echo else len(prompt)
        tokens = _tokens([*prompt, *sampled.output_ids], start, ranked, call.log_probs or 0, renderer)
    if call.echo:
        text = renderer.text_of(prompt) + text
    return TextAnswer(
        text,
        "length" if sampled.finish_reason != "stop" else "stop",
        len(prompt),
        sampled.cached_tokens,
        len(sampled.output_ids),
        tokens,
    )


def _tokens(
    ids: Sequence[int], start: int, ranked: RankedText, count: int, renderer: ContextRenderer
) -> list[TextToken]:
    named: dict[int, str] = {}

    def name(token: int) -> str:
        if token not in named:
            text = renderer.text_of([token])
            # A part of a character has no text, and two of them must not be taken for the same token.
            named[token] = f"token_id:{token}" if "\ufffd" in text else text
        return named[token]

    # The last of the ids may be the likeliest one that follows the ranked text.
    log_probs = [None, *ranked.log_probs, ranked.likeliest[-1][0][1]]
    return [
        TextToken(
            name(token),
            log_probs[place],
            [(name(other), value) for other, value in ranked.likeliest[place - 1][:count]] if place else [],
        )
        for place, token in enumerate(ids)
        if place >= start
    ]


async def _together[T](work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of it side by side; where one fails, the others are ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
