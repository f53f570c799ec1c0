"""Which parts of a model the learner has not: what to say of a family that nobody has declared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from conversion.model import rules
from conversion.model.family import built_in_families
from conversion.model.stacked import tensor_of

_BY_KEY: tuple[tuple[str, str], ...] = (
    ("final_logit_softcapping", "soft-capped logits"),
    ("attn_logit_softcapping", "soft-capped attention scores"),
    ("logit_scale", "scaled logits"),
    ("logits_scaling", "scaled logits"),
    ("residual_multiplier", "scaled residuals"),
    ("embedding_multiplier", "scaled embeddings"),
    ("attention_multiplier", "a softmax scale of its own"),
    ("query_pre_attn_scalar", "a softmax scale of its own"),
    ("alibi", "ALiBi positions"),
    ("parallel_residual", "attention and MLP side by side"),
    ("use_parallel_residual", "attention and MLP side by side"),
    ("vision_config", "a vision tower"),
    ("audio_config", "an audio tower"),
    ("encoder_layers", "an encoder"),
    ("is_encoder_decoder", "an encoder"),
    ("no_rope_layers", "layers without positions"),
    ("hidden_activation", "an activation other than silu"),
    ("activation_function", "an activation other than silu"),
)
"""Keys of config.json that, where set, change the computation."""

_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj", "multi-head latent attention"),
    (r"A_log|conv1d|dt_bias|\bssm|mixer\.|linear_attn", "linear attention of another kind, or a state space"),
    (r"e_score_correction_bias", "a router with a bias for the choice of experts"),
    (r"post_self_attn_layernorm|post_mlp_layernorm", "norms after attention and MLP under other names"),
    (r"dense\.bias", "a bias on the attention's output projection"),
    (r"(gate|up|down)_proj\.bias|fc[12]\.bias", "biases in the MLP"),
    (r"norm\.bias|layernorm\.bias|ln_\d?\w*\.bias", "LayerNorm with a bias"),
    (r"experts\..*(bias|_blocks|_scales)$", "biased or quantised experts"),
    (r"shared_expert", "shared experts"),
    (r"query_key_value|qkv_proj|Wqkv|c_attn", "fused q, k and v on disk"),
    (r"gate_up_proj", "fused gate and up on disk"),
    (r"c_fc|fc1|dense_h_to_4h", "an MLP without a gate"),
    (r"wpe|position_embed", "learned positions"),
    (r"lm_head\.bias|embed_out\.bias", "a bias on the output layer"),
    (r"router|gate\.", "a router of another kind"),
    (r"norm", "a norm in another place"),
)


def missing_parts(hf_config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The parts of a model that no family here has, each once.

    Args:
        hf_config: config.json.
        names: of the tensors of a checkpoint.
    """
    missing = dict.fromkeys(part for key, part in _BY_KEY if hf_config.get(key) not in (None, False, 1.0, "silu"))
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        missing[f"the activation {activation}"] = None
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    if kind not in (None, "default", "linear", "llama3", "yarn", "longrope", "su"):
        missing[f"{kind} positions"] = None
    known = {
        _numberless(tensor_of(name))
        for family in built_in_families().values()
        for rule in family.rules
        for name in rule.hf
    }
    for name in sorted({_numberless(name) for name in names} - known):
        missing[_part(name)] = None
    return list(missing)


def known_parts(names: Iterable[str]) -> list[str]:
    """The parts of ``conversion.model.rules`` that make up a checkpoint with tensors of these names."""
    present = {_numberless(name) for name in names}
    parts = {name: part for name, part in vars(rules).items() if name.isupper() and isinstance(part, tuple)}
    tensors = {
        name: {_numberless(tensor_of(tensor)) for rule in part for tensor in rule.hf}
        for name, part in parts.items()
        if part and all(isinstance(rule, rules.Rule) for rule in part)
    }
    found = {name: own for name, own in tensors.items() if own <= present}
    return [name for name, own in found.items() if not any(own < other for other in found.values())]


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)(\d+|\{\w+\})(?=\.)", "N", name)


def _part(name: str) -> str:
    return next((part for pattern, part in _BY_NAME if re.search(pattern, name)), f"the tensor {name}")
