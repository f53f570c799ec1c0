"""docs/models.md is what docs/models.json says, of every built-in family, and a verdict needs every check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conversion.model.family import built_in_families
from megatron_retool.parity.admission.comparison import ENGINE, too_far
from megatron_retool.parity.admission.engine_checks import KIND, LOG_PROBS, PARAMETERS
from megatron_retool.parity.admission.forced_routing import distance
from megatron_retool.parity.admission.outcome import Admission, AdmissionVerdict, Check, judged
from megatron_retool.parity.admission.page import FOUND, page
from megatron_retool.parity.admission.report import table, write_json


def test_the_page_is_up_to_date() -> None:
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    assert {model["family"] for model in found["models"]} == set(built_in_families())
    assert all(model["admitted"] for model in found["models"])
    said = "docs/models.md tells how it is made again"
    assert page(found) == FOUND.with_suffix(".md").read_text(encoding="utf-8"), said


def test_checks_of_sglang_are_rows_with_an_explanation() -> None:
    passed = Admission(
        "llama", "mine", {}, tuple(Check(KIND, name, AdmissionVerdict.PASS) for name in (PARAMETERS, LOG_PROBS))
    )
    refused = Admission("gpt_oss", "theirs", {}, (Check(KIND, LOG_PROBS, AdmissionVerdict.NOT_APPLICABLE, "no sinks"),))
    said = page({"models": [passed.as_json(), refused.as_json()], "packages": {}})
    assert f"| {PARAMETERS} | ✓ |  |" in said and f"| {LOG_PROBS} | ✓ | – |" in said
    assert "**SGLang's class** loads the weights" in said and "SGLang's log-probs: 2e-5" in said


def test_a_key_bias_is_held_against_what_its_gradient_is_summed_of() -> None:
    key = {"k_proj.weight": torch.full((32, 32), 1.0), "k_proj.bias": torch.full((32,), 0.1)}
    rest = {"q_proj.weight": torch.ones(32, 32), "q_proj.bias": torch.full((32,), 0.1), "unused.weight": torch.zeros(2)}
    expected = key | rest
    for name, error in (("k_proj.bias", 1e-3 * 0.1 / 32**0.5), ("q_proj.bias", 1e-3), ("k_proj.weight", 1e-3)):
        found = {**expected, name: expected[name] * (1 + 1e-3)}
        assert distance(found, expected) == pytest.approx(error, rel=1e-3)


def test_one_failure_refuses(tmp_path: Path) -> None:
    near, far = {"gradient": 9e-6, "entropy": 1.5e-5}, {"gradient": float("nan"), "metric loss": 2e-5, "log_probs": 0.0}
    assert too_far(near) == {} and set(too_far(far)) == {"gradient", "metric loss"}
    assert too_far({ENGINE: 2e-5}) == {} and all(too_far({ENGINE: value}) for value in (2.1e-5, float("nan")))
    passed, failed = judged("layout", "tp2", near, too_far(near)), judged("layout", "pp2", far, too_far(far))
    skipped = Check("layout", "ep2", AdmissionVerdict.NOT_APPLICABLE, "no experts")
    assert Admission("llama", "mine", {}, (passed, skipped)).admitted
    refused = Admission("llama", "mine", {}, (passed, skipped, failed))
    assert refused.failures == (failed,) and "metric loss 2.0e-05" in failed.reason
    write_json(tmp_path / "found.json", [refused])
    (model,) = json.loads((tmp_path / "found.json").read_text())["models"]
    assert model["admitted"] is False and model["checks"][0]["figures"] == {"gradient": 9e-6, "entropy": 1.5e-5}
    assert table(refused).row_count == 3
