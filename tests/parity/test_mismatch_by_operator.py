"""Which operator engine and learner differ by: real engines, whose weights are rounded but for one operator's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron_retool.config import ConfigError
from megatron_retool.parity import mismatch_by_operator as operators
from tests.kit.tiny_models import hf_model


@pytest.mark.rare
def test_the_rounded_operator_is_found(tmp_path: Path) -> None:
    hf_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    asked = []
    found = operators.report(
        operators.model_directory(str(tmp_path / "model")),
        dtype="float32",
        round_to="int3",
        texts=8,
        tokens=20,
        seed=1,
        only=["qkv"],
        on_round=lambda done, of: asked.append((done, of)),
    )
    assert asked == [(1, 4), (2, 4), (3, 4), (4, 4)] and found.tokens == 160
    assert found.matched == 0.0
    assert 0.0 < found.without["qkv"] < found.unmatched and 0.0 < found.alone["qkv"] < found.unmatched
    low, high = found.ranges["qkv"]
    assert low < 1 - found.alone["qkv"] / found.unmatched < high
    operators.write(found, str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text())["unmatched"] == found.unmatched
    console = Console(record=True, width=100)
    console.print(operators.table(found))
    assert "with all operators equal 0.00e+00" in console.export_text()


def test_models_and_names_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Hugging Face model directory"):
        operators.model_directory(str(tmp_path))
    hf_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="router: this model's operators are norm, qkv"):
        operators.report(tmp_path, dtype="float32", round_to=None, texts=2, tokens=2, seed=0, only=["router"])


@pytest.mark.parametrize(
    ("weight", "operator"),
    [
        ("model.layers.0.self_attn.q_b_proj.weight", "qkv"),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", "qkv"),
        ("model.layers.0.linear_attn.out_proj.weight", "attention_output"),
        ("model.layers.0.self_attn.kv_b_proj.weight", "attention"),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "mlp_up"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "experts"),
        ("model.layers.0.block_sparse_moe.experts.3.w2.weight", "experts"),
    ],
)
def test_operators_of_matrices(weight: str, operator: str) -> None:
    assert operators._operator_of_weight(weight) == operator


def test_ranges_are_wide_where_texts_differ() -> None:
    unmatched = np.abs(np.random.default_rng(0).normal(size=(40, 10)))
    half, uneven = unmatched / 2, unmatched * np.arange(40)[:, None] / 40
    (low, high), (lowest, highest) = operators._ranges(unmatched, [half, uneven], 0)
    assert low == pytest.approx(0.5) and high == pytest.approx(0.5)
    assert highest - lowest > 0.05
