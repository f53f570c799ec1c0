from __future__ import annotations

import pytest

from tests.kit import markov_policy


@pytest.fixture(scope="session")
def tokenizer():
    return markov_policy.build_tokenizer()
