"""Requests to sample: asample of the Tinker protocol, checked as ``requests`` checks the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.target_sequences import Int64Array, RequestRefused
from megatron_retool.tinker.requests import number, required_integer, required_text
from megatron_retool.tinker.wire import MOST_CELLS, dense_rows
from sglang_rollout.gateway.errors import ApiError, invalid, unsupported
from sglang_rollout.gateway.fields import Json, flag, integer, items, mapping
from untrusted import quoted

MOST_SAMPLES = 1024
MOST_TOP = 100
"""Likeliest tokens of a position."""
MOST_STOPS = 64


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One prompt, and what is asked of it.

    Attributes:
        prompt: int64 [P], at least one token.
        samples: that are drawn, each with a seed of its own.
        max_tokens: of a sample; None: as many as the context has room for.
        stop_ids: tokens that end a sample; None: the model's own end.
        stop_strings: texts that end it.
        prompt_log_probs: the log-prob of each prompt token but the first.
        scored_from: first prompt position whose log-probs are asked for; at least 1.
        top_prompt, top_sampled: how many of the likeliest tokens of each position.
        targets: int64 [P - 1, K]: tokens whose log-probs at position i + 1 are asked for; -1: none. None: no such.
    """

    prompt: Int64Array
    samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    prompt_log_probs: bool = False
    scored_from: int = 1
    top_prompt: int = 0
    top_sampled: int = 0
    targets: Int64Array | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked about the prompt."""
        return self.prompt_log_probs or self.top_prompt > 0 or self.targets is not None


@dataclass(frozen=True)
class Sample:
    """
    Attributes:
        sampling_session_id, seq_id: name the request; the same once more is a retry.
    """

    sampling_session_id: str
    seq_id: int
    request: SampleRequest = field(repr=False)


def read_sample(body: Json, vocabulary: int, context: int) -> Sample:
    """asample.

    Args:
        vocabulary: of the model; token ids lie below it.
        context: tokens of a prompt with its sample.
    """
    if body.get("sampling_session_id") is None:
        raise invalid("sampling_session_id", "it is missing: open a session with create_sampling_session")
    if integer(body, "prompt_alt_tokens_k", 0):
        raise unsupported(
            "prompt_alt_tokens_k", "the engines draw no tokens at prompt positions: ask for topk_prompt_logprobs"
        )
    prompt = _prompt(body, vocabulary)
    given = mapping(body, "sampling_params")
    most = integer(given, "max_tokens", 0, "sampling_params.")
    if len(prompt) + max(most or 0, 1) > context:
        raise invalid(
            "sampling_params.max_tokens" if len(prompt) < context else "prompt",
            f"{len(prompt)} tokens of the prompt and max_tokens={most} exceed the context window of {context} tokens: "
            "ask for fewer, or shorten the prompt",
        )
    stop_ids, stop_strings = _stops(given, vocabulary)
    last = integer(body, "prompt_logprobs_last_n", 1)
    scored = flag(body, "prompt_logprobs")
    if last is not None and not (scored and last < len(prompt)):
        raise invalid("prompt_logprobs_last_n", f"needs prompt_logprobs, and at most {len(prompt) - 1} for this prompt")
    request = SampleRequest(
        prompt=prompt,
        samples=_up_to(body, "num_samples", 1, MOST_SAMPLES, 1),
        max_tokens=most,
        temperature=number(given, "temperature", "sampling_params.", 1.0, 0.0, 100.0),
        top_k=_top_k(given),
        top_p=number(given, "top_p", "sampling_params.", 1.0, 1e-6, 1.0),
        seed=integer(given, "seed", -(1 << 63), "sampling_params."),
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        prompt_log_probs=scored,
        scored_from=1 if last is None else len(prompt) - last,
        top_prompt=_up_to(body, "topk_prompt_logprobs", 0, min(MOST_TOP, vocabulary), 0),
        top_sampled=_up_to(body, "topk_sample_logprobs", 0, min(MOST_TOP, vocabulary), 0),
        targets=_targets(body, len(prompt), vocabulary),
    )
    return Sample(
        required_text(body, "sampling_session_id"),
        required_integer(body, "seq_id"),
        request,
    )


def _up_to(body: Json, name: str, low: int, high: int, default: int) -> int:
    value = integer(body, name, low)
    if value is not None and value > high:
        raise invalid(name, f"expected at most {high}, got {value}")
    return default if value is None else value


def _top_k(given: Json) -> int:
    value = integer(given, "top_k", -1, "sampling_params.")
    return -1 if value is None or value == 0 else min(value, 1 << 30)


def _prompt(body: Json, vocabulary: int) -> Int64Array:
    parts: list[npt.NDArray[np.int64]] = []
    for place, chunk in enumerate(items(mapping(body, "prompt"), "chunks", "prompt.")):
        where = f"prompt.chunks[{place}]"
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise unsupported(f"{where}.type={quoted(chunk.get('type'), 60)}", "the model reads only text")
        parts.append(_token_list(chunk.get("tokens"), f"{where}.tokens", vocabulary))
    prompt = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not len(prompt):
        raise invalid("prompt", "it has no tokens")
    return prompt


def _token_list(values: Any, where: str, vocabulary: int, low: int = 0) -> Int64Array:
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise invalid(where, "expected an array of token ids")
    if values and not (low <= min(values) and max(values) < vocabulary):
        wrong = min(values) if min(values) < low else max(values)
        raise invalid(where, f"{quoted(wrong, 40)} is no token of the model, which has ids 0 to {vocabulary - 1}")
    return np.array(values, np.int64)


def _stops(given: Json, vocabulary: int) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Token ids, or None for the model's own end, and texts."""
    stop = given.get("stop")
    if stop is None:
        return None, ()
    result = [stop] if isinstance(stop, str) else stop
    if not isinstance(result, list) or len(result) > MOST_STOPS:
        raise invalid(
            "sampling_params.stop", f"expected a text, or an array of at most {MOST_STOPS} texts or token ids"
        )
    strings = tuple(each for each in result if isinstance(each, str))
    if not all(strings) or any(len(each) > 1000 for each in strings):
        raise invalid("sampling_params.stop", "expected texts of 1 to 1000 characters")
    ids = [each for each in result if not isinstance(each, str)]
    return tuple(_token_list(ids, "sampling_params.stop", vocabulary).tolist()), strings


