"""Which models SGLang serves otherwise than config.json says."""

from __future__ import annotations

import importlib.util
import inspect
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
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.planning.models import MODELS
from sglang_rollout.engine.served_models import (
    ATTENTION_GROUPS,
    EXPERTS_EVERYWHERE,
    OWN_OUTPUT_LAYER,
    WHOLE_PAST,
    check_served_model,
)
from tests.kit.model_variants import LONG_TEXTS, PHI_4_MINI
from tests.kit.tiny_models import hf_model


def configured(directory: Path, *overrides: str, **keys: Any) -> Config:
    base = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 96,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(base | keys))
    return load_config(None, [f"model.path={directory}", *overrides])


def of_class(name: str) -> dict[str, Any]:
    kinds = {family.model_type.replace("_", ""): family.model_type for family in built_in_families().values()}
    kinds["mimo"] = "qwen2"
    keys = {"model_type": kinds.get(name.removesuffix("ForCausalLM").lower(), "other"), "architectures": [name]}
    return keys | POSITIONS if keys["model_type"] == "ministral3" else keys


POSITIONS = {
    "original_max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4096,
    },
}
"""Without which a Ministral 3 is none."""


EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
KINDS = ["linear_attention", "mlp", "linear_attention", "full_attention"]
"""What transformers 5 calls the layers of the small Nemotron-H."""
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "head_dim": 16,
    "rope_theta": 10000.0,
}
ON_A_GPU = "rollout.engine.device=cuda"


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


@pytest.mark.parametrize("name", sorted(EXPERTS_EVERYWHERE))
def test_dense_layers_are_refused_where_the_class_has_experts_everywhere(name: str, tmp_path: Path) -> None:
    keys = of_class(name) | EXPERTS | LINEAR
    check_served_model(configured(tmp_path, ON_A_GPU, **keys))
    with pytest.raises(ConfigError, match=rf"{name} has experts in every layer.*dense ones \(1\).*=transformers"):
        check_served_model(configured(tmp_path, ON_A_GPU, **keys, mlp_only_layers=[1]))
    check_served_model(configured(tmp_path, "rollout.engine.backend=transformers", **keys, mlp_only_layers=[1]))


def test_positions_that_sglang_reads_otherwise_are_refused(tmp_path: Path) -> None:
    olmo = {**MODELS["olmo-3-7b"], "architectures": ["Olmo3ForCausalLM"]}
    check_served_model(configured(tmp_path, **olmo))
    kinds = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    for change in ({"rope_parameters": kinds}, {"rope_theta": None}):
        with pytest.raises(ConfigError, match=f"{tmp_path}.*olmo3 reads rope_theta and rope_scaling"):
            check_served_model(configured(tmp_path, **{**olmo, **change}))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for key in ("rope_scaling", "rope_parameters"):
        qwen = of_class("Qwen3ForCausalLM")
        check_served_model(configured(tmp_path, **qwen, **{key: yarn}))
        with pytest.raises(ConfigError, match=r"attention_factor=0.9 .*factor=4.0"):
            check_served_model(configured(tmp_path, **qwen, **{key: {**yarn, "attention_factor": 0.9}}))


