"""What SGLang serves otherwise than config.json says, without a word. Checked against SGLang 0.5.23.

A run on such a model would look healthy and learn from another policy's samples, so it is refused before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import is_quantized
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.weight_map import WeightMap
from megatron_retool.config import (
    Config,
    ConfigError,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from sglang_rollout.engine.launch_command import resolve_device
from untrusted import load_json

OWN_OUTPUT_LAYER = frozenset(
    {
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GptOssForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)
"""Classes that build an lm_head whatever ``tie_word_embeddings`` says; of a tied model nothing ever fills it."""

WHOLE_PAST = frozenset(
    {
        "LlamaForCausalLM",
        "MiMoForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Classes whose attention sees the whole past whatever ``sliding_window`` says."""

ATTENTION_GROUPS = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "MiniMaxM2ForCausalLM",
        "NemotronHForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)
"""Classes whose attention has the size of its group (attention data parallelism), and not of the whole engine."""

EXPERTS_EVERYWHERE = frozenset({"Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"})
"""Classes whose every layer has experts whatever ``mlp_only_layers`` and ``decoder_sparse_step`` say."""

ASKED_FOR: Mapping[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": ("scoring_func", "moe_layer_freq", "n_group", "topk_group"),
    "DeepseekV32ForCausalLM": ("scoring_func", "topk_method", "moe_layer_freq"),
    "GlmMoeDsaForCausalLM": ("scoring_func", "topk_method", "moe_layer_freq"),
    "MiniMaxM2ForCausalLM": ("use_qk_norm", "use_routing_bias", "scoring_func"),
}
"""Keys of config.json without which a class leaves out a part that transformers computes, or does not start."""

GPU_ALONE = frozenset({"MiniMaxM2ForCausalLM"})
"""Classes with a kernel that no CPU runs."""

_NEMOTRON_H = {"mamba_n_groups": 8, "mamba_d_conv": 4}
"""What its class takes where config.json has other names of the two."""

_ORIGINAL = "original_max_position_embeddings"

UNTIE = (
    "python -c \"import torch; from transformers import AutoModelForCausalLM, AutoTokenizer; a, b = '{path}', "
    "'{path}-untied'; m = AutoModelForCausalLM.from_pretrained(a, dtype='auto'); "
    "m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight.detach().clone()); "
    'm.config.tie_word_embeddings = False; m.save_pretrained(b); AutoTokenizer.from_pretrained(a).save_pretrained(b)"'
)
"""Saves a copy of a tied model whose output layer is a tensor of its own."""


def check_served_model(config: Config) -> None:
    """Refuse a model whose log-probs in SGLang are not those of the weights.

    A model that is not there yet, or that no family covers (an evaluation may serve it), is left to those who load it.

    Raises:
        ConfigError: naming model.path, the key of config.json or of rollout.engine, and the cure.
    """
    file = Path(config.model.path) / "config.json"
    if config.rollout.engine.backend != "sglang" or not config.model.path or not file.is_file():
        return
    try:
        hf_config = load_json(file.read_bytes(), finite=False)
    except (OSError, ValueError):
        return
    if not isinstance(hf_config, dict):
        return
    named = hf_config.get("architectures")
    served = named or []
    if not isinstance(served, list) or not all(isinstance(name, str) for name in served):
        raise ConfigError(
            f"model.path={config.model.path}: config.json's architectures={named!r:.80} is no list of class names, "
            'such as ["Qwen3ForCausalLM"]: correct it'
        )
    if reason := unfilled_output_layer(hf_config, served):
        raise ConfigError(
            f"model.path={config.model.path}: {reason}. Save the model with an output layer of its own, and name that "
            f"in model.path: {UNTIE.format(path=config.model.path)}"
        )
    _check_attention_groups(config.rollout, served)
    if reason := misread_positions(hf_config):
        raise ConfigError(f"model.path={config.model.path}: {reason}")
    try:
        architecture = Architecture.from_hf_config(hf_config, config.model.families)
    except UnsupportedArchitecture:
        return
    if hf_config["model_type"] != architecture.family:
        raise ConfigError(
            f"model.path={config.model.path}: SGLang and transformers read model_type={hf_config['model_type']} by "
            f"code from the hub, which is not run here: set it to {architecture.family}, the same model, as "
            "conversion/hf_to_mcore.py does in what it writes"
        )
    if architecture.sliding_window is not None:
        _check_window(config.data, config.rollout, config.model, served, architecture.sliding_window)
    check_longest_text(config.data, config.rollout, config.model, architecture)
    _check_longrope(config.model.path, served, architecture)
    on_cpu = resolve_device(config.rollout.engine.device) == "cpu"
    _check_expert_groups(config.rollout, config.weight_sync, config.model, architecture, on_cpu)
    if on_cpu and (reason := unserved_on_cpu(architecture, served)):
        raise ConfigError(
            f"model.path={config.model.path}: {reason}: sample on a GPU, or set rollout.engine.backend=transformers"
        )
    _check_stacked_experts(config.weight_sync, config.rollout, architecture)
    if architecture.mamba is not None:
        _check_mamba(config.weight_sync, config.rollout, config.learner, architecture)
    if reason := unserved(architecture, served):
        raise ConfigError(f"model.path={config.model.path}: {reason}: set rollout.engine.backend=transformers")


