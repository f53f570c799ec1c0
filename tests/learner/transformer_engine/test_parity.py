"""The learner on Transformer Engine's layer spec computes what transformers computes, with torch in the kernels' place.

As ``tests/learner/test_parity.py`` does for the local spec: log-probs, entropy, loss, every gradient, and the weights
after one DAPO update. What this proves is the wiring: which module gets what, packed sequences, rotary tables, the
collectives around parallel layers, experts, gradients' way to the optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.learner.test_parity import compare
from tests.learner.tiny_models import FAMILIES
from tests.learner.transformer_engine.conftest import Run

CASES = [
    *[(1, family, "one") for family in FAMILIES],
    (1, "qwen3", "shared"),
    (2, "qwen3_moe", "ep2_tp2_shared"),
    *[(2, "qwen3", name) for name in ("tp2", "tp2_sp", "pp2", "dp2")],
    *[(2, "qwen3_moe", name) for name in ("tp2_sp", "pp2", "ep2", "ep2_tp2")],
]


def _compare_all(world: int, directory: Path) -> dict[tuple[str, str], Any]:
    return {(family, name): compare(world, family, name, directory) for w, family, name in CASES if w == world}


@pytest.mark.parametrize("world", [1, 2])
def test_equals_transformers(world: int, references: Path, with_transformer_engine: Run) -> None:
    found = with_transformer_engine(_compare_all, world, world, references)
    assert len(found) == len([case for case in CASES if case[0] == world])
    too_far = {
        (*case, quantity): difference
        for case, answers in found.items()
        for quantity, difference in answers.items()
        if not difference <= (2e-5 if quantity == "entropy" else 1e-5)
    }
    assert not too_far
