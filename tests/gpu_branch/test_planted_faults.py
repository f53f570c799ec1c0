"""Faults that a GPU alone would show, planted in the learner's source: the emulation names their line.

None of them changes a number on a host without a GPU, where no other test can see it.
"""

from __future__ import annotations

import importlib
import inspect
import types
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import pytest

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission.comparison import TEMPERATURE, build, mini_batch
from megatron_retool.parity.admission.layouts import cases
from tests.gpu_branch.conftest import Run
from tests.gpu_branch.fake_device import recorded


@dataclass(frozen=True)
class Fault:
    """In a function of a learner's module ``old`` becomes ``new``; it is seen there, or in a line of another."""

    module: str
    function: str
    old: str
    new: str
    seen: tuple[str, str] | None = None
    """Module and text of that line."""


FAULTS = {
    "a tensor of the host in a layer": Fault(
        "attention",
        "PackedAttention._within_rank",
        "torch.arange(bucket.length, device=q.device)",
        "torch.arange(bucket.length)",
        ("attention_pieces", ".masked_fill_(~visible, "),
    ),
    "item in the log-probs": Fault(
        "log_probs", "_ChunkedHead.forward", "n = hidden.size(0)", "n = hidden.size(0) + 0 * targets[0].item()"
    ),
    "item in their backward pass": Fault(
        "log_probs", "_ChunkedHead.backward", "grad_weight = None\n", "grad_weight = entropy[0].item() and None\n"
    ),
    "numpy of a tensor of the learner": Fault("reading", "read_tokens", ".cpu().numpy()", ".numpy()"),
}


def _plant(fault: Fault) -> str:
    """The place where it is seen, file and line."""
    module = importlib.import_module(f"megatron_retool.learner.{fault.module}")
    source = inspect.getsource(module)
    assert source.count(fault.old) == 1
    copy = dict(vars(module))
    exec(compile(source.replace(fault.old, fault.new), str(module.__file__), "exec"), copy)
    function = attrgetter(fault.function)
    function(module).__code__ = function(types.SimpleNamespace(**copy)).__code__
    name, text = fault.seen or (fault.module, fault.old)
    lines = inspect.getsource(importlib.import_module(f"megatron_retool.learner.{name}"))
    line = lines[: lines.index(text)].count("\n") + 1
    return f"megatron_retool/learner/{name}.py:{line} "


def _learn(fault: Fault, directory: Path) -> tuple[str, list[str], list[str]]:
    """Where the fault is seen, and where devices are mixed and waited for in a reading and an update."""
    place = _plant(fault)
    (case,) = cases(Architecture.from_pretrained(directory), ("one process",))
    learner = build(case, directory)
    with recorded() as record:
        learner.update(mini_batch(), temperature=TEMPERATURE)
        try:
            learner.log_probs(mini_batch(), temperature=TEMPERATURE)
        except TypeError as error:
            return place, [], [str(error)]
    return place, [str(event) for event in record.mixed], [str(event) for event in record.waits]


@pytest.mark.parametrize("name", FAULTS)
def test_is_seen_with_its_line(name: str, models: Path, on_gpus: Run) -> None:
    fault = FAULTS[name]
    place, mixed, waits = on_gpus(_learn, fault, models / "mistral-2", engine=False)
    assert [event for event in (*mixed, *waits) if place in event]
    assert bool(mixed) == (name == "a tensor of the host in a layer")
