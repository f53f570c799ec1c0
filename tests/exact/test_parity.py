"""With learner.match_engine=exact log-probs, gradients and weights are transformers' within the usual bars."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission import comparison
from megatron_retool.parity.admission.layouts import Case
from megatron_retool.parity.admission.requests import Request, shrunk_config
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.planning.models import MODELS
from tests.kit.tiny_models import hf_model

CASES = [
    Case("one process", 1, {"match_engine": "exact"}),
    Case("shared prefixes", 1, {"match_engine": "exact", "share_prefixes": True}),
    Case("recompute", 1, {"match_engine": "exact"}, recompute="full"),
]
TWO_RANKS = [Case("pp2", 2, {"match_engine": "exact", "pipeline_model_parallel_size": 2})]


def compare(cases: list[Case], directory: Path) -> dict[str, comparison.Found]:
    return {case.name: comparison.compare(case, directory) for case in cases}


rare = functools.partial(pytest.param, marks=pytest.mark.rare)


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen3",
        "qwen3_moe",
        rare("deepseek-v2"),
        "deepseek-v3",
        rare("glm-4.5"),
        rare("olmo-2-32b"),
        rare("qwen1.5-moe-a2.7b"),
        "olmo-3-7b",
        "qwen3.5-9b",
        "qwen3-next-80b-a3b",
        "gemma-3-1b",
        rare("ministral-3-8b"),
        "ernie-4.5-0.3b",
        rare("granite-3.2-2b"),
        rare("granite-3.1-1b-a400m"),
        "granite-4.0-h-tiny",
    ],
)
def test_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    if family in MODELS:
        # In every fourth layer of models with delta nets there is attention.
        model = random_model(shrunk_config(Request(family, MODELS[family], layers=4 if "qwen3" in family else 2)))
    else:
        model = hf_model(family, num_hidden_layers=2)
    save_model(model, directory)
    comparison.write_reference(model, Architecture.from_pretrained(directory), directory)
    architecture = Architecture.from_pretrained(directory)
    unshared = architecture.sliding_window is not None or architecture.linear_layers
    cases = [case for case in CASES if not (unshared and case.name == "shared prefixes")]
    found = run_ranks(compare, 1, tmp_path / "one", cases, directory)
    found |= run_ranks(compare, 2, tmp_path / "two", TWO_RANKS, directory)
    assert {name: comparison.too_far(figures) for name, figures in found.items()} == dict.fromkeys(found, {})
    assert all("gradient" in figures for figures in found.values())
