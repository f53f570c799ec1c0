"""What CPU engines compute in the place of SGLang's Triton kernels. tests/admission has the whole engine."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from sglang_rollout.engine.process import CPU_SHIMS


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CPU_SHIMS))
    return importlib.import_module("cpu_engine_plugin")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_experts_gate(plugin: Any, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, shared, routed = (torch.randn(5, 32, generator=draw).to(dtype) for _ in range(3))
    weight = torch.randn(32, generator=draw).to(dtype)
    gated = torch.sigmoid(hidden.double() @ weight.double())[:, None] * shared.double()
    for do_add, expected in ((False, gated), (True, routed.double() + gated)):
        output = routed.clone()
        plugin.gate_shared_expert(hidden, weight, shared, output, do_add=do_add)
        torch.testing.assert_close(output, expected.to(dtype))
    alone = routed[1:2].clone()
    plugin.gate_shared_expert(hidden[1:2], weight, shared[1:2], alone, do_add=True)
    assert torch.equal(alone, output[1:2])
