"""A model whose turns are given, and tools for it."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_retool.config import ToolsConfig
from megatron_retool.config.rollout import tool_entries
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway.interface import TurnRequest
from tests.kit.markov_policy import single
from tests.kit.scripted import Counter
from tools.loading import make_tools
from tools.registry import ToolRegistry


class Script:
    """Says what it is told to, turn by turn, and remembers how it was asked."""

    def __init__(self, tokenizer: Any, *turns: list[str]) -> None:
        self.turns = [[single(tokenizer, text) for text in [*turn, "<|im_end|>"]] for turn in turns]
        self.contexts: list[list[int]] = []
        self.requests: list[Any] = []
        self.seeds: list[int | None] = []

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        self.contexts.append([*state.prompt_ids, *state.response_ids])
        self.requests.append(request)
        self.seeds.append(state.seed)
        ids = self.turns[(len(self.contexts) - 1) % len(self.turns)]
        await asyncio.sleep(0)
        return GenerateResult(ids, [-0.5] * len(ids), [0] * len(ids), "stop", ids[-1])


def counting_tools() -> tuple[ToolRegistry, Counter]:
    """Tools of a run whose code interpreter counts."""
    (entry,) = tool_entries(["tests.kit.scripted:Counter"])
    (named,) = make_tools(ToolsConfig(), 0, entry, None)
    assert isinstance(named.tool, Counter)
    return ToolRegistry([named]), named.tool
