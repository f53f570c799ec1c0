from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.table_policy import make_model
from tests.sglang_rollout.agent import markov_policy


@pytest.fixture
def tokenizer():
    return markov_policy.build_tokenizer()


@pytest.fixture(scope="session")
def table_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "model")
