"""Ray's start on a busy host: a longer limit, further attempts, and one message."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

from megatron_retool.cluster.ray_start import start_local_ray

TIMED_OUT = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return calls


def failing(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], times: int) -> None:
    def init(**options: Any) -> None:
        calls.append(options)
        if len(calls) <= times:
            raise Exception(TIMED_OUT)

    monkeypatch.setattr(ray, "init", init)


def test_limits_are_set_before_ray_reads_them() -> None:
    for name in ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s", "RAY_py_gcs_connect_timeout_s"):
        assert int(os.environ[name]) >= 90


def test_a_start_that_times_out_is_tried_again(monkeypatch: pytest.MonkeyPatch, attempts: list[Any]) -> None:
    failing(monkeypatch, attempts, 2)
    start_local_ray(num_cpus=3)
    assert attempts == [{"address": "local", "num_cpus": 3}] * 3


def test_the_last_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch, attempts: list[Any]) -> None:
    failing(monkeypatch, attempts, 3)
    with pytest.raises(RuntimeError) as raised:
        start_local_ray()
    text = str(raised.value)
    assert len(attempts) == 3
    assert text.startswith("Ray did not start, 3 times: The current node timed out during startup. This host's load is")
    assert "GiB of its memory are free" in text and "Otherwise: free memory" in text
    assert "RAY_raylet_start_wait_time_s=" in text and "\n" not in text


def test_stopping_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(KeyboardInterrupt):
        start_local_ray()
