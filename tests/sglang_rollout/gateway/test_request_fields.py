"""Fields of requests: what is served, what is refused by name, and what the documentation says of them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from sglang_rollout.gateway import request_fields
from sglang_rollout.gateway.rendering import thinking_switches
from tests.kit.markov_policy import ANSWER, CALL, WORD, build_tokenizer
from tests.kit.scripted import Counter
from tests.sglang_rollout.gateway.test_server import CLAUDE_TOOL, END, FUNCTION, QUESTION, post, served

AGENTS = Path(__file__).parents[3] / "docs" / "agents.md"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
LEAST = {
    CHAT: {"messages": QUESTION},
    RESPONSES: {"input": "question"},
    MESSAGES: {"messages": QUESTION, "max_tokens": 9},
}
TABLES = {CHAT: request_fields.CHAT, RESPONSES: request_fields.RESPONSES, MESSAGES: request_fields.MESSAGES}
NAMES = {CHAT: "Chat Completions", RESPONSES: "Responses", MESSAGES: "Messages", COMPLETIONS: "Completions"}


# A run refuses the last one as a whole (tests/serving/test_completions.py).
DOCUMENTED = {**TABLES, COMPLETIONS: request_fields.COMPLETIONS}


def documented() -> str:
    parts = [f"{NAMES[path]}:\n\n{request_fields.table(fields)}" for path, fields in DOCUMENTED.items()]
    return "\n\n".join(parts)


def test_the_documentation_shows_the_tables():
    shown = re.search(r"<!-- request fields -->\n(.*)\n<!-- /request fields -->", AGENTS.read_text(), re.DOTALL)
    assert shown is not None and shown[1].strip() == documented()


@pytest.mark.parametrize(
    ("params", "path"),
    [
        (completion_create_params.CompletionCreateParamsBase, CHAT),
        (response_create_params.ResponseCreateParamsBase, RESPONSES),
        (text_create_params.CompletionCreateParamsBase, COMPLETIONS),
    ],
)
def test_every_field_of_openais_client_has_its_place(params, path):
    assert set(params.__annotations__) <= set(DOCUMENTED[path])


FORM = {"type": "json_schema", "schema": {"type": "object"}}
STEERING: dict[str, list[Any]] = {
    CHAT: [
        ("frequency_penalty", 0.5, 0),
        ("presence_penalty", -1, 0.0),
        ("repetition_penalty", 1.1, 1),
        ("top_k", 5, -1),
        ("min_p", 0.1, 0),
        ("response_format", {"type": "json_schema", "json_schema": FORM}, {"type": "text"}),
        ("tool_choice", "required", "auto"),
    ],
    RESPONSES: [("text", {"format": FORM}, {"format": {"type": "text"}}), ("tool_choice", "required", "none")],
    MESSAGES: [
        ("top_k", 5, 0),
        ("output_format", FORM, None),
        ("output_config", {"format": FORM}, {"effort": "low"}),
        ("tool_choice", {"type": "any"}, {"type": "auto"}),
    ],
}
TOOL = {CHAT: Counter.schema, RESPONSES: {"type": "function", **FUNCTION}, MESSAGES: CLAUDE_TOOL}


def test_a_run_refuses_what_changes_the_policys_distribution(tokenizer):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            for path, fields in STEERING.items():
                for name, asking, nothing in fields:
                    body = {**LEAST[path], "tools": [TOOL[path]]}
                    assert (await post(at, path, {**body, name: nothing}))[0] == 200, (name, nothing)
                    status, answer = await post(at, path, {**body, name: asking})
                    message = answer["error"]["message"]
                    assert status == 400 and message.startswith(name) and "megatron-retool serve" in message
            named = {name for fields in STEERING.values() for name, _, _ in fields}
            listed = {
                name for table in TABLES.values() for name, each in table.items() if each.kind == "of a served model"
            }
            assert listed <= named

    asyncio.run(run())


def test_unknown_and_refused_fields_are_refused_by_name(tokenizer):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            for path, fields in TABLES.items():
                asked = {name: "x" for name, field in fields.items() if field.kind == "refused"}
                for name, value in {**asked, "no_such_field": None}.items():
                    status, answer = await post(at, path, {**LEAST[path], name: value})
                    assert status == 400 and name in answer["error"]["message"], (path, name, answer)
                    assert path == MESSAGES or answer["error"]["param"] == name
                    if name in asked:
                        for nothing in (None, *fields[name].allowed):
                            assert (await post(at, path, {**LEAST[path], name: nothing}))[0] == 200, (name, nothing)
                harmless = {name: {} for name, field in fields.items() if field.kind == "harmless"}
                assert (await post(at, path, {**LEAST[path], **harmless}))[0] == 200

    asyncio.run(run())


REFUSED = [
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"frequency_penalty": 3}, "frequency_penalty"),
    (CHAT, {"top_k": 1.5}, "top_k"),
    (CHAT, {"stream_options": {"no_such": 1}}, "stream_options.no_such"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "messages"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    (RESPONSES, {"reasoning": {"no_such": 1}}, "reasoning.no_such"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits"),
    (MESSAGES, {"thinking": {"type": "much"}}, "thinking.type"),
]


@pytest.mark.parametrize(("path", "fields", "name"), REFUSED, ids=[each[2] for each in REFUSED])
def test_fields_within_fields(tokenizer, path, fields, name):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            status, answer = await post(at, path, {**LEAST[path], **fields})
            assert status == 400 and answer["error"]["message"].startswith(name)

    asyncio.run(run())


def test_what_the_commonest_agents_send_is_taken(tokenizer, caplog):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            claude = {
                "max_tokens": 32000,
                "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
                "messages": [*QUESTION, {"role": "system", "content": "A reminder."}],
                "thinking": {"type": "enabled", "budget_tokens": 31999},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "high"},
                "metadata": {"user_id": "x"},
                "tools": [CLAUDE_TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            }
            assert (await post(at, MESSAGES, claude))[0] == 200
            shown = tokenizer.decode(at.script.contexts[0])
            assert "<|im_start|>system\nA reminder.<|im_end|>" in shown and "web_search" not in shown
            tools = [
                {"type": "function", **FUNCTION},
                {"type": "namespace", "name": "agents", "tools": []},
                {"type": "web_search"},
                {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "x"}},
            ]
            codex = {"input": "question", "tools": tools, "tool_choice": "auto", "parallel_tool_calls": False}
            codex |= {"store": False, "include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}}
            for _ in range(2):
                status, answer = await post(at, RESPONSES, codex)
                assert status == 200 and answer["parallel_tool_calls"] is False
            assert "apply_patch" not in tokenizer.decode(at.script.contexts[1])

    asyncio.run(run())
    assert caplog.text.count("apply_patch") == 1


def test_one_call_where_one_is_asked_for(tokenizer):
    async def run():
        async with served(tokenizer, [CALL + CALL + END, ANSWER + END]) as at:
            asked = {"messages": QUESTION, "tools": [Counter.schema], "parallel_tool_calls": False}
            _, first = await post(at, CHAT, asked)
            message = first["choices"][0]["message"]
            (call,) = message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
            assert (await post(at, CHAT, {**asked, "messages": [*QUESTION, message, result]}))[0] == 200
            (segment,) = await at.session.close()
            assert segment.loss_mask.sum() == 5

    asyncio.run(run())


def test_results_of_calls_are_shown_in_the_order_of_the_calls(tokenizer):
    async def run():
        async with served(tokenizer, [CALL + CALL + END, ANSWER + END]) as at:
            tools = {"tools": [Counter.schema]}
            _, first = await post(at, CHAT, {"messages": QUESTION, **tools})
            message = first["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"result {place}"}
                for place, call in enumerate(message["tool_calls"])
            ]
            for order in (results, results[::-1]):
                await post(at, CHAT, {"messages": [*QUESTION, message, *order], **tools})
            assert at.script.contexts[1] == at.script.contexts[2]
            shown = tokenizer.decode(at.script.contexts[1])
            assert shown.index("result 0") < shown.index("result 1")

    asyncio.run(run())


def test_thinking_is_the_chat_templates_switch():
    tokenizer = build_tokenizer("qwen3.jinja")
    asked = [
        (CHAT, {"reasoning_effort": "none"}, False),
        (CHAT, {"reasoning_effort": "high"}, True),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}}, False),
        (MESSAGES, {"thinking": {"type": "disabled"}}, False),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        (MESSAGES, {}, True),
    ]

    async def run():
        async with served(tokenizer, [WORD + END]) as at:
            for path, fields, thinks in asked:
                assert (await post(at, path, {**LEAST[path], **fields}))[0] == 200
                closed = tokenizer.decode(at.script.contexts[-1]).endswith("<think>\n\n</think>\n\n")
                assert closed is not thinks, (path, fields)
            history = [*QUESTION, {"role": "assistant", "content": WORD}]
            for more in ({"role": "user", "content": "more"}, {"role": "tool", "tool_call_id": "1", "content": "42"}):
                await post(at, CHAT, {"messages": [*history, more], "reasoning_effort": "none"})
                assert tokenizer.decode(at.script.contexts[-1]).endswith("<think>\n\n</think>\n\n")

    asyncio.run(run())
    assert thinking_switches(tokenizer.chat_template) == ["enable_thinking"]
    assert thinking_switches("{{ message.thinking }}{{ 'enable_thinking' }} thinking") == []
    assert thinking_switches("{% if thinking is defined and thinking %}x{% endif %}") == ["thinking"]


def test_tokens_are_counted_as_the_next_call_has_them(tokenizer):
    async def run():
        async with served(tokenizer, [CALL + END, ANSWER + END]) as at:
            asked = {"messages": QUESTION, "tools": [CLAUDE_TOOL]}
            for _ in range(2):
                status, counted = await post(at, MESSAGES + "/count_tokens", asked)
                _, said = await post(at, MESSAGES, {**asked, "max_tokens": 50})
                assert (status, counted["input_tokens"]) == (200, said["usage"]["input_tokens"])
                asked["messages"] = [*QUESTION, {"role": "assistant", "content": said["content"]}, *QUESTION]
            assert len(at.script.requests) == 2
            status, answer = await post(at, MESSAGES + "/count_tokens", {"messages": [], "no_such": 1})
            assert (status, answer["type"]) == (400, "error")
            much = {"messages": [{"role": "user", "content": "x" * 500_000}]}
            status, answer = await post(at, MESSAGES + "/count_tokens", much)
            assert status == 400 and answer["error"]["message"].startswith("prompt is too long: ")

    asyncio.run(run())


def test_a_model_may_be_asked_for_by_any_name(tokenizer):
    async def run():
        async with served(tokenizer, [ANSWER + END]) as at:
            assert (await at.client.models.retrieve("org/name")).id == "org/name"
            assert (
                json.loads((await at.http.get(f"{at.session.base_url}/models/")).text)["error"]["code"] == "unknown_url"
            )

    asyncio.run(run())
