"""Every field of the APIs' requests: what is served, what changes nothing that matters here, what is refused.

A field that is in no table is refused by name: an answer to a request without it would be an answer to another request.
``docs/agents.md`` shows these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_rollout.gateway.errors import unknown_field, unsupported

STEERING = "of a served model"


@dataclass(frozen=True)
class Field:
    """What becomes of one field.

    Attributes:
        kind: served, of a served model (a run refuses it), harmless or refused.
        note: how it is served, why it is harmless or why it is refused.
        allowed: values of a refused field that ask for nothing; null, false, and empty texts, lists and objects always
            do so.
    """

    kind: str
    note: str = ""
    allowed: tuple[Any, ...] = ()


def check(body: Mapping[str, Any], fields: Mapping[str, Field], path: str = "") -> None:
    """Raise ApiError, status 400, for the first field of ``body`` that is refused or not in ``fields``."""
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            raise unknown_field(f"{path}{name:.60}")
        asks = value not in (None, False, "", [], {}) and value not in field.allowed
        if field.kind == "refused" and asks:
            raise unsupported(f"{path}{name}", field.note)


def table(fields: Mapping[str, Field]) -> str:
    """``fields`` as the documentation shows them."""
    lines = ["| | fields |", "|---|---|"]
    for kind in ("served", STEERING, "harmless", "refused"):
        named = []
        for name, field in fields.items():
            if field.kind == kind:
                named.append(f"`{name}`" + (f" ({field.note})" if field.note else ""))
        lines.append(f"| {kind} | {', '.join(named)} |")
    return "\n".join(lines)


_SERVED, _HARMLESS = Field("served"), Field("harmless")
_SAMPLING = Field("served", "by a served model; checked in training")
_PENALTY = Field(STEERING, "by SGLang")
_FILTER = Field(STEERING)
_FORM = Field(STEERING, "text, json_object, json_schema: by SGLang's grammar")
_BIAS = Field("refused", "tokens are drawn from the model's own distribution", (0, 0.0))
_NO_SERVER_TOOLS = "the gateway runs no tools of a provider"
_TEXT_ALONE = "the model reads and writes text only"
_LEGACY = "use tools and tool_choice"
_FORCED = "required or a function: by a served model, by SGLang's grammar"
_FORCED_ANY = "any or a tool: by a served model, by SGLang's grammar"
_ONE_CALL = Field("served", "false: a turn's first call is given")
_OPENAI = {
    "metadata": _HARMLESS,
    "model": Field("served", "any name"),
    "prompt_cache_key": _HARMLESS,
    "prompt_cache_options": _HARMLESS,
    "prompt_cache_retention": _HARMLESS,
    "safety_identifier": _HARMLESS,
    "service_tier": _HARMLESS,
    "store": _HARMLESS,
    "user": _HARMLESS,
    "verbosity": _HARMLESS,
}
_THINKING_NOTE = "as far as the chat template has a switch for it"

CHAT: dict[str, Field] = {
    **_OPENAI,
    "messages": _SERVED,
    "tools": Field("served", "functions; tools of other types are left out"),
    "tool_choice": Field("served", f"auto, none; {_FORCED}"),
    "parallel_tool_calls": _ONE_CALL,
    "stream": _SERVED,
    "stream_options": Field("served", "include_usage"),
    "logprobs": _SERVED,
    "n": _SERVED,
    "stop": _SERVED,
    "seed": _SERVED,
    "max_tokens": _SERVED,
    "max_completion_tokens": _SERVED,
    "temperature": _SAMPLING,
    "top_p": _SAMPLING,
    "reasoning_effort": Field("served", f"none switches thinking off, {_THINKING_NOTE}"),
    "chat_template_kwargs": Field("served", "enable_thinking and thinking"),
    "prediction": Field("harmless", "it only makes an answer faster"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "top_k": _FILTER,
    "min_p": _FILTER,
    "logit_bias": _BIAS,
    "top_logprobs": Field("refused", "the engines return the log-probs of sampled tokens only", (0,)),
    "response_format": _FORM,
    "audio": Field("refused", _TEXT_ALONE),
    "modalities": Field("refused", _TEXT_ALONE, (["text"],)),
    "web_search_options": Field("refused", _NO_SERVER_TOOLS),
    "functions": Field("refused", _LEGACY),
    "function_call": Field("refused", _LEGACY, ("auto", "none")),
    "continue_final_message": Field("refused", "a turn that is begun is not continued"),
    "add_generation_prompt": Field("refused", "an answer is always a new turn", (True,)),
}
COMPLETIONS: dict[str, Field] = {
    "model": Field("served", "any name"),
    "prompt": Field("served", "a text, token ids, or a list of either"),
    "max_tokens": Field("served", "0: only the prompt's log-probs"),
    "echo": _SERVED,
    "logprobs": Field("served", "the number of likeliest tokens, at most 20; at temperature 1"),
    "n": _SERVED,
    "stop": _SERVED,
    "seed": _SERVED,
    "stream": _SERVED,
    "stream_options": Field("served", "include_usage"),
    "temperature": _SERVED,
    "top_p": _SERVED,
    "user": _HARMLESS,
    "best_of": Field("refused", "every answer that is sampled is given: use n", (1,)),
    "suffix": Field("refused", "the model continues with a text, it fills no gap"),
    **{name: CHAT[name] for name in ("frequency_penalty", "presence_penalty", "logit_bias")},
}
RESPONSES: dict[str, Field] = {
    **_OPENAI,
    "input": _SERVED,
    "instructions": _SERVED,
    "previous_response_id": _SERVED,
    "tools": Field("served", "functions; tools of other types are left out"),
    "tool_choice": Field("served", f"auto, none; {_FORCED}"),
    "parallel_tool_calls": _ONE_CALL,
    "stream": _SERVED,
    "stream_options": Field("harmless"),
    "max_output_tokens": _SERVED,
    "temperature": _SAMPLING,
    "top_p": _SAMPLING,
    "reasoning": Field("served", f"effort none switches thinking off, {_THINKING_NOTE}"),
    "text": Field("served", "format: text; json_object, json_schema by a served model; verbosity is harmless"),
    "client_metadata": _HARMLESS,
    "include": Field("harmless", "but message.output_text.logprobs, which is refused"),
    "truncation": Field("refused", "a history that is too long is an error", ("disabled",)),
    "max_tool_calls": Field("refused", _NO_SERVER_TOOLS),
    "background": Field("refused", "an answer is not kept for later"),
    "conversation": Field("refused", "use previous_response_id"),
    "prompt": Field("refused", "there are no stored prompts"),
    "context_management": Field("refused", "a history is not changed here"),
    "top_logprobs": Field("refused", "the engines return the log-probs of sampled tokens only", (0,)),
}
MESSAGES: dict[str, Field] = {
    "messages": _SERVED,
    "system": _SERVED,
    "max_tokens": _SERVED,
    "model": Field("served", "any name"),
    "stream": _SERVED,
    "stop_sequences": _SERVED,
    "temperature": _SAMPLING,
    "top_p": _SAMPLING,
    "tools": Field("served", "those with a schema; tools of Anthropic's own are left out"),
    "tool_choice": Field("served", f"auto, none; {_FORCED_ANY}; disable_parallel_tool_use: one call"),
    "thinking": Field("served", f"enabled, adaptive or disabled, {_THINKING_NOTE}"),
    "output_config": Field("served", "format by a served model; effort is harmless"),
    "context_management": Field("harmless", "but edits of anything but thinking, which are refused"),
    "metadata": _HARMLESS,
    "service_tier": _HARMLESS,
    "inference_geo": _HARMLESS,
    "cache_control": _HARMLESS,
    "diagnostics": _HARMLESS,
    "speed": _HARMLESS,
    "top_k": _FILTER,
    "output_format": _FORM,
    "mcp_servers": Field("refused", _NO_SERVER_TOOLS),
    "container": Field("refused", _NO_SERVER_TOOLS),
}
OUTPUT_CONFIG = {"effort": _HARMLESS, "format": _FORM, "task_budget": _HARMLESS}
TEXT = {"verbosity": _HARMLESS, "format": _FORM}
REASONING = {"effort": _SERVED, "summary": _HARMLESS, "generate_summary": _HARMLESS, "context": _HARMLESS}
STREAM_OPTIONS = {"include_usage": _SERVED, "include_obfuscation": _HARMLESS, "continuous_usage_stats": _HARMLESS}
CHAT_TEMPLATE_KWARGS = {"enable_thinking": _SERVED, "thinking": _SERVED}