def _targets(body: Json, length: int, vocabulary: int) -> Int64Array | None:
    """target_prompt_logprobs."""
    given = body.get("target_prompt_logprobs")
    if given is None:
        return None
    where = "target_prompt_logprobs"
    if not isinstance(given, dict):
        raise invalid(where, f"expected a tensor, got {quoted(given, 60)}")
    shape = given.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(each) is int for each in shape):
        raise invalid(f"{where}.shape", f"expected [{length - 1}, K], got {quoted(shape, 60)}")
    if shape[0] != length - 1 or not shape[1] > 0 or shape[0] * shape[1] > MOST_CELLS or shape[1] > MOST_TOP:
        raise invalid(
            f"{where}.shape",
            f"expected [{length - 1}, K] for a prompt of {length} tokens with K from 1 to {MOST_TOP}, got {shape}",
        )
    values = _token_list(given.get("data"), f"{where}.data", vocabulary, low=-1)
    starts = given.get("sparse_crow_indices")
    if starts is None:
        if len(values) != shape[0] * shape[1]:
            raise invalid(f"{where}.data", f"expected {shape[0] * shape[1]} token ids, got {len(values)}")
        return values.reshape(shape)
    most = 1 << 62
    try:
        return dense_rows(
            values,
            _token_list(starts, f"{where}.sparse_crow_indices", most),
            _token_list(given.get("sparse_col_indices"), f"{where}.sparse_col_indices", most),
            shape,
            where,
            empty=-1,
        )
    except RequestRefused as error:
        raise ApiError(400, str(error), code="invalid_value", param=where) from error
