"""What SGLang serves otherwise than config.json says, without a word. Checked against SGLang 0.5.23.

A run on such a model would look healthy and learn from another policy's samples, so it is refused before it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.hf_config import UnsupportedArchitecture
from megatron_retool.config import Config, ConfigError

OWN_OUTPUT_LAYER = frozenset({"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"})
"""Classes that build an lm_head whatever ``tie_word_embeddings`` says; of a tied model nothing ever fills it."""

WHOLE_PAST = frozenset(
    {
        "LlamaForCausalLM",
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

ATTENTION_GROUPS = frozenset({"Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})
"""Classes whose attention has the size of its group (attention data parallelism), and not of the whole engine."""

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
        hf_config = json.loads(file.read_text(encoding="utf-8"))
        served = hf_config.get("architectures") or []
    except (ValueError, AttributeError, RecursionError):
        return
    _check_output_layer(config.model.path, served, hf_config)
    _check_attention_groups(config, served)
    try:
        architecture = Architecture.from_hf_config(hf_config, config.model.families)
    except UnsupportedArchitecture:
        return
    if architecture.sliding_window is not None:
        _check_window(config, served, architecture.sliding_window)
    _check_expert_groups(config, architecture)


def _check_attention_groups(config: Config, served: Sequence[str]) -> None:
    groups = config.rollout.engine.attention_data_parallel_size
    if groups > 1 and served and not ATTENTION_GROUPS.intersection(served):
        raise ConfigError(
            f"rollout.engine.attention_data_parallel_size={groups}: SGLang's class {served[0]} does not give requests "
            f"to groups of GPUs; {' and '.join(sorted(ATTENTION_GROUPS))} do: set it to 1"
        )


def _check_expert_groups(config: Config, architecture: Architecture) -> None:
    groups = config.rollout.engine.expert_parallel_size or 1
    if groups == 1:
        return
    said = f"rollout.engine.expert_parallel_size={groups}"
    if not architecture.is_moe:
        raise ConfigError(
            f"{said} needs a mixture of experts, and {config.model.path} is a dense model: set it to null"
        )
    if (architecture.num_experts or 0) % groups:
        raise ConfigError(f"{said} must divide the model's {architecture.num_experts} experts")


def _check_output_layer(path: str, served: Sequence[str], hf_config: Mapping[str, Any]) -> None:
    # Absent means false in every one of these classes' transformers configurations.
    owners = [name for name in served if name in OWN_OUTPUT_LAYER]
    if owners and hf_config.get("tie_word_embeddings"):
        raise ConfigError(
            f"model.path={path}: config.json has tie_word_embeddings=true, but SGLang's {owners[0]} has an lm_head of "
            "its own, which nothing would fill: all that it samples would be noise. Save the model with an output "
            f"layer of its own, and name that in model.path: {UNTIE.format(path=path)}"
        )


def _check_window(config: Config, served: Sequence[str], window: int) -> None:
    whole = [name for name in served if name in WHOLE_PAST]
    longest = config.data.max_prompt_length + config.data.max_response_length
    if config.rollout.engine.context_length is not None:
        longest = min(longest, config.rollout.engine.context_length)
    if whole and window < longest:
        raise ConfigError(
            f"model.path={config.model.path}: its attention has a window (sliding_window={window}), but that of "
            f"SGLang's {whole[0]} sees the whole past: engine and learner would part where a text grows longer. Keep "
            f"data.max_prompt_length + data.max_response_length, {longest} now, within the window; or set "
            "sliding_window to null in config.json, and both see the whole past"
        )
