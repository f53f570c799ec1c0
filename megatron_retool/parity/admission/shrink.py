"""A few thousand parameters in place of billions: config.json with small sizes and the same kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LIMIT = 0.5
"""Of a clamped SwiGLU: some of a tiny model's activations reach it."""
VOCAB_SIZE = 101
"""No multiple of anything: the learner has to pad it."""
HIDDEN, FFN, EXPERT_FFN, SHARED_FFN = 32, 48, 24, 40
HEADS, EXPERTS, CHOSEN, WINDOW, POSITIONS = 4, 4, 2, 16, 128
INDEX_HEADS = 16
"""A key's score is exactly 0 where all of its indexer's heads say nothing: with few heads many are equal, and rounding
decides between them."""
LONGROPE_POSITIONS = POSITIONS // 2
"""From which longrope stretches."""
_FACTORS = ("short_factor", "long_factor")

_SIZES: dict[str, int] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "moe_intermediate_size": EXPERT_FFN,
    "shared_expert_intermediate_size": SHARED_FFN,
    "shared_intermediate_size": SHARED_FFN,
    "moe_shared_expert_intermediate_size": SHARED_FFN,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_latent_size": 20,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": 2 * HEADS,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "mamba_n_heads": 2 * HEADS,
    "mamba_d_head": HIDDEN // HEADS,
    "mamba_d_state": 12,
    "mamba_num_heads": 2 * HEADS,
    "mamba_head_dim": HIDDEN // HEADS,
    "n_groups": HEADS,
    "ssm_state_size": 12,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": 12,
    "index_topk": WINDOW,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": POSITIONS,
}
"""Sizes that every model of a family may have; a key that config.json lacks, or where it has 0, stays as it is."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrunk(hf_config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """``hf_config`` with small sizes and ``layers`` layers, of every kind that it has, in float32.

    Grouped queries stay grouped, a head size of its own stays one, a window stays a window. What is no size is kept.
    """
    small = {**hf_config, **{key: size for key, size in _SIZES.items() if hf_config.get(key)}}
    heads = hf_config.get("num_attention_heads")
    groups = hf_config.get("num_key_value_heads")
    if heads and groups:
        small["num_key_value_heads"] = HEADS if groups == heads else min(groups, HEADS // 2)
    if hf_config.get("head_dim") is not None and heads:
        usual = hf_config["head_dim"] * heads == hf_config.get("hidden_size")
        small["head_dim"] = HIDDEN // HEADS if usual else 2 * HIDDEN // HEADS
        if hf_config.get("rotary_dim"):
            small["rotary_dim"] = small["head_dim"] * hf_config["rotary_dim"] // hf_config["head_dim"]
    if hf_config.get("num_experts_per_tok") is not None:
        small["num_experts_per_tok"] = min(hf_config["num_experts_per_tok"], CHOSEN)
    if (hf_config.get("n_group") or 1) > 1:  # a choice of groups that the choice of experts alone does not decide
        small |= {"n_group": 2, "topk_group": CHOSEN // 2, "n_routed_experts": 2 * EXPERTS}
    if small.get("n_groups"):  # SGLang's name of it
        small["mamba_n_groups"] = small["n_groups"]
    if hf_config.get("sliding_window") is not None:
        small["sliding_window"] = WINDOW
    if hf_config.get("swiglu_limit") is not None:
        small["swiglu_limit"] = LIMIT
    for key in ("rope_parameters", "rope_scaling"):
        small |= {key: _small_rope(hf_config[key])} if isinstance(hf_config.get(key), Mapping) else {}
        if isinstance(small.get(key), Mapping) and small[key].get("llama_4_scaling_beta"):  # engines read this one
            small["original_max_position_embeddings"] = POSITIONS // 4
    small |= _small_longrope(hf_config, small)
    small |= _layers(hf_config, layers)
    for key in ("dtype", "torch_dtype"):
        small.pop(key, None)
    # A padding token's embedding would get no gradient, and the others lie outside the small vocabulary.
    return {**small, **dict.fromkeys(_TOKENS), "dtype": "float32", "initializer_range": 0.1}


def _layers(hf_config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The keys that count or name layers."""
    before = int(hf_config.get("num_hidden_layers") or layers)
    small: dict[str, Any] = {"num_hidden_layers": layers}
    for key in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "indexer_types"):
        kinds = hf_config.get(key)
        if isinstance(kinds, Sequence) and not isinstance(kinds, str) and kinds:
            small[key] = _every_kind(kinds, layers)
    if hf_config.get("hybrid_override_pattern"):
        small["hybrid_override_pattern"] = "".join(_every_kind(hf_config["hybrid_override_pattern"], layers))
    if isinstance(hf_config.get("sliding_window_pattern"), int):  # EXAONE's "LLLG" is a pattern of any number of layers
        small["sliding_window_pattern"] = min(hf_config["sliding_window_pattern"], layers // 2)
    full = hf_config.get("max_window_layers")
    if full is not None:
        small["max_window_layers"] = layers if full >= before else math.ceil(layers * full / before)
    if hf_config.get("mlp_only_layers"):
        small["mlp_only_layers"] = [1]
    if (hf_config.get("decoder_sparse_step") or 1) > 1:
        small["decoder_sparse_step"] = 2
    if hf_config.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    return small


def _every_kind(types: Sequence[Any], layers: int) -> list[Any]:
    """The first of ``types``, as many as leave room for one of each kind that they lack."""
    first = [types[number % len(types)] for number in range(layers)]
    for kept in range(layers, 0, -1):
        missing = [kind for kind in dict.fromkeys(types) if kind not in first[:kept]]
        if kept + len(missing) <= layers:
            return [*first[:kept], *missing]
    return first


def _small_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Of positions that a tiny model reads: stretched from a quarter of them."""
    small = {k: _small_rope(v) if isinstance(v, Mapping) else v for k, v in parameters.items()}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = POSITIONS // 4
    return small


def _small_longrope(hf_config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Longrope's keys: factors for as many pairs as a tiny head has, and no text beyond the original positions, which
    transformers would compute by other factors."""
    key, result = "original_max_position_embeddings", dict[str, Any]()
    for name in ("rope_parameters", "rope_scaling"):
        rope = small.get(name)
        if not isinstance(rope, Mapping) or "short_factor" not in rope:
            continue
        share = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor")) or 1.0
        pairs = int(small.get("head_dim", HIDDEN // HEADS) * share) // 2
        factors = {k: [v[n * len(v) // pairs] for n in range(pairs)] for k, v in rope.items() if k in _FACTORS}
        original = hf_config.get(key, hf_config[name].get(key, 0))
        stretched = original < (hf_config.get("max_position_embeddings") or 0)
        result |= {name: {**rope, **factors}, key: LONGROPE_POSITIONS if stretched else POSITIONS}
    return result
