"""Adapters that begin with the files of peft: as peft itself writes them, in any layout; others are refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.config import (
    Config,
    ConfigError,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    load_config,
)
from megatron_retool.parity.admission.layouts import PP, SP, TP
from megatron_retool.parity.admission.tiny_model import hf_log_probs, save_model
from megatron_retool.parity.ranks import run_ranks
from tests.kit.adapter_reference import PROJECTIONS, SETTINGS, mini_batch, small_model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2 sp": (2, {TP: 2, SP: True}),
    "pp2": (2, {PP: 2}),
    "dp2": (2, {}),
}


def _learner(world: int, layout: dict[str, Any], directory: Path, **options: Any) -> Any:
    from megatron_retool.learner.learner import Learner

    lora = dataclasses.replace(SETTINGS, path=str(directory / "adapter"))
    section = LearnerConfig(
        world_size=world, dtype="float32", max_tokens_per_micro_batch=112, lora=options.pop("lora", lora), **layout
    )
    config = Config(model=ModelConfig(path=str(directory / "hf")), learner=section)
    return Learner(
        config, optimizer=OptimizerConfig(lr=1e-2), total_optimizer_steps=9, hf_dir=directory / "hf", **options
    )


def _log_probs(world: int, directory: Path, names: list[str]) -> dict[str, list[np.ndarray]]:
    """Before a step and after one."""
    found = {}
    for name in names:
        learner, batch = _learner(world, LAYOUTS[name][1], directory), mini_batch()
        found[name] = [learner.log_probs(batch)["log_probs"]]
        learner.sft_update(batch)
        found[name].append(learner.log_probs(batch)["log_probs"])
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter that peft has written with factors that are not zero, and peft's log-probs of the batch."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    directory = tmp_path_factory.mktemp("path")
    model = small_model("qwen3")
    save_model(model, directory / "hf")
    config = PeftConfig(
        r=SETTINGS.rank, lora_alpha=int(SETTINGS.alpha), target_modules=PROJECTIONS, init_lora_weights=False
    )
    torch.manual_seed(0)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(directory / "adapter")
    batch = mini_batch()
    with torch.no_grad():
        found = hf_log_probs(adapted.double(), batch)[0].numpy()
        base = hf_log_probs(adapted.unload(), batch)[0].numpy()
    np.save(directory / "expected.npy", np.where(batch.loss_mask, found, 0))
    assert np.abs(found - base).max() > 0.1, "the adapter matters"
    return directory


def test_adapters_begin_with_what_peft_has_written(directory: Path) -> None:
    expected = np.load(directory / "expected.npy")
    for world in (1, 2):
        names = [name for name, (size, _) in LAYOUTS.items() if size == world]
        for name, found in run_ranks(_log_probs, world, directory / f"ranks{world}", world, directory, names).items():
            np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5, err_msg=name)
            assert np.abs(found[1] - expected).max() > 1e-3, "and are trained from there"


def _refusals(directory: Path) -> dict[str, str]:
    path = str(directory / "adapter")
    cases: dict[str, dict[str, Any]] = {
        "rank": {"lora": dataclasses.replace(SETTINGS, rank=8, path=path)},
        "alpha": {"lora": dataclasses.replace(SETTINGS, alpha=4.0, path=path)},
        "targets": {"lora": dataclasses.replace(SETTINGS, targets=["attention"], path=path)},
        "nowhere": {"lora": dataclasses.replace(SETTINGS, path=str(directory / "nowhere"))},
        "reference": {"with_reference": True},
    }
    said = {}
    for name, options in cases.items():
        with pytest.raises(ConfigError) as refused:
            _learner(1, {}, directory, **options)
        said[name] = str(refused.value)
    critic = _learner(1, {}, directory, role="critic")
    fresh = all(not b.any() for module in critic.model_chunks[0].modules() for b in getattr(module, "b", ()))
    return {**said, "critic": "fresh" if fresh else "of the files"}


def test_an_adapter_of_other_settings_is_refused_by_name(directory: Path) -> None:
    said = run_ranks(_refusals, 1, directory / "refusals", directory)
    assert "has rank 4: set learner.lora.rank=4 in place of 8" in said["rank"]
    assert "has alpha 8: set learner.lora.alpha=8 in place of 4" in said["alpha"]
    assert "it adapts other matrices than learner.lora.targets=[attention] of this model" in said["targets"]
    assert "nowhere has no adapter_config.json" in said["nowhere"]
    assert "does not go with a reference policy" in said["reference"]
    assert said["critic"] == "fresh"


def test_a_run_with_a_reference_policy_refuses_a_path_before_it_starts(directory: Path) -> None:
    own = ["learner.lora.rank=4", f"learner.lora.path={directory / 'adapter'}"]
    assert load_config(None, own).learner.lora.path
    with pytest.raises(ConfigError, match="learner.lora.path=.* does not go with a reference policy"):
        load_config(None, [*own, "algorithm.kl_in_loss=0.1"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': the learner's adapters are plain LoRA"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"lora_alpha": None}, "lora_alpha=None: give a number"),
        ({"r": 4.5}, "r=4.5: give a whole number of at least 1"),
        ({"lora_alpha": 0}, r"lora_alpha=0(\.0)?: give a number above 0"),
    ],
)
def test_what_is_no_plain_adapter_is_refused_by_name(
    change: dict[str, Any], message: str, directory: Path, tmp_path: Path
) -> None:
    config = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        LoraConfig(rank=4, alpha=8.0, path=str(tmp_path)).check_files()
