"""Models that no family covers are refused by the name of the part that is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from conversion.model.architecture import Architecture
from conversion.model.config_reader import UnsupportedArchitecture
from megatron_retool.commands.command_line import parse
from megatron_retool.parity.admission.admit import examine
from megatron_retool.parity.admission.missing_parts import known_parts, missing_parts, unread_settings
from megatron_retool.parity.admission.modelling_code import read_code
from megatron_retool.parity.admission.requests import NotAdmissible, Request, read_config
from megatron_retool.parity.admission.tiny_model import random_model
from megatron_retool.planning.models import MODELS

GLM4 = {
    "model_type": "glm4",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 128,
}
SOLAR = {**GLM4, "model_type": "solar_open", "head_dim": 16, "num_key_value_heads": 2, "n_routed_experts": 8}
LAYER = "model.layers.7."


def refusal(hf_config: dict[str, object], tmp_path: Path) -> str:
    with pytest.raises(NotAdmissible) as error:
        examine([Request("mine", hf_config)], tmp_path)
    assert list(tmp_path.iterdir()) == []
    return str(error.value)


def test_an_unknown_family_by_its_missing_part(tmp_path: Path) -> None:
    said = refusal(GLM4, tmp_path)
    assert "model_type='glm4' is not one of" in said
    assert "norms after attention and MLP under other names" in said.partition("Missing parts: ")[2]


def test_a_newcomer_whose_parts_are_all_there(tmp_path: Path) -> None:
    said = refusal(SOLAR, tmp_path)
    assert "Every part that its tensors show is there (" in said and "*ATTENTION, *EXPERTS" in said


@pytest.mark.parametrize(
    ("model_type", "more", "part"),
    [
        ("mimo_v2_flash", {}, "scaled values"),
        ("deepseek_v4", {}, "hc_mult=4, which no family here reads"),
        ("llama4_text", {"attn_temperature_tuning": True}, "queries scaled by their position"),
        ("hy_v3", {}, "router_scaling_factor=2.826, which no family here reads"),
        ("exaone4", {}, "transformers' Attention.forward, Model.forward, unlike those of every family here"),
        ("cohere", {}, "scaled logits"),
        ("arcee", {}, "transformers' MLP.forward, unlike those of every family here"),
    ],
)
def test_parts_that_show_in_no_tensor(model_type: str, more: dict[str, object], part: str) -> None:
    assert part in missing_parts({**GLM4, "model_type": model_type, **more}, [])


def test_a_key_with_the_value_of_an_absent_part_is_not_named() -> None:
    assert "scaled logits" not in missing_parts({**GLM4, "model_type": "cohere", "logit_scale": 1.0}, [])


@pytest.mark.parametrize("name", MODELS)
def test_every_key_of_an_admitted_model_is_read(name: str) -> None:
    assert unread_settings(MODELS[name]) == {}


OWN = """
class OwnAttention(nn.Module):
    def forward(self, hidden_states: Tensor, config=None) -> Tensor:
        'Documented.'
        if self.config.turned and getattr(self.config, "scale", 1.0):
            hidden_states = apply_rotary_pos_emb(hidden_states.float())
        return hidden_states * self.config.rope_parameters["beta"]

class OwnVision:
    def forward(self): return self.config.patches

class OwnPreTrainedModel:
    def forward(self): return self.config.initializer_range

def rotate_half(x): return x[..., 0::2]

def apply_rotary_pos_emb(x): return rotate_half(x)

class OwnForCausalLM(OwnPreTrainedModel):
    def __init__(self): self.layer = OwnAttention(); self.size = self.config.size
