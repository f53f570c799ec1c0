"""What ``SGLangClient`` sends to /generate, and what versions and errors in an answer say."""

from __future__ import annotations

from typing import Any

import orjson

from sglang_rollout.engine.base import GenerateRequest


def generate_body(request: GenerateRequest, rid: str) -> dict[str, Any]:
    """The body of a request to /generate, which ``rid`` names to abort it."""
    sampling = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "top_k": request.sampling.top_k,
        "min_p": request.sampling.min_p,
        "stop_token_ids": list(request.stop.token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if not request.stop.end_of_sequence:
        sampling["ignore_eos"] = True
    if request.stop.strings:
        sampling["stop"] = list(request.stop.strings)
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    sampling |= request.steering.penalties
    if request.steering.grammar is not None:
        sampling[request.steering.grammar.kind] = request.steering.grammar.text
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if request.wants_filtered:
        # SGLang then returns each token's support too.
        body["return_sampling_mask"] = True
        sampling["top_k"] = request.sampling.most_tokens
    if request.routed_experts_start is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_experts_start}
    if request.adapter is not None:
        body["lora_path"] = request.adapter
    if request.top_log_probs:
        body["top_logprobs_num"] = request.top_log_probs
    return body


def weight_versions_of(meta: dict[str, Any], count: int) -> list[int]:
    """The version of the weights that each of an answer's ``count`` tokens comes from."""
    versions = [version_of(meta.get("weight_version"))] * count
    for span in meta.get("weight_versions") or ():
        start, end = span["start"], min(span["end"], count)
        versions[start:end] = [version_of(span["version"])] * max(0, end - start)
    return versions


def version_of(reported: Any) -> int:
    """Engines not started by us report "default": the weights they were started with, version 0."""
    try:
        return int(reported)
    except (TypeError, ValueError):
        return 0


def error_text(answer: bytes) -> str:
    """What an answer with an error's status says, in up to 500 characters."""
    text = answer.decode(errors="replace")
    try:
        parsed = orjson.loads(answer)
        inner = parsed.get("error", parsed)
        text = str(inner.get("message") or inner.get("error_message") or inner if isinstance(inner, dict) else inner)
    except (orjson.JSONDecodeError, AttributeError):
        pass
    return text[:500]
