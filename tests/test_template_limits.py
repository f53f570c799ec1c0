"""Chat templates that loop or grow without end are stopped; ordinary ones render as without limits."""

from __future__ import annotations

import time

import pytest
from transformers.utils import chat_template_utils

from megatron_retool import template_limits
from megatron_retool.data.chat_template import ChatTemplateError, render

QUESTION = [{"role": "user", "content": "question"}]


class Rendering:
    """A tokenizer as far as its template goes."""

    name_or_path = "some/model"

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, conversations, tools=None, tokenize=False, add_generation_prompt=False, **arguments):
        return chat_template_utils.render_jinja_template(
            conversations, tools, chat_template=self.chat_template, add_generation_prompt=add_generation_prompt
        )[0]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "renders for more than"),
        (
            "{% for i in range(99999) %}{% for j in range(99999)|map('string') %}{% endfor %}{% endfor %}",
            "renders for more than",
        ),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "renders for more"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}",
            "makes a text",
        ),
        ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "makes a text"),
        ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "makes a text"),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
            "{% set n.x = y %}{% endfor %}",
            "makes a text",
        ),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) * 9 }}{% else %}x{% endif %}{% endmacro %}{{ f(60) }}", "makes a text"),
        ("{{ 'x' * 10**10 }}", "makes a text"),
        ("{{ [1] * 10**10 }}", "makes a text"),
        ("{{ 9 ** (9 ** 9) }}", "computes with numbers"),
        ("{{ 'x'.ljust(10**10) }}{{ 'x'|center(10**10) }}", "asks for more"),
        ("{{ 'x'|center(10**10) }}", "asks for more"),
        ("{{ '%9999999999d' % 1 }}", "asks for more"),
        ("{{ '{:>9999999999}'.format(1) }}", "asks for more"),
        ("{{ ('x' * 99999).replace('x', 'y' * 99999) }}", "makes a text"),
        ("{{ ('x' * 99999)|replace('x', 'y' * 99999) }}", "makes a text"),
        ("{{ ('x' * 99999).join(['y'] * 99999) }}", "makes a text"),
        ("{{ (['y'] * 99999)|join('x' * 99999) }}", "makes a text"),
        ("{{ lipsum(n=10**9) }}", "calls lipsum"),
    ],
)
def test_what_costs_too_much_is_stopped(template, said, monkeypatch):
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.3)
    began = time.monotonic()
    told = f"some/model: the tokenizer's chat template {said}.*model.tokenizer_path"
    with pytest.raises(ChatTemplateError, match=told):
        render(Rendering(template), [QUESTION])
    assert time.monotonic() - began < 5


def test_ordinary_templates_render_as_they_did():
    template = (
        "{% for m in messages if m.role != 'x' %}{{ loop.index ~ '/' ~ loop.length }}"
        "{{ m['role'] + ': ' + m.content|trim }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{{ tools|tojson(indent=2) }}{{ '%s-%d' % ('a', 1) }}{{ ['a', 'b']|join(', ') }}{{ 'a b'.replace('a', 'c') }}"
        "{% for x in nothing %}{% else %}none{% endfor %}{{ 7 % 4 }}{{ 'x'|center(5) }}{{ 2 * 3 }}"
    )
    told = render(Rendering(template), [QUESTION], [{"type": "function"}])
    assert told == ['1/1user: questiona1[\n  {\n    "type": "function"\n  }\n]a-1a, bc bnone3  x  6']
