from __future__ import annotations

import pytest

from tests.sglang_rollout.agent import markov_policy


@pytest.fixture(scope="session")
def tokenizer():
    return markov_policy.build_tokenizer()
