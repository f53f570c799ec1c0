"""What the device that is not there sees, and what it lets pass as CUDA would."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.gpu_branch import fake_device
from tests.gpu_branch.conftest import Run

GPU = "cuda"

MIXED: dict[str, Callable[[], Any]] = {
    "a sum": lambda: torch.ones(3, device=GPU) + torch.ones(3),
    "a product of matrices": lambda: torch.ones(2, 3, device=GPU) @ torch.ones(3, 2),
    "a constructor without a device": lambda: torch.ones(3, device=GPU) * torch.arange(3),
    "an index that has to lie on the device": lambda: torch.ones(3, device=GPU).index_select(0, torch.tensor([1])),
    "numbers of both in one tensor": lambda: torch.stack([torch.ones((), device=GPU), torch.ones(())]),
    "a number of the host that is to change": lambda: torch.ones(()).add_(torch.ones((), device=GPU)),
    "another GPU's tensor": lambda: torch.ones(3, device=GPU) + torch.ones(3, device="cuda:1"),
    "a gradient that meets the host": lambda: _backward_with_a_host_tensor(),
}
WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: torch.ones(1, device=GPU).item(),
    "float": lambda: float(torch.ones(1, device=GPU)),
    "if": lambda: bool(torch.ones(1, device=GPU)),
    "tolist": lambda: torch.ones(3, device=GPU).tolist(),
    "a printed tensor": lambda: f"{torch.ones(3, device=GPU)}",
    "a copy to the host": lambda: torch.ones(3, device=GPU).cpu(),
    "a copy into the host's memory": lambda: torch.empty(3).copy_(torch.ones(3, device=GPU), non_blocking=True),
    "nonzero": lambda: torch.ones(3, device=GPU).nonzero(),
    "a mask as an index": lambda: torch.ones(3, device=GPU)[torch.ones(3, device=GPU) > 0],
    "a comparison as a whole": lambda: torch.equal(torch.ones(3, device=GPU), torch.ones(3, device=GPU)),
    "repetitions by a tensor": lambda: torch.ones(2, device=GPU).repeat_interleave(torch.arange(2, device=GPU)),
    "synchronize": lambda: torch.cuda.synchronize(),
}
COPIES: dict[str, Callable[[], Any]] = {
    "to": lambda: torch.ones(3).to(GPU),
    "to, not pinned": lambda: torch.ones(3).to(GPU, non_blocking=True),
    "copy_": lambda: torch.empty(3, device=GPU).copy_(torch.ones(3)),
    "values of Python": lambda: torch.tensor([1.0, 2.0], device=GPU),
    "an index of the host": lambda: torch.ones(3, device=GPU)[torch.tensor([0, 2])],
}
FREE: dict[str, Callable[[], Any]] = {
    "a number of the host": lambda: torch.ones(3, device=GPU) * torch.ones(()),
    "constructors on the device": lambda: torch.arange(3, device=GPU) + torch.zeros(3, device=GPU),
    "constructors like a tensor": lambda: torch.ones(3, device=GPU) + torch.zeros(3, device=GPU).new_ones(3),
    "pinned memory": lambda: torch.ones(3).pin_memory().to(GPU, non_blocking=True),
    "to pinned memory": lambda: torch.empty(3, pin_memory=True).copy_(torch.ones(3, device=GPU), non_blocking=True),
    "a mask that fills": lambda: torch.ones(3, device=GPU).masked_fill(torch.ones(3, device=GPU) > 0, 0.0),
    "gradients": lambda: (torch.ones(3, device=GPU, requires_grad=True) * 2).sum().backward(),
    "the host's own work": lambda: (torch.ones(3) + torch.ones(3)).tolist(),
}


class _WithAHostTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.full((3,), 2.0)


def _backward_with_a_host_tensor() -> None:
    _WithAHostTensor.apply(torch.ones(3, device=GPU, requires_grad=True)).sum().backward()


def _record(kind: str) -> dict[str, tuple[list[Any], ...]]:
    answers = {}
    for name, operation in getattr(sys.modules[__name__], kind).items():
        with fake_device.recorded() as record:
            operation()
        answers[name] = tuple(list(events) for events in (record.mixed, record.waits, record.copies))
    return answers


@pytest.mark.parametrize(("kind", "place"), [("MIXED", 0), ("WAITS", 1), ("COPIES", 2), ("FREE", None)])
def test_sees(kind: str, place: int | None, on_gpus: Run) -> None:
    for name, events in on_gpus(_record, kind, engine=False).items():
        assert [number for number, found in enumerate(events) if found] == ([] if place is None else [place]), name
        assert all(event.file == "tests/gpu_branch/test_fake_device.py" for found in events for event in found), name


def _answers() -> list[Any]:
    x = torch.ones(2, 3, device=GPU)
    y = F.linear(x, torch.ones(4, 3, device=GPU)).to(torch.bfloat16)
    with pytest.raises(TypeError, match="test_fake_device.py"):
        x.numpy()
    host = torch.from_numpy(np.ones(3))
    return [
        *(str(each.device) for each in (x, y, x[0], x.t(), x.cpu(), host, host.cuda())),
        *(each.is_cuda for each in (x, host)),
        x.type(),
        x.get_device(),
        (x @ x.t()).tolist(),
    ]


def test_tensors_say_that_they_are_on_the_device(on_gpus: Run) -> None:
    found = on_gpus(_answers, engine=False)
    assert found[:7] == ["cuda:0", "cuda:0", "cuda:0", "cuda:0", "cpu", "cpu", "cuda:0"]
    assert found[7:] == [True, False, "torch.cuda.FloatTensor", 0, [[3.0, 3.0], [3.0, 3.0]]]


def _untouched() -> tuple[bool, bool]:
    from megatron_retool.learner import cpu

    return torch.cuda.is_available(), cpu.install()


@pytest.mark.parametrize("engine", [True, False])
def test_megatron_core_is_as_on_a_gpu(engine: bool, on_gpus: Run) -> None:
    assert on_gpus(_untouched, engine=engine) == (True, False)
