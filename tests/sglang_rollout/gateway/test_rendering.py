"""Prompts that are asked for again."""

from __future__ import annotations

from megatron_retool.config import MultiTurnConfig
from sglang_rollout.gateway import rendering
from sglang_rollout.gateway.rendering import ContextRenderer
from tests.kit.scripted import Counter


def test_kept_prompts_are_those_of_their_exact_messages_and_tools(tokenizer, monkeypatch):
    monkeypatch.setattr(rendering, "PROMPTS_KEPT", 2)
    texts = ["question", " question", "question ", "another"]
    asked = [([{"role": "user", "content": text}], tools) for text in texts for tools in (None, [Counter.schema])]
    keeps = ContextRenderer(tokenizer, MultiTurnConfig())
    for _ in range(2):
        for messages, tools in asked:
            fresh = ContextRenderer(tokenizer, MultiTurnConfig()).prompt(messages, tools)
            for _ in range(2):
                ids = keeps.prompt(messages, tools)
                assert ids == fresh
                ids.append(0)  # the caller's own
    assert len(keeps._prompts) == 2
