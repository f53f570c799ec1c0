"""Which parts of a model the learner lacks: what to say of a family that is not declared."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from conversion.model import (
    attention_config,
    config_reader,
    expert_config,
    hf_config,
    position_config,
    recurrent_rules,
    rules,
    stacked_rules,
)
from conversion.model.config_reader import shown
from conversion.model.family import built_in_families
from conversion.model.stacked import tensor_of
from megatron_retool.parity.admission.modelling_code import ModellingCode, modelling_code
from megatron_retool.parity.admission.tiny_model import transformers_config

_READING = (attention_config, config_reader, expert_config, hf_config, position_config)
"""What families' readers are made of."""
_BY_KEY: tuple[tuple[str, str], ...] = (
    ("final_logit_softcapping", "soft-capped logits"),
    ("attn_logit_softcapping", "soft-capped attention scores"),
    ("logit_scale", "scaled logits"),
    ("query_pre_attn_scalar", "a softmax scale of its own"),
    ("alibi", "ALiBi positions"),
    ("parallel_residual", "attention and MLP side by side"),
    ("use_parallel_residual", "attention and MLP side by side"),
    ("vision_config", "a vision tower"),
    ("audio_config", "an audio tower"),
    ("encoder_layers", "an encoder"),
    ("is_encoder_decoder", "an encoder"),
    ("no_rope_layers", "layers without positions"),
    ("llama_4_scaling_beta", "queries scaled by their position"),
    ("attn_temperature_tuning", "queries scaled by their position"),
    ("attention_value_scale", "scaled values"),
    ("clip_qkv", "clipped queries, keys and values"),
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


_HARMLESS = frozenset(
    (
        "attention_dropout",
        "embedding_dropout",
        "resid_pdrop",
        "residual_dropout",
        "pad_token_id",
        "router_aux_loss_coef",
    )
    + ("output_router_logits", "tie_word_embeddings", "dtype", "chunk_size_feed_forward", "mrope_section")
    + ("mamba_chunk_size", "num_logits_to_keep")
)
"""Keys that modelling code reads and that no text's log-probs depend on: dropout and noise of training, the loss of
routers' balance, sections of positions, which are the same for a text, and how much is computed at once."""


def missing_parts(hf_config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The parts of a model that no family here has, each once.

    Some show in tensors, some in the values of known keys. Others show only in transformers' code of the model. It is
    compared with the code of the families here: keys that none of their readers knows, functions that none of them has.

    Args:
        hf_config: config.json.
        names: of the tensors of a checkpoint.
    """
    settings, code = _Settings(hf_config), modelling_code(str(hf_config.get("model_type")))
    missing = dict.fromkeys(part for key, part in _BY_KEY if settings.asks(key))
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
    if code is not None:
        named = {key for key, _ in _BY_KEY}
        for key, value in unread_settings(hf_config).items():
            if key not in named:
                missing[f"{key}={shown(value)}, which no family here reads"] = None
        missing |= dict.fromkeys(_parts_of_positions(code))
    # Code differs wherever anything does, so it says something new where nothing else has been found.
    return list(missing) or ([] if code is None else _strange_functions(code))


def unread_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json, with their values, that ask for something, that transformers' code of the model reads,
    and that no family here does."""
    settings, code = _Settings(hf_config), modelling_code(str(hf_config.get("model_type")))
    unread = set[str]() if code is None else code.keys - _keys_of_readers() - _HARMLESS
    return {key: settings.value(key) for key in sorted(unread) if not key.startswith("_") and settings.asks(key)}


@functools.cache
def _keys_of_readers() -> frozenset[str]:
    """The texts in the readers' sources, keys among them, except those that readers only refuse."""
    texts, refused = set[str](), set[str]()
    readers = {family.read.__module__ for family in built_in_families().values()}
    for module in (*_READING, *(sys.modules[name] for name in sorted(readers))):
        tree = ast.parse(inspect.getsource(module))
        arguments = {
            argument
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "refuse"
            for argument in node.args
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                (refused if node in arguments else texts).add(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                texts.add(node.arg)
    return frozenset(texts)


class _Settings:
    """Values of config.json, and transformers' own for keys that it lacks."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self._given = hf_config
        self._whole: Any = None
        with contextlib.suppress(Exception):  # transformers has not this model type, or refuses a value of it
            self._whole = transformers_config(hf_config)

    def value(self, key: str) -> Any:
        """None where neither has the key."""
        rope = ("rope_parameters", "rope_scaling")
        inner = (*(self._given.get(key) for key in rope), getattr(self._whole, rope[0], None))
        for place in (self._given, *inner):
            if isinstance(place, Mapping) and key in place:
                return place[key]
        result = getattr(self._whole, key, None)
        return None if callable(result) else result

    def asks(self, key: str) -> bool:
        """Whether the key has a value that is not that of a part which is not there."""
        value = self.value(key)
        if isinstance(value, float):
            return value not in (0.0, 1.0)
        return bool(value) and value != "silu"


def _parts_of_positions(code: ModellingCode) -> list[str]:
    """What a model's functions do with positions and no function of a family here."""
    families, parts = _codes_of_families(), []
    if code.turns_pairs and not any(family.turns_pairs for family in families):
        parts.append("positions that rotate features side by side (interleaved rotary)")
    if code.turns_some_layers and not any(family.turns_some_layers for family in families):
        parts.append("layers without positions")
    return parts


def _strange_functions(code: ModellingCode) -> list[str]:
    """A part that names the functions of a model that no family here has."""
    known = {(_method(name), text) for family in _codes_of_families() for name, text in family.functions.items()}
    strange = sorted(name for name, text in code.functions.items() if (_method(name), text) not in known)
    return [f"transformers' {', '.join(strange)}, unlike those of every family here"] if strange else []


def _codes_of_families() -> list[ModellingCode]:
    return [result for name in built_in_families() if (result := modelling_code(name)) is not None]


def _method(name: str) -> str:
    return name.rpartition(".")[2]


def known_parts(names: Iterable[str]) -> list[str]:
    """The parts of families' tables that make up a checkpoint with tensors of these names."""
    present = {_numberless(name) for name in names}
    parts = {
        name: part
        for module in (rules, recurrent_rules, stacked_rules)
        for name, part in vars(module).items()
        if name.isupper() and isinstance(part, tuple)
    }
    tensors = {
        name: {_numberless(tensor_of(tensor)) for rule in part for tensor in rule.hf}
        for name, part in parts.items()
        if part and all(isinstance(rule, rules.Rule) for rule in part)
    }
    result = {name: own for name, own in tensors.items() if own <= present}
    return [name for name, own in result.items() if not any(own < other for other in result.values())]


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)(\d+|\{\w+\})(?=\.)", "N", name)


def _part(name: str) -> str:
    return next((part for pattern, part in _BY_NAME if re.search(pattern, name)), f"the tensor {name}")