def check_longest_text(
    data: DataConfig, rollout: RolloutConfig, model: ModelConfig, architecture: Architecture
) -> None:
    """Refuse texts that are longer than ``Architecture.longest_text``, with any engine.

    SGLang takes longrope's long factors for all that it computes together, from the first token beyond
    ``original_max_position_embeddings`` on, and keeps the keys that were rotated by the short ones; so does
    transformers, sequence by sequence. No weights have such log-probs.

    Raises:
        ConfigError: naming the keys and both cures.
    """
    limit = architecture.longest_text
    longest = _longest_text(data, rollout)
    if limit is None or longest <= limit or architecture.rope_scaling is None:
        return
    factor = architecture.rope_scaling.attention_factor
    raise ConfigError(
        f"model.path={model.path}: its longrope positions have other factors in texts of more than "
        f"original_max_position_embeddings={limit} tokens, which engines change to in the middle of a text, and the "
        f"learner does not compute. Keep data.max_prompt_length + data.max_response_length, {longest} now, within it; "
        "or have every text use the long factors: in config.json set short_factor to long_factor, "
        "original_max_position_embeddings to max_position_embeddings, and attention_factor, short_mscale and "
        f"long_mscale of the positions to {factor!r}"
    )


def unserved(architecture: Architecture, served: Sequence[str]) -> str:
    """Why SGLang's class of a model does not compute it; empty: it does.

    Args:
        served: config.json's ``architectures``.
    """
    if reason := unfilled_output_layer(architecture.hf_config, served) or misread_positions(architecture.hf_config):
        return reason
    if "Ministral3ForCausalLM" in served and architecture.query_growth is not None:
        read, meant = architecture.hf_config.get(_ORIGINAL) or 16384, architecture.query_growth[1]
        if read != meant:
            return (
                f"SGLang's Ministral3ForCausalLM scales queries by {_ORIGINAL}={read} of config.json itself, and "
                f"transformers by that of rope_parameters, {meant}: they have to agree"
            )
    everywhere = [name for name in served if name in EXPERTS_EVERYWHERE]
    if everywhere and architecture.dense_layers:
        layers = ", ".join(str(layer) for layer in architecture.dense_layers[:5])
        return f"SGLang's {everywhere[0]} has experts in every layer, which nothing would fill in dense ones ({layers})"
    for name in served:
        if absent := [key for key in ASKED_FOR.get(name, ()) if not architecture.hf_config.get(key)]:
            return f"SGLang's {name} needs {', '.join(absent)} in config.json, as the published one has them"
    if "MiniMaxM2ForCausalLM" in served:
        read, rotated = architecture.hf_config.get("rotary_dim"), architecture.rotary_dim or architecture.head_dim
        if rotated != (architecture.head_dim if read is None else read):
            return (
                f"SGLang's MiniMaxM2ForCausalLM reads rotary_dim={read} of config.json, and no share in its place: it "
                f"would have to be {rotated}"
            )
    if "NemotronHForCausalLM" in served and (reason := _misread_by_nemotron_h(architecture)):
        return reason
    every = architecture.hf_config.get("full_attention_interval") or 0
    linear = tuple(number for number in range(architecture.num_layers) if every and (number + 1) % every)
    if architecture.delta_net is not None and architecture.linear_layers != linear:
        return (
            f"SGLang knows the layers with attention by full_attention_interval={every or None} of config.json, and "
            "not by layer_types, and the two differ"
        )
    return ""


