"""The tool-call format that admit finds for a chat template; templates here write calls as the models' own do."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_retool.parity.admission.outcome import AdmissionVerdict
from megatron_retool.parity.admission.single_checks import chat_template
from tests.kit.markov_policy import build_tokenizer

TURNS = {
    "hermes": (
        '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>',
        "<tool_response>{{ m.content }}</tool_response>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>",
        "<tool_response>{{ m.content }}</tool_response>",
    ),
    "glm45": (
        "<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}"
        "</arg_value>\n{% endfor %}</tool_call>",
        "<|observation|>\n<tool_response>{{ m.content }}</tool_response>",
    ),
    "harmony": (
        " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>",
        "<|start|>functions.run to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>{{ v }}"
        "</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
        "tool\n{{ m.content }}",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="{{ c.name }}">\n{% for k, v in c.arguments.items() %}'
        '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
        "<response>{{ m.content }}</response>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
        "{{ c.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
        "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
    ),
    "llama3": (
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|im_end|>',
        "{{ m.content | tojson }}",
    ),
    "unknown": ("[CALL {{ c.name }} WITH {{ c.arguments | tojson }}]", "[RESULT {{ m.content }}]"),
}


@pytest.mark.parametrize("name", TURNS)
def test_the_format_that_reads_a_template(tmp_path: Path, name: str) -> None:
    call, result = TURNS[name]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
        "{% for m in messages %}{% if m.role == 'tool' %}" + result + "{% else %}<|start|>{{ m.role }}{{ m.content }}"
        "{% for t in m.tool_calls or [] %}{% set c = t.function %}" + call + "{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    template, calls = chat_template(tmp_path)
    assert template.verdict is AdmissionVerdict.PASS
    if name == "unknown":
        assert calls.verdict is AdmissionVerdict.FAIL and "[CALL run WITH" in calls.reason
    else:
        assert (calls.verdict, calls.reason) == (AdmissionVerdict.PASS, f"rollout.multi_turn.format={name}")
