from __future__ import annotations

from typing import Any

import pytest

from megatron_retool.cluster.ray_nodes import main, problems, wait_for_nodes
from megatron_retool.ports import free_port


def node(name: str, gpus: float = 8, alive: bool = True) -> dict[str, Any]:
    return {"NodeName": name, "Alive": alive, "Resources": {"CPU": 4.0, "GPU": gpus} if gpus else {"CPU": 4.0}}


def test_problems_name_nodes() -> None:
    nodes = [node("a"), node("b", gpus=7), node("c", alive=False), node("d", gpus=0)]
    assert problems(["a", "b", "c", "d", "e"], nodes, gpus_per_node=8) == [
        "b offers 7 GPUs to Ray, 8 are needed",
        "c has not joined Ray",
        "d offers 0 GPUs to Ray, 8 are needed",
        "e has not joined Ray",
    ]
    assert problems(["a", "d"], nodes, gpus_per_node=0) == []


def test_a_node_that_died_and_came_back_counts() -> None:
    assert problems(["a"], [node("a", alive=False), node("a")], gpus_per_node=8) == []


def test_waits_for_late_nodes() -> None:
    answers = iter([[node("a")], [node("a")], [node("a"), node("b")]])
    assert wait_for_nodes(["a", "b"], 8, timeout=60, list_nodes=lambda: next(answers), poll_seconds=0) == []


def test_gives_up_after_the_timeout_and_at_once_on_missing_gpus() -> None:
    remaining = wait_for_nodes(["a", "b"], 8, timeout=0.05, list_nodes=lambda: [node("a")], poll_seconds=0.01)
    assert remaining == ["b has not joined Ray"]
    remaining = wait_for_nodes(["a"], 8, timeout=3600, list_nodes=lambda: [node("a", gpus=4)])
    assert remaining == ["a offers 4 GPUs to Ray, 8 are needed"]


def test_a_head_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert main(["--address", address, "--expect", "first,second", "--timeout", "0.1"]) == 1
    assert f"first (the head): no Ray at {address}" in capsys.readouterr().err
