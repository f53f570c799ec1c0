"""A sync that brings layers for multi-token prediction too, against SGLang's classes of policy and draft.

Both read all that is sent, and each has to find its own in it. An engine with a draft needs a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_rollout.engine.weight_sync.engine_classes import Load, load_into_engine_classes
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync
from tests.learner.test_multi_token_prediction import make_model

pytest.importorskip("sglang")

CLASSES = {
    "mimo": ("MiMoForCausalLM", "MiMoMTP"),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeForCausalLMNextN"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteForCausalLMNextN"),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextForCausalLMMTP"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5ForCausalLMMTP"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5ForCausalLMMTP"),
}
"""SGLang's, of the policy and of its draft."""


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = {
    "rope_scaling": YARN,
    "rope_parameters": YARN,
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
}
STATED = {
    "deepseek_v3": DEEPSEEK,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), {"full_attention_interval": 2}),
}
"""What published checkpoints state and transformers leaves out; on a CPU SGLang's class of DeepSeek-V3 knows no other
positions."""
HEAD = "not written, or not right: lm_head.weight (1 in all)"
EMBEDDING_AND_HEAD = "not written, or not right: model.embed_tokens.weight, lm_head.weight (2 in all)"
OF_THE_POLICY = {"mimo": "", "qwen3_5_text": HEAD, "qwen3_5_moe_text": HEAD}
"""What a draft does not take from a sync, because it computes with the policy's own; else ``EMBEDDING_AND_HEAD``."""


@pytest.mark.slow
def test_policy_and_draft_take_their_own(tmp_path: Path) -> None:
    loads, expected = [], {}
    for family, (policy, draft) in CLASSES.items():
        directory = tmp_path / family
        make_model(family, directory, predictors=1)
        if family == "mimo":  # whose config.json is read by code that comes with its checkpoint
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
        for name in (policy, draft):
            override = {"architectures": [name], **STATED.get(family, {})}
            loads.append(Load(f"{family}: {name}", str(directory), str(directory / "model.safetensors"), override))
        untouched = OF_THE_POLICY.get(family, EMBEDDING_AND_HEAD)
        expected |= {f"{family}: {policy}": "", f"{family}: {draft}": untouched}
    found = load_into_engine_classes(loads, tmp_path)
    assert {name: loaded.wrong for name, loaded in found.items()} == expected


@pytest.mark.parametrize(("draft", "models"), [(False, "target"), (True, "all")])
def test_which_of_an_engines_models_load(draft: bool, models: str) -> None:
    with TensorWeightSync(["http://127.0.0.1:1"], draft=draft) as sync:
        assert sync._models == {"selector": models}
