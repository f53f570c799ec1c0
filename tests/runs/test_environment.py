"""What a run records of the machine, without opening CUDA in its driver."""

from __future__ import annotations

import pytest
import torch

from megatron_retool.machine import cores, memory_bytes
from megatron_retool.runs import environment as module
from megatron_retool.runs.environment import environment


def test_gpus_are_named_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("this opens CUDA, which takes memory of the learner's GPU")

    for name in ("get_device_name", "get_device_properties", "init"):
        monkeypatch.setattr(torch.cuda, name, refused)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(module, "nvidia_smi", lambda query: ["NVIDIA X", "NVIDIA Y"])
    found = environment()
    assert found["gpus"] == ["NVIDIA X", "NVIDIA Y"]
    assert found["cpu_cores"] == cores() and found["memory_gb"] == round(memory_bytes() / 1e9, 1)
    assert found["packages"]["torch"] and "transformer-engine" not in found["packages"]
