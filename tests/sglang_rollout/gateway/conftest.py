from __future__ import annotations

import pytest

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from sglang_rollout.gateway.interface import GatewayStatistics, SessionLimits
from sglang_rollout.gateway.rendering import ContextRenderer
from sglang_rollout.gateway.sessions import OpenSession, session_settings


@pytest.fixture(scope="session")
def renderer(tokenizer):
    return ContextRenderer(tokenizer, MultiTurnConfig(max_tool_response_tokens=400))


@pytest.fixture
def open_session(renderer):
    """(sampler, limits of SessionLimits) -> a session without a server."""

    def opened(sampler, seed=None, **limits) -> OpenSession:
        limits = {"context_length": 100_000, **limits}
        settings = session_settings(SamplingConfig(), None, SessionLimits(**limits), seed, 0, 0)
        return OpenSession(settings, renderer, sampler, GatewayStatistics(), "http://test", lambda session: None)

    return opened