def test_longrope_that_sglang_computes_otherwise_is_refused(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**PHI_4_MINI, "architectures": ["Phi3ForCausalLM"]}
    short = ["data.max_prompt_length=1096", "data.max_response_length=3000"]
    check_served_model(configured(tmp_path, *short, **keys))
    check_served_model(configured(tmp_path, "rollout.engine.context_length=4096", **keys))
    long = ["data.max_prompt_length=1097", *short[1:]]
    with pytest.raises(
        ConfigError, match=r"other factors .*=4096 tokens.*max_response_length, 4097 now.*to 1\.190238071"
    ):
        check_served_model(configured(tmp_path, *long, **keys))
    check_served_model(configured(tmp_path, **{**LONG_TEXTS, "architectures": ["Phi3ForCausalLM"]}))
    rope = keys["rope_scaling"]
    for change in ({"attention_factor": 1.5}, {"factor": 4.0}, {"short_mscale": 1.5}):
        with pytest.raises(ConfigError, match="SGLang multiplies rotated queries and keys by 1.*short_mscale and long"):
            check_served_model(configured(tmp_path, *short, **{**keys, "rope_scaling": {**rope, **change}}))
    moved = {key: value for key, value in keys.items() if key not in ("partial_rotary_factor", "rope_scaling")}
    moved["rope_parameters"] = {**rope, "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    with pytest.raises(ConfigError, match=r"Phi3ForCausalLM reads partial_rotary_factor=1.0 .*rotate 96 features"):
        check_served_model(configured(tmp_path, *short, **moved))


def test_latent_attention_is_refused_on_a_cpu(tmp_path: Path) -> None:
    keys = shrunk(MODELS["deepseek-v3"], 4)
    with pytest.raises(ConfigError, match=r"other log-probs on a CPU for multi-head latent attention \(deepseek_v3\)"):
        check_served_model(configured(tmp_path, "rollout.engine.device=cpu", **keys))
    check_served_model(configured(tmp_path, "rollout.engine.device=cuda", **keys))
    check_served_model(configured(tmp_path, "rollout.engine.backend=transformers", **keys))


def test_a_model_type_that_sglang_does_not_know_is_refused_with_the_one_that_it_does(tmp_path: Path) -> None:
    keys, gpu = shrunk(MODELS["kimi-k2"], 4), "rollout.engine.device=cuda"
    with pytest.raises(ConfigError, match="model_type=kimi_k2 by code from the hub.*set it to deepseek_v3"):
        check_served_model(configured(tmp_path, gpu, **keys))
    check_served_model(configured(tmp_path, gpu, **{**keys, "model_type": "deepseek_v3"}))


def test_minimax_is_refused_where_sglang_would_compute_another_model(tmp_path: Path) -> None:
    keys = {**shrunk(MODELS["minimax-m2"], 4), "architectures": ["MiniMaxM2ForCausalLM"]}
    gpu, cpu = "rollout.engine.device=cuda", "rollout.engine.device=cpu"
    check_served_model(configured(tmp_path, gpu, **keys))
    with pytest.raises(ConfigError, match="normalises queries and keys with a kernel that needs a GPU"):
        check_served_model(configured(tmp_path, cpu, **keys))
    for change, words in (
        ({"use_qk_norm": None}, "needs use_qk_norm in config.json"),
        ({"use_routing_bias": None, "scoring_func": None}, "needs use_routing_bias, scoring_func in config.json"),
        ({"rotary_dim": None, "partial_rotary_factor": 0.5}, "reads rotary_dim=None .*it would have to be 8"),
        ({"rotary_dim": 4, "partial_rotary_factor": 0.5}, "reads rotary_dim=4 .*it would have to be 8"),
    ):
        with pytest.raises(ConfigError, match=f"{tmp_path}.*{words}"):
            check_served_model(configured(tmp_path, gpu, **{**keys, **change}))
    whole = {key: value for key, value in keys.items() if key != "rotary_dim"}
    check_served_model(configured(tmp_path, gpu, **whole))


def test_keys_of_deepseek_v2_that_transformers_leaves_out_are_asked_for(tmp_path: Path) -> None:
    keys = {**shrunk(MODELS["deepseek-v2-lite"], 4), "architectures": ["DeepseekV2ForCausalLM"]}
    check_served_model(configured(tmp_path, ON_A_GPU, **keys))
    with pytest.raises(ConfigError, match="DeepseekV2ForCausalLM needs scoring_func, moe_layer_freq in config.json"):
        check_served_model(configured(tmp_path, ON_A_GPU, **{**keys, "scoring_func": None, "moe_layer_freq": None}))


@pytest.mark.parametrize(
    ("model", "name"), [("deepseek-v3.2", "DeepseekV32ForCausalLM"), ("glm-5", "GlmMoeDsaForCausalLM")]
)
def test_keys_of_sparse_attention_that_transformers_leaves_out_are_asked_for(
    model: str, name: str, tmp_path: Path
) -> None:
    keys = {**shrunk(MODELS[model], 4), "architectures": [name]}
    check_served_model(configured(tmp_path, ON_A_GPU, **keys))
    with pytest.raises(ConfigError, match=f"{name} needs topk_method, moe_layer_freq in config.json"):
        check_served_model(configured(tmp_path, ON_A_GPU, **{**keys, "topk_method": None, "moe_layer_freq": None}))


def test_attention_sinks_are_refused_on_a_cpu(tmp_path: Path) -> None:
    keys = shrunk(MODELS["gpt-oss-20b"], 4)
    with pytest.raises(ConfigError, match=r"torch_native\) has no attention sinks, which this gpt_oss model has"):
        check_served_model(configured(tmp_path, "rollout.engine.device=cpu", **keys))
    check_served_model(configured(tmp_path, "rollout.engine.device=cuda", **keys))
    check_served_model(configured(tmp_path, "rollout.engine.backend=transformers", **keys))


@pytest.mark.parametrize("override", ["weight_sync.verify=true", "weight_sync.delta=true"])
def test_what_compares_the_tensors_of_mamba_is_refused(override: str, tmp_path: Path) -> None:
    keys = shrunk(MODELS["granite-4.0-h-micro"], 4) | {"architectures": ["GraniteMoeHybridForCausalLM"]}
    with pytest.raises(ConfigError, match=rf"{override} compares an engine's tensors .* -exp\(A_log\)"):
        check_served_model(configured(tmp_path, ON_A_GPU, override, **keys))


def test_what_a_part_of_mamba_cannot_be_is_refused(tmp_path: Path) -> None:
    keys = shrunk(MODELS["nemotron-h-8b"], 4) | {"architectures": ["NemotronHForCausalLM"]}
    sharded = (ON_A_GPU, "weight_sync.method=sharded", "learner.world_size=2")
    check_served_model(configured(tmp_path, *sharded, "learner.pipeline_model_parallel_size=2", **keys))
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2: SGLang keeps"):
        check_served_model(configured(tmp_path, *sharded, "learner.tensor_model_parallel_size=2", **keys))
    check_served_model(configured(tmp_path, ON_A_GPU, "rollout.engine.quantization=fp8", **keys))
    with pytest.raises(ConfigError, match="quantization=fp8: Mamba-2's projections in this nemotron_h model"):
        published = MODELS["nemotron-h-8b"] | {"architectures": ["NemotronHForCausalLM"]}
        check_served_model(configured(tmp_path, ON_A_GPU, "rollout.engine.quantization=fp8", **published))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mamba_n_groups": None}, "reads mamba_n_groups=8 of config.json, and it has to be 4: set it"),
        ({"conv_kernel": 3}, "reads mamba_d_conv=4 of config.json, and it has to be 3: set it"),
        ({"layers_block_type": KINDS}, "knows layers_block_type of config.json by the words mamba, attention, mlp and"),
    ],
)
def test_keys_that_sglang_reads_for_nemotron_h_are_asked_for(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    keys = shrunk(MODELS["nemotron-h-8b"], 4) | {"architectures": ["NemotronHForCausalLM"]}
    check_served_model(configured(tmp_path, ON_A_GPU, **keys))
    with pytest.raises(ConfigError, match=words):
        check_served_model(configured(tmp_path, ON_A_GPU, **keys | change))


@pytest.mark.parametrize("model", ["gpt-oss-20b", "granite-4.0-h-tiny"])
@pytest.mark.parametrize("override", ["weight_sync.verify=true", "weight_sync.round_to=int8"])
def test_what_does_not_know_stacked_experts_is_refused(override: str, model: str, tmp_path: Path) -> None:
    keys = shrunk(MODELS[model], 4)
    with pytest.raises(ConfigError, match=f"{override} does not know experts that lie in one tensor"):
        check_served_model(configured(tmp_path, "rollout.engine.device=cuda", override, **keys))


@pytest.mark.parametrize(
    "keys",
    [
        of_class("Qwen3NextForCausalLM") | EXPERTS | LINEAR,
        shrunk(MODELS["granite-4.0-h-tiny"], 4) | {"architectures": ["GraniteMoeHybridForCausalLM"]},
        shrunk(MODELS["nemotron-3-nano-30b-a3b"], 4) | {"architectures": ["NemotronHForCausalLM"]},
    ],
    ids=["gated delta nets", "Mamba-2", "Mamba-2 in half layers"],
)
def test_states_in_place_of_attention_run_everywhere(keys: dict[str, Any], tmp_path: Path) -> None:
    for override in ("rollout.engine.device=cpu", ON_A_GPU, "rollout.engine.backend=transformers"):
        check_served_model(configured(tmp_path, override, **keys))


def test_keys_that_sglang_reads_for_gated_delta_nets_are_asked_for(tmp_path: Path) -> None:
    """As transformers 5 saves a config.json, the interval is lost, and rope_theta elsewhere."""
    keys = of_class("Qwen3NextForCausalLM") | EXPERTS | LINEAR
    types = ["linear_attention", "full_attention"]
    check_served_model(configured(tmp_path, ON_A_GPU, **keys | {"layer_types": types, "full_attention_interval": 2}))
    for interval in (None, 4):
        with pytest.raises(ConfigError, match=rf"full_attention_interval={interval} of config.json, and not by layer"):
            check_served_model(
                configured(tmp_path, ON_A_GPU, **keys | {"layer_types": types, "full_attention_interval": interval})
            )
    with pytest.raises(ConfigError, match="class for qwen3_next reads rope_theta and rope_scaling"):
        check_served_model(configured(tmp_path, ON_A_GPU, **keys, rope_parameters={"rope_theta": 1e7}))


def test_groups_of_gpus_have_to_fit_the_model(tmp_path: Path) -> None:
    size = "rollout.engine.tensor_parallel_size=8"
    experts, attention = "rollout.engine.expert_parallel_size=", "rollout.engine.attention_data_parallel_size="
    moe, dense = of_class("Qwen3MoeForCausalLM") | EXPERTS, of_class("LlamaForCausalLM")
    check_served_model(configured(tmp_path, size, f"{experts}4", f"{attention}8", **moe))
    check_served_model(configured(tmp_path, size, f"{experts}1", **dense))
    for keys, override, words in (
        (moe, f"{experts}8", "must divide the model's 4 experts"),
        (moe, "rollout.engine.device=cuda", "null, which is tensor_parallel_size=8 on GPUs, must divide the model's 4"),
        (dense, f"{experts}2", "is a dense model"),
        (dense, f"{attention}2", "LlamaForCausalLM does not give requests to groups"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_served_model(configured(tmp_path, size, override, **keys))


@pytest.mark.parametrize("name", ["verify", "delta"])
def test_checksums_of_experts_that_gpus_have_to_themselves_are_refused(tmp_path: Path, name: str) -> None:
    moe = of_class("MixtralForCausalLM") | EXPERTS
    gpus = ("rollout.engine.device=cuda", "rollout.engine.tensor_parallel_size=2", f"weight_sync.{name}=true")
    with pytest.raises(ConfigError, match=rf"expert_parallel_size=null, .* weight_sync\.{name}=true"):
        check_served_model(configured(tmp_path, *gpus, **moe))
    check_served_model(configured(tmp_path, *gpus, "rollout.engine.expert_parallel_size=1", **moe))


def test_models_that_are_not_there_are_left_to_those_who_fetch_them() -> None:
    check_served_model(load_config(None, ["model.path=Qwen/Qwen3-30B-A3B"]))
    check_served_model(load_config(None, []))


def test_the_tables_are_those_of_the_installed_sglang() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    models = Path(found.submodule_search_locations[0]) / "srt" / "models"

    declared = {name: place for f in built_in_families().values() for name, place in f.engine_classes.items()}

    def source_of(name: str) -> str:
        if name in declared:
            return (models / f"{declared[name].partition(':')[0].rpartition('.')[2]}.py").read_text()
        sources = (file.read_text() for file in models.glob("*.py"))
        return next(text for text in sources if re.search(rf"\nclass {name}\(", text))

    def knows_windows(name: str) -> bool:
        # Ministral3's attention keeps the number, and passes it to nothing.
        kept = r"self\.sliding_window|\"sliding_window\""
        source = re.sub(kept, "", source_of(name)) if name == "Ministral3ForCausalLM" else source_of(name)
        return re.search(r"sliding_window(?!_size=None)", source) is not None

    own_head = set()
    classes = WHOLE_PAST.union(*(family.engine_classes for family in built_in_families().values()))
    for name in WHOLE_PAST:
        assert not knows_windows(name), f"{name} knows windows by now"
    for name in classes:
        source = source_of(name)
        parent = re.search(rf"\nclass {name}\((\w+)\)", source)
        inherits = parent is not None and parent[1] in classes
        if not inherits and "tie_word_embeddings" not in source:
            own_head.add(name)
        attention = source_of(parent[1]) if inherits and parent else source
        # DeepSeek's attention, which others take, has the size of its group.
        in_groups = re.search("attn_tp_size|DeepseekV2AttentionMLA", attention) is not None
        assert in_groups is (name in ATTENTION_GROUPS), name
    assert own_head == OWN_OUTPUT_LAYER
    for family in built_in_families().values():
        for name in family.engine_classes.keys() - WHOLE_PAST:
            reads_windows = "window" in inspect.getsource(sys.modules[family.read.__module__])
            assert knows_windows(name) or not reads_windows, f"{name} sees the whole past"


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
