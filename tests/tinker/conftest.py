from __future__ import annotations

from pathlib import Path

import pytest

from tests.tinker.served import make_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of four thousand parameters with a tokenizer of bytes."""
    return make_model(tmp_path_factory.mktemp("tinker") / "model")