def _misread_by_nemotron_h(architecture: Architecture) -> str:
    hf_config, sizes = architecture.hf_config, architecture.mamba
    kinds = hf_config.get("layers_block_type")
    if kinds is not None and not {"mamba", "attention", "mlp", "moe"}.issuperset(kinds):
        return (
            "SGLang's NemotronHForCausalLM knows layers_block_type of config.json by the words mamba, attention, mlp "
            "and moe only: write it so, or put hybrid_override_pattern in its place"
        )
    for name, value in (("mamba_n_groups", sizes and sizes.groups), ("mamba_d_conv", sizes and sizes.kernel)):
        read = hf_config.get(name) or _NEMOTRON_H[name]
        if value not in (None, read):
            return f"SGLang's NemotronHForCausalLM reads {name}={read} of config.json, and it has to be {value}: set it"
    return ""


def unserved_on_cpu(architecture: Architecture, served: Sequence[str]) -> str:
    """Why SGLang computes a model only on GPUs, or rightly only there; empty: on a CPU too.

    Args:
        served: config.json's ``architectures``.
    """
    if architecture.latent is not None:
        return f"SGLang computes other log-probs on a CPU for multi-head latent attention ({architecture.family})"
    if GPU_ALONE.intersection(served):
        return f"SGLang's {served[0]} normalises queries and keys with a kernel that needs a GPU"
    if architecture.attention_sinks:
        return (
            "SGLang's attention on a CPU (torch_native) has no attention sinks, which this "
            f"{architecture.family} model has"
        )
    return ""


def _check_stacked_experts(weight_sync: WeightSyncConfig, rollout: RolloutConfig, architecture: Architecture) -> None:
    if not any(mapping.is_stacked for mapping in WeightMap(replace(architecture, num_layers=1))):
        return
    for key, wanted, cure in (
        ("weight_sync.verify", weight_sync.verify, "false"),
        ("weight_sync.round_to", weight_sync.round_to, "null"),
        ("rollout.engine.quantization", rollout.engine.quantization, "null"),
    ):
        if wanted:
            raise ConfigError(
                f"{key}={str(wanted).lower()} does not know experts that lie in one tensor, as those of "
                f"{architecture.family} do: set it to {cure}"
            )


def _check_mamba(
    weight_sync: WeightSyncConfig, rollout: RolloutConfig, learner: LearnerConfig, architecture: Architecture
) -> None:
    ranks = learner.tensor_model_parallel_size
    if weight_sync.method == "sharded" and ranks > 1:
        raise ConfigError(
            f"weight_sync.method=sharded with learner.tensor_model_parallel_size={ranks}: SGLang keeps -exp(A_log) in "
            "the place of Mamba-2's A_log, which it cannot make of a rank's part: set weight_sync.method=distributed"
        )
    if rollout.engine.quantization == "fp8" and any(
        is_quantized(each) for each in WeightMap(architecture) if each.mcore_name.endswith(".in_proj.weight")
    ):
        raise ConfigError(
            f"rollout.engine.quantization=fp8: Mamba-2's projections in this {architecture.family} model would be "
            "quantised, and no test here has run that: set it to null"
        )
    for key, wanted in (("verify", weight_sync.verify), ("delta", weight_sync.delta)):
        if wanted:
            raise ConfigError(
                f"weight_sync.{key}=true compares an engine's tensors with those that were sent, and SGLang keeps "
                "-exp(A_log) in the place of Mamba-2's A_log: set it to false"
            )


def misread_positions(hf_config: Mapping[str, Any]) -> str:
    """Which keys of positions SGLang does not read as transformers does, and the cure; empty: none."""
    new = hf_config.get("rope_parameters")
    kind = hf_config.get("model_type")
    if kind in ("olmo3", "qwen3_next") and (new or not hf_config.get("rope_theta")):
        return (
            f"SGLang's class for {kind} reads rope_theta and rope_scaling of config.json, and not rope_parameters, as "
            "which transformers 5 writes them: write the two as the published config.json has them"
        )
    parameters = (new if isinstance(new, Mapping) and new else hf_config.get("rope_scaling")) or {}
    if not isinstance(parameters, Mapping) or "yarn" not in (parameters.get("rope_type"), parameters.get("type")):
        return ""
    given, factor = parameters.get("attention_factor"), parameters.get("factor")
    numbers = all(isinstance(each, int | float) for each in (given, factor))
    if numbers and given and factor and not math.isclose(given, 0.1 * math.log(max(factor, 1.0)) + 1.0, rel_tol=1e-6):
        return (
            f"SGLang does not read attention_factor={given} of yarn's positions, and takes what follows from "
            f"factor={factor}: remove it from config.json, and both take that"
        )
    return ""


