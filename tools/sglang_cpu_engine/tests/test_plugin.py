"""What CPU engines compute in the place of SGLang's Triton kernels. tests/parity/admission has the whole engine."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_cpu_engine import plugin


@pytest.mark.parametrize(
    ("waiting", "running", "chunked", "passes"),
    [(1, 0, None, 0), (1, 8, None, 0), (1, 9, None, 8), (12, 100, None, 8), (13, 100, None, 0), (0, 9, None, 0),
     (1, 9, "a prompt in parts", 0)],
)  # fmt: skip
def test_prefills_of_a_few_wait_for_others(waiting: int, running: int, chunked: str | None, passes: int) -> None:
    scheduler = SimpleNamespace(waiting_queue=[None] * waiting, chunked_req=chunked)
    batch, asked = SimpleNamespace(reqs=[None] * running), []

    def original(scheduler: Any, *, running_batch: Any, prefill_delayer_single_pass: Any) -> tuple[str, Any]:
        asked.append(prefill_delayer_single_pass)
        return "prefills", running_batch

    for _ in range(2):  # what waited counts from the beginning afterwards
        for _ in range(passes):
            none = plugin.hold_prefills(original, scheduler, running_batch=batch, prefill_delayer_single_pass=None)
            assert none == (None, batch)
        taken = plugin.hold_prefills(original, scheduler, running_batch=batch, prefill_delayer_single_pass=None)
        assert taken == ("prefills", batch)
    assert asked == [None, None]


def test_the_scheduler_asks_for_prefills_as_the_plugin_takes_them() -> None:
    source = (Path(distribution("sglang").locate_file("sglang")) / "srt" / "managers" / "scheduler.py").read_text()
    asked = source.partition("self._get_new_batch_prefill_raw(")[2].partition(")")[0]
    assert "running_batch=running_batch" in asked
    assert all("=" in line for line in asked.strip().splitlines())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_experts_gate(dtype: torch.dtype) -> None:
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
