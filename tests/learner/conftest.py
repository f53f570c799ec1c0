"""What transformers computes of every family, for the learner on either layer spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learner.tiny_models import FAMILIES


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``test_parity.reference`` of each family."""
    from tests.learner.test_parity import reference

    directory = tmp_path_factory.mktemp("parity")
    for family in FAMILIES:
        reference(family, directory)
    return directory
