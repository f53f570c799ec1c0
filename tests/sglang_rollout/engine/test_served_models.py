"""Which models SGLang serves otherwise than config.json says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conversion.model.family import built_in_families
from megatron_retool.config import Config, ConfigError, load_config
from sglang_rollout.engine.served_models import ATTENTION_GROUPS, OWN_OUTPUT_LAYER, WHOLE_PAST, check_served_model
from tests.learner.tiny_models import hf_model


def configured(directory: Path, *overrides: str, **keys: Any) -> Config:
    base = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 96,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(base | keys))
    return load_config(None, [f"model.path={directory}", *overrides])


def of_class(name: str) -> dict[str, Any]:
    kinds = {family.model_type.replace("_", ""): family.model_type for family in built_in_families().values()}
    return {"model_type": kinds.get(name.removesuffix("ForCausalLM").lower(), "other"), "architectures": [name]}


EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@pytest.mark.parametrize("name", sorted(WHOLE_PAST))
def test_tied_models_are_refused_where_the_class_has_an_output_layer_of_its_own(name: str, tmp_path: Path) -> None:
    keys = of_class(name) | EXPERTS | {"sliding_window": None}
    for untied in ({"tie_word_embeddings": False}, {}):
        check_served_model(configured(tmp_path, **keys, **untied))
    tied = configured(tmp_path, **keys, tie_word_embeddings=True)
    if name not in OWN_OUTPUT_LAYER:
        check_served_model(tied)
        return
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*tie_word_embeddings=true.*{name}"):
        check_served_model(tied)
    check_served_model(configured(tmp_path, "rollout.engine.backend=transformers", **keys, tie_word_embeddings=True))


@pytest.mark.parametrize("name", sorted(WHOLE_PAST - {"LlamaForCausalLM"}))
def test_a_window_is_refused_where_a_text_can_outgrow_it(name: str, tmp_path: Path) -> None:
    keys = of_class(name) | EXPERTS | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 512}
    with pytest.raises(ConfigError, match=r"sliding_window=512.*600 now"):
        check_served_model(configured(tmp_path, "data.max_prompt_length=100", "data.max_response_length=500", **keys))
    for limits in (["data.max_response_length=412"], ["rollout.engine.context_length=512"]):
        check_served_model(configured(tmp_path, "data.max_prompt_length=100", *limits, **keys))
    check_served_model(configured(tmp_path, **{**keys, "sliding_window": None}))


def test_groups_of_gpus_have_to_fit_the_model(tmp_path: Path) -> None:
    size = "rollout.engine.tensor_parallel_size=8"
    experts, attention = "rollout.engine.expert_parallel_size=", "rollout.engine.attention_data_parallel_size="
    moe, dense = of_class("Qwen3MoeForCausalLM") | EXPERTS, of_class("LlamaForCausalLM")
    check_served_model(configured(tmp_path, size, f"{experts}4", f"{attention}8", **moe))
    check_served_model(configured(tmp_path, size, f"{experts}1", **dense))
    for keys, override, words in (
        (moe, f"{experts}8", "must divide the model's 4 experts"),
        (dense, f"{experts}2", "is a dense model"),
        (dense, f"{attention}2", "LlamaForCausalLM does not give requests to groups"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_served_model(configured(tmp_path, size, override, **keys))


def test_models_that_are_not_there_are_left_to_those_who_fetch_them() -> None:
    check_served_model(load_config(None, ["model.path=Qwen/Qwen3-30B-A3B"]))
    check_served_model(load_config(None, []))


def test_the_tables_are_those_of_the_installed_sglang() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    models = Path(found.submodule_search_locations[0]) / "srt" / "models"
    own_head = set()
    for name in WHOLE_PAST:
        (source,) = (
            text for text in (file.read_text() for file in models.glob("*.py")) if re.search(rf"\nclass {name}\(", text)
        )
        assert not re.search(r"sliding_window(?!_size=None)", source), f"{name} knows windows by now"
        parent = re.search(rf"\nclass {name}\((\w+)\)", source)
        inherits = parent is not None and parent[1] in WHOLE_PAST
        if not inherits and "tie_word_embeddings" not in source:
            own_head.add(name)
        in_groups = "attn_tp_size" in source and not inherits
        assert in_groups is (name in ATTENTION_GROUPS), name
    assert own_head == OWN_OUTPUT_LAYER
    declared = {name for family in built_in_families().values() for name in family.engine_classes}
    assert declared <= WHOLE_PAST


def test_the_cure_saves_a_model_of_the_same_log_probs(tmp_path: Path) -> None:
    model = hf_model("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_served_model(load_config(None, [f"model.path={tmp_path}"]))
    command = re.search(r'python -c "(.*)"$', str(refused.value))
    assert command is not None
    # The tiny model has no tokenizer.
    code = command[1].replace("AutoTokenizer.from_pretrained(a).save_pretrained(b)", "0")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    untied = Path(f"{tmp_path}-untied")
    check_served_model(load_config(None, [f"model.path={untied}"]))
    assert json.loads((untied / "config.json").read_text())["tie_word_embeddings"] is False
    weights = load_file(untied / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