"""


def test_code_is_read_as_far_as_the_model_refers_to_it() -> None:
    code = read_code(OWN, "OwnForCausalLM")
    assert code.keys == {"turned", "scale", "rope_parameters", "beta", "size"}
    assert code.functions.keys() == {"Attention.forward", "rotate_half", "apply_rotary_pos_emb"}
    assert code.turns_pairs and code.turns_some_layers
    again = OWN.replace("Own", "Other").replace(".float()", "").replace("'Documented.'", "# not documented")
    assert read_code(again, "OtherForCausalLM").functions == code.functions
    plain = read_code(OWN.replace("0::2", ": 4").replace("if self.config.turned", "while True"), "OwnForCausalLM")
    assert not plain.turns_pairs and not plain.turns_some_layers


def test_a_known_family_with_a_part_that_is_missing(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    said = refusal({**MODELS["glm-4.5"], "rope_scaling": yarn}, tmp_path)
    assert "yarn positions with partial_rotary_factor=0.5: a factor on only the rotated features is missing" in said


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (LAYER + "attention.kv_b_proj.weight", "multi-head latent attention"),
        (LAYER + "linear_attn.q_conv1d.weight", "linear attention of another kind, or a state space"),
        (LAYER + "mlp.moe_statics.e_score_correction_bias", "a router with a bias for the choice of experts"),
        (LAYER + "self_attn.dense.bias", "a bias on the attention's output projection"),
        (LAYER + "strange.weight", "the tensor model.layers.N.strange.weight"),
    ],
)
def test_parts_by_tensors(name: str, part: str) -> None:
    assert missing_parts({}, [name, LAYER + "self_attn.q_proj.weight"]) == [part]


def test_parts_by_configuration() -> None:
    config = {"hidden_act": "gelu", "final_logit_softcapping": 30.0, "rope_scaling": {"rope_type": "dynamic"}}
    assert missing_parts(config, []) == ["soft-capped logits", "the activation gelu", "dynamic positions"]
    fused = [f"model.layers.0.{name}.weight" for name in ("mlp.gate_up_proj", "mlp.down_proj")]
    assert known_parts(fused) == ["FUSED_SWIGLU"]


def test_what_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(NotAdmissible, match="no directory with a config.json, no such file, and no published model"):
        read_config(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(NotAdmissible, match="holds a list"):
        read_config(str(tmp_path))
    assert read_config("Qwen3-8B") == (MODELS["qwen3-8b"], None)
    (tmp_path / "config.json").write_text(json.dumps(GLM4))
    assert read_config(str(tmp_path / "config.json")) == (GLM4, tmp_path)


def test_the_command_needs_a_model() -> None:
    run, options = parse(["admit"])
    with pytest.raises(ValueError, match="nothing to examine"):
        run(options, Console())


def test_a_switch_of_a_known_family_is_named_alone(tmp_path: Path) -> None:
    name = next(name for name, config in MODELS.items() if config["model_type"] == "deepseek_v3")
    said = refusal({**MODELS[name], "attention_bias": True}, tmp_path)
    assert said == "mine: attention_bias=true is not supported for deepseek_v3"


def test_a_pattern_of_windows_as_text(tmp_path: Path) -> None:
    """EXAONE 4 as it is published: one letter a layer, over and over."""
    exaone = {**GLM4, "model_type": "exaone4", "sliding_window_pattern": "LLLG", "sliding_window": 4096}
    exaone["layer_types"] = [*["sliding_attention"] * 3, "full_attention"]
    said = refusal(exaone, tmp_path)
    assert "mine: model_type='exaone4' is not one of" in said
    assert "Every part that its tensors show is there (*" in said or "Missing parts: " in said


def test_a_model_with_sizes_of_other_names_takes_no_memory(tmp_path: Path) -> None:
    jamba = {"model_type": "gpt_neo", "hidden_size": 16384, "num_layers": 200, "attention_types": [[["global"], 200]]}
    before = psutil.Process().memory_info().rss
    assert "model_type='gpt_neo' is not one of" in refusal(jamba, tmp_path)
    assert psutil.Process().memory_info().rss - before < 2**30
    with pytest.raises(ValueError, match="still has .* parameters"):
        random_model({**jamba, "num_layers": 12, "attention_types": [[["global"], 12]]})


def test_nobody_is_asked_whether_to_run_a_models_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asked"))
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    assert "model_type='mimi' is not one of" in refusal({"model_type": "mimi", "auto_map": code}, tmp_path)


def test_weights_that_modelopt_has_quantised_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(NotAdmissible, match=r'hf_quant_config\.json: ModelOpt has quantised .* quant_algo="W4A8_AWQ"'):
        read_config(str(tmp_path))
    with pytest.raises(UnsupportedArchitecture, match=r"hf_quant_config\.json: ModelOpt has quantised"):
        Architecture.from_pretrained(tmp_path, dequantized=True)


def test_a_bad_value_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["qwen3-8b"], "hidden_size": "big"}))
    script = "import sys; from megatron_retool.__main__ import main; main(); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", script, "admit", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "300"})
    assert 'hidden_size="big"' in done.stdout and done.returncode == 0, done.stdout


def test_the_family_of_what_conversions_dequantise_is_examined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert read_config(str(tmp_path)) == (MODELS["qwen3-8b"], tmp_path)
    with pytest.raises(UnsupportedArchitecture, match=r"hf_quant_config\.json: ModelOpt has quantised .*hf_to_mcore"):
        Architecture.from_pretrained(tmp_path)
