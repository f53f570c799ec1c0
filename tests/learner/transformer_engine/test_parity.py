"""The learner on Transformer Engine's layer spec computes what transformers computes, with torch in the kernels' place.

As ``tests/parity`` does for the local spec: log-probs, entropy, loss, every gradient, and the weights after one DAPO
update. What this proves is the wiring: which module gets what, packed sequences, rotary tables, the
collectives around parallel layers, experts, gradients' way to the optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission.comparison import compare, too_far
from megatron_retool.parity.admission.layouts import cases
from tests.kit.tiny_models import FAMILIES, WITH_PARTS
from tests.learner.transformer_engine.conftest import Run

CASES = [
    *[(1, family, "one process") for family in (*FAMILIES, *WITH_PARTS)],
    (1, "qwen3", "shared prefixes"),
    (2, "qwen3_moe", "ep2 tp2, shared prefixes"),
    *[(2, "qwen3", name) for name in ("tp2", "tp2 sp", "pp2", "dp2")],
    *[(2, "olmo2", name) for name in ("tp2", "tp2 sp")],
    (2, "olmo3", "pp2"),
    (2, "gemma3_text", "tp2 sp"),
    (2, "granite", "tp2 sp"),
    *[(2, "qwen3_moe", name) for name in ("tp2 sp", "pp2", "ep2", "ep2 tp2")],
]


def _compare_all(world: int, directory: Path) -> dict[tuple[str, str], Any]:
    return {(family, name): _compare(name, directory / family) for w, family, name in CASES if w == world}


def _compare(name: str, directory: Path) -> Any:
    (case,) = cases(Architecture.from_pretrained(directory), (name,))
    return compare(case, directory)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equals_transformers(world: int, references: Path, with_transformer_engine: Run) -> None:
    found = with_transformer_engine(_compare_all, world, world, references)
    assert len(found) == len([case for case in CASES if case[0] == world])
    assert {case: too_far(figures) for case, figures in found.items() if too_far(figures)} == {}