def _check_longrope(path: str, served: Sequence[str], architecture: Architecture) -> None:
    scaling, hf_config = architecture.rope_scaling, architecture.hf_config
    if scaling is None or scaling.kind != "longrope":
        return
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    original = scaling.original_max_position_embeddings
    stretch = architecture.max_position_embeddings / original
    taken = parameters.get("short_mscale") or math.sqrt(1 + math.log(max(stretch, 1)) / math.log(original))
    if not math.isclose(taken, scaling.attention_factor, rel_tol=1e-6):
        raise ConfigError(
            f"model.path={path}: SGLang multiplies rotated queries and keys by {taken!r}, from short_mscale or "
            "max_position_embeddings of config.json, and transformers and the learner by "
            f"{scaling.attention_factor!r}, from attention_factor or factor: set short_mscale and long_mscale of the "
            "positions to the latter"
        )
    share = hf_config.get("partial_rotary_factor") or 1.0
    rotated = architecture.rotary_dim or architecture.head_dim
    if "Phi3ForCausalLM" in served and int(share * architecture.head_dim) != rotated:
        raise ConfigError(
            f"model.path={path}: SGLang's Phi3ForCausalLM reads partial_rotary_factor={share} of config.json, and not "
            f"the one of rope_parameters, by which positions rotate {rotated} features of a head: set it there too"
        )


def _check_attention_groups(rollout: RolloutConfig, served: Sequence[str]) -> None:
    groups = rollout.engine.attention_data_parallel_size
    if groups > 1 and served and not ATTENTION_GROUPS.intersection(served):
        raise ConfigError(
            f"rollout.engine.attention_data_parallel_size={groups}: SGLang's class {served[0]} does not give requests "
            f"to groups of GPUs; {', '.join(sorted(ATTENTION_GROUPS))} do: set it to 1"
        )


def _check_expert_groups(
    rollout: RolloutConfig, sync: WeightSyncConfig, model: ModelConfig, architecture: Architecture, on_cpu: bool
) -> None:
    groups = rollout.engine.expert_parallel_size
    said = f"rollout.engine.expert_parallel_size={groups}"
    if groups is None:
        groups = rollout.engine.tensor_parallel_size if architecture.is_moe and not on_cpu else 1
        said = f"rollout.engine.expert_parallel_size=null, which is tensor_parallel_size={groups} on GPUs,"
    if groups == 1:
        return
    if not architecture.is_moe:
        raise ConfigError(f"{said} needs a mixture of experts, and {model.path} is a dense model: set it to null")
    if (architecture.num_experts or 0) % groups:
        raise ConfigError(f"{said} must divide the model's {architecture.num_experts} experts: set it to one that does")
    for name in ("verify", "delta"):
        if getattr(sync, name):
            raise ConfigError(
                f"{said} does not go with weight_sync.{name}=true: checksums of experts that GPUs have to themselves "
                f"are not known. Set it to 1, or weight_sync.{name} to false"
            )


def unfilled_output_layer(hf_config: Mapping[str, Any], served: Sequence[str]) -> str:
    """Why a tied model would sample noise; empty: it would not."""
    # Absent means false in every one of these classes' transformers configurations.
    owners = [name for name in served if name in OWN_OUTPUT_LAYER]
    if not owners or not hf_config.get("tie_word_embeddings"):
        return ""
    return (
        f"config.json has tie_word_embeddings=true, but SGLang's {owners[0]} has an lm_head of its own, which nothing "
        "would fill: all that it samples would be noise"
    )


def _check_window(
    data: DataConfig, rollout: RolloutConfig, model: ModelConfig, served: Sequence[str], window: int
) -> None:
    whole = [name for name in served if name in WHOLE_PAST]
    longest = _longest_text(data, rollout)
    if whole and window < longest:
        raise ConfigError(
            f"model.path={model.path}: its attention has a window (sliding_window={window}), but that of "
            f"SGLang's {whole[0]} sees the whole past: engine and learner would part where a text grows longer. Keep "
            f"data.max_prompt_length + data.max_response_length, {longest} now, within the window; or set "
            "sliding_window to null in config.json, and both see the whole past"
        )


def _longest_text(data: DataConfig, rollout: RolloutConfig) -> int:
    """Tokens of a prompt and its response."""
    longest = data.max_prompt_length + data.max_response_length
    return min(longest, rollout.engine.context_length or longest)
