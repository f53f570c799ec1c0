from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import markov_policy
from tests.serving.table_policy import make_model


@pytest.fixture
def tokenizer():
    return markov_policy.build_tokenizer()


@pytest.fixture(scope="session")
def table_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "model")
