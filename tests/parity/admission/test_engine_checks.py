"""An engine that computes another model than transformers is found: by a weight, or by a window of other size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission import comparison
from megatron_retool.parity.admission.engine_checks import LOG_PROBS, PARAMETERS, engine_checks
from megatron_retool.parity.admission.outcome import AdmissionVerdict
from megatron_retool.parity.admission.shrink import WINDOW, shrunk
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.planning.models import MODELS

GEMMA = shrunk(MODELS["gemma-3-1b"], 4)
WEIGHT = "model.layers.2.mlp.down_proj.weight"


def saved(config: Mapping[str, Any], directory: Path, **said: Any) -> tuple[Path, Architecture]:
    """A model with its reference, and the architecture that a config.json with ``said`` in it has."""
    model = random_model(config)
    save_model(model, directory, {**config, **said})
    architecture = Architecture.from_hf_config({**config, **said})
    comparison.write_reference(model, architecture, directory)
    return directory, architecture


@pytest.mark.rare
def test_other_numbers_are_found(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    same, weight = saved(GEMMA, tmp_path / "same"), saved(GEMMA, tmp_path / "weight")
    tensors = load_file(weight[0] / "model.safetensors")
    tensors[WEIGHT][0] *= 1.5
    save_file(tensors, weight[0] / "model.safetensors", {"format": "pt"})
    window = saved(GEMMA, tmp_path / "window", sliding_window=WINDOW + 1)
    absent = saved(GEMMA, tmp_path / "absent")
    (absent[0] / "model.safetensors").unlink()
    found = engine_checks([same, weight, window, absent], tmp_path / "engine", wanted=True)
    taken, computed = zip(*found, strict=True)
    assert {check.name for check in taken} == {PARAMETERS} and {check.name for check in computed} == {LOG_PROBS}
    assert [check.reason for check in (*taken[:3], computed[0])] == [""] * 4
    assert [check.verdict for check in taken] == [AdmissionVerdict.PASS] * 3 + [AdmissionVerdict.FAIL]
    assert [check.verdict for check in computed] == [AdmissionVerdict.PASS] + [AdmissionVerdict.FAIL] * 3
    off = [check.figures[comparison.ENGINE] for check in computed[:3]]
    assert 0 < off[0] < 2e-5 and min(off[1:]) > 1e-3
    assert "engine's log_probs" in computed[1].reason and "No such file" in taken[3].reason and computed[3].reason


def test_what_a_run_is_refused_for_is_not_computed(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    tied = {**shrunk(MODELS["qwen3-30b-a3b"], 4), "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**tied, "architectures": ["Qwen3MoeForCausalLM"]}))
    models = [(tmp_path, Architecture.from_hf_config(tied))]
    (found,) = engine_checks(models, tmp_path / "engine", wanted=True)
    assert [check.verdict for check in found] == [AdmissionVerdict.NOT_APPLICABLE] * 2
    assert all("tie_word_embeddings=true" in check.reason for check in found)
    (found,) = engine_checks(models, tmp_path / "unwanted", wanted=False)
    assert [check.reason for check in found] == ["not asked for"] * 2
