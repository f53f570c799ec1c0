"""Real sandbox servers, one for each isolation that this host allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandboxes import Sandbox, as_ordinary_user, start


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """The strongest isolation of this host, with NumPy imported."""
    running = start(preimport=["math", "numpy"])
    yield running
    running.process.stop()


@pytest.fixture(scope="session", params=["namespaces", "user_namespace", "bubblewrap", "rlimits"])
def attacked(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Every isolation in turn."""
    if request.param == "user_namespace":
        running = start("namespaces", wrapper=as_ordinary_user())
    elif request.param == "bubblewrap":
        running = start("bubblewrap", wrapper=as_ordinary_user())
    else:
        running = start(request.param)
    yield running
    running.process.stop()
