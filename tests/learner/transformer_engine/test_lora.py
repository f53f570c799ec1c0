"""Adapters on Transformer Engine's layers are peft's, as on Megatron-Core's own, with torch in the kernels' place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_retool.parity.admission.layouts import EP, ETP, PP, SP, TP
from tests.kit.adapter_reference import write_reference
from tests.learner.test_lora import FULL, compare_layout, within
from tests.learner.transformer_engine.conftest import Run

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {}),
    "recompute": ("qwen3", 1, {"recompute": FULL}),
    "tied, biases": ("qwen2", 1, {}),
    "norms after": ("olmo2", 1, {}),
    "zero-centered norms after": ("gemma3_text", 1, {}),
    "experts": ("qwen3_moe", 1, {}),
    "latents": ("deepseek_v3", 1, {}),
    "gated delta nets": ("qwen3_next", 1, {}),
    "Mamba-2": ("granitemoehybrid", 1, {}),
    "tp2": ("qwen3", 2, {TP: 2}),
    "tp2 sp": ("qwen3", 2, {TP: 2, SP: True}),
    "tp2 sp, norms after": ("olmo2", 2, {TP: 2, SP: True}),
    "pp2": ("qwen3", 2, {PP: 2}),
    "dp2": ("qwen3", 2, {}),
    "experts, ep2": ("qwen3_moe", 2, {EP: 2}),
    "experts, tp2 sp etp1": ("qwen3_moe", 2, {TP: 2, SP: True, ETP: 1}),
    "latents, tp2 sp etp1": ("deepseek_v3", 2, {TP: 2, SP: True, ETP: 1}),
    "gated delta nets, tp2 sp etp1": ("qwen3_next", 2, {TP: 2, SP: True, ETP: 1}),
    "experts, tp2 sp etp2": ("qwen3_moe", 2, {TP: 2, SP: True, ETP: 2}),
}


def _compare_all(world: int, directory: Path) -> dict[str, dict[str, float]]:
    chosen = {name: case for name, case in LAYOUTS.items() if case[1] == world}
    return {name: compare_layout(world, settings, directory / family) for name, (family, _, settings) in chosen.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for family in {family for family, _, _ in LAYOUTS.values()}:
        write_reference(family, directory / family)
    return directory


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_are_pefts(world: int, models: Path, with_transformer_engine: Run) -> None:
    found = with_transformer_engine(_compare_all, world, world, models)
    assert found.keys() == {name for name, case in LAYOUTS.items() if case[1] == world}
    for name, figures in found.items():
        within(figures, name)
