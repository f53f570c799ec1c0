"""Reading a Hugging Face ``config.json``: typed look-ups, and the parts that decoders have in common.

A family's reader is made of these parts (see ``family.Family``). Each returns values for the fields of
``architecture.Architecture``. Nothing else parses ``config.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_retool.errors import InputError
from megatron_retool.untrusted import clipped

PREDICTORS = ("num_nextn_predict_layers", "num_mtp_modules")
"""Keys of config.json that count layers for multi-token prediction (DeepSeek's and MiniMax's). A count alone does not
say that their tensors are there."""


class UnsupportedArchitecture(InputError):
    """config.json is malformed, or describes a model that no family here covers. The message names the key."""


class MalformedConfig(UnsupportedArchitecture):
    """config.json is no JSON object, or a value has a type that no model has there: nothing can load it."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``), linear position interpolation (``linear``), YaRN, or
    LongRoPE."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    """Of yarn: rotations over the original positions from which a frequency stays as it is."""
    beta_slow: float = 1.0
    """Of yarn: rotations below which a frequency is divided by ``factor``."""
    truncate: bool = True
    """Of yarn: the dimensions between which it goes from one to the other are whole numbers."""
    attention_factor: float = 1.0
    """Of yarn and longrope: what rotated queries and keys are multiplied by."""
    short_factors: tuple[float, ...] = ()
    """Of longrope: what each frequency is divided by, in texts of up to ``original_max_position_embeddings`` tokens.
    Longer ones have others, which nothing here computes."""


@dataclass(frozen=True)
class LatentSizes:
    """Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A head's queries and keys have ``Architecture.head_dim`` features, of which positions rotate ``rotary_dim``: in a
    checkpoint the last ones. The rotated features of a key are the same for all heads.
    """

    query_rank: int | None
    """Size of the queries' latent; None: they have none."""
    key_value_rank: int
    """Size of the latent of keys and values."""
    value_dim: int
    """Features of a head's values."""
    interleaved: bool = True
    """Features that are rotated together lie side by side, not half a head apart."""
    norm_eps: float = 1e-6
    """Of the latents' RMSNorms: config.json's rms_norm_eps. ``normalise_latents`` says why."""


@dataclass(frozen=True)
class IndexerSizes:
    """Of the indexer that chooses the keys of each query (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    A key's score for a query is the sum over the indexer's heads of weight x relu(query . key). Positions rotate the
    first ``Architecture.rotary_dim`` features of each head.
    """

    heads: int
    head_dim: int
    """Features of a head's queries, and of the one key that all heads share."""
    index_topk: int
    """Keys that each query sees at most."""
    interleaved: bool = False
    """Features that are rotated together lie side by side, not half of the rotated ones apart."""

    @property
    def query_size(self) -> int:
        """Features of all heads' queries."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class DeltaNetSizes:
    """Of a gated delta net (Gated Delta Networks, arXiv:2412.06464, section 3.3).

    value_heads is a multiple of key_heads: so many value heads in turn share the query and the key of a key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    """Features of a head's queries, and of its keys."""
    value_dim: int
    """Features of a head's values."""
    kernel: int
    """Tokens that the causal convolution of queries, keys and values sees, the present one included."""

    @property
    def query_size(self) -> int:
        """Features of all heads' queries, and of their keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Features of all heads' values, and of the output's gate."""
        return self.value_heads * self.value_dim

    @property
    def convolved_size(self) -> int:
        """Features of queries, keys and values."""
        return 2 * self.query_size + self.value_size


def _refused(value: Any) -> type[UnsupportedArchitecture]:
    is_size = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    return UnsupportedArchitecture if is_size else MalformedConfig


class ConfigReader:
    """Typed look-ups in ``mapping`` whose errors name the key. null counts as absent.

    Args:
        place: of the mapping in config.json, which keys are named behind, such as "rope_scaling.".
    """

    def __init__(self, mapping: Mapping[str, Any], place: str = "") -> None:
        self.mapping = mapping
        self._place = place

    def _value(self, key: str, default: Any) -> Any:
        value = self.mapping.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedArchitecture(f"{self._place}{key} is missing")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Raises UnsupportedArchitecture where the value is no text, or absent without a default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is no text")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Raises UnsupportedArchitecture where the value is neither true nor false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is neither true nor false")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Raises UnsupportedArchitecture where the value is no integer from ``least`` to the most that a model has, or
        absent without a default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise _refused(value)(f"{self._place}{key}={shown(value)} is not {kind}")
        if value > (most := _MOST.get(key, MOST)):
            raise UnsupportedArchitecture(f"{self._place}{key}={shown(value)}: no more than {most} is read")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises UnsupportedArchitecture where the value is no positive number that float32 holds, or absent without a
        default."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise _refused(value)(f"{self._place}{key}={shown(value)} is not a positive number")
        return float(value)

    def items(self, key: str) -> list[Any]:
        """A list; empty where it is absent. Raises UnsupportedArchitecture where the value is none."""
        value = self._value(key, [])
        if not isinstance(value, list):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is no list")
        return value

    def inner(self, key: str) -> ConfigReader:
        """Of a mapping within; empty where it is absent. Raises UnsupportedArchitecture where the value is none."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is no mapping")
        return ConfigReader(value, f"{self._place}{key}.")

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.mapping.get(key) is not None

    def with_defaults(self, **values: Any) -> ConfigReader:
        """The same with values for keys that are absent."""
        absent = {key: value for key, value in values.items() if not self.has(key)}
        return ConfigReader({**self.mapping, **absent}, self._place)

    def refuse(self, *keys: str) -> None:
        """Raises UnsupportedArchitecture where one of ``keys`` is set: the learner does not compute what it asks."""
        for key in keys:
            if self.mapping.get(key):
                raise UnsupportedArchitecture(
                    f"{self._place}{key}={shown(self.mapping[key])} is not supported for {self.text('model_type')}"
                )

    def require(self, **expected: Any) -> None:
        """Raises UnsupportedArchitecture where a key has a value that the learner does not compute."""
        for key, value in expected.items():
            if self.mapping.get(key) not in (None, value):
                raise UnsupportedArchitecture(
                    f"{self._place}{key}={shown(self.mapping[key])} is not supported for {self.text('model_type')}: "
                    f"only {shown(value)} is"
                )


MOST = 2**31 - 1
_MOST = {"num_hidden_layers": 4096, "num_experts": 65536, "num_local_experts": 65536, "n_routed_experts": 65536}
"""Of what is counted out, one by one; ``MOST`` of everything else."""
_LARGEST = 3e38
_SHOWN = 80


def shown(value: Any) -> str:
    """A value as config.json has it, without its middle where it is long."""
    return clipped(json.dumps(value, default=str), _SHOWN)


DECLARATIONS = ("quantization_config", "compression_config")
"""Keys of config.json that declare quantised weights; the second is compressed-tensors' earlier name."""
MAKE_FULL_PRECISION = (
    "start from the full-precision weights, which conversion/hf_to_mcore.py and mcore_to_hf.py make of block FP8, "
    "MXFP4 and what compressed-tensors and ModelOpt write"
)
"""What to do with quantised weights that are read by conversions alone."""


def decoder(config: ConfigReader) -> dict[str, Any]:
    """Fields of a plain decoder: grouped-query attention without biases, rotary positions, SwiGLU, RMSNorm.

    Of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

    Raises:
        UnsupportedArchitecture: a needed key is absent or of the wrong type, or a feature is set that would change the
            computation and that the learner does not compute.
    """
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    groups = config.integer("num_key_value_heads", heads)
    if heads % groups:
        raise MalformedConfig(f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")
    if not config.has("head_dim") and hidden % heads:
        raise UnsupportedArchitecture(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    if config.mapping.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(
            f"hidden_act={shown(config.mapping['hidden_act'])} is not supported: only silu is"
        )
    config.refuse("mlp_bias")
    for key in DECLARATIONS:
        if config.mapping.get(key):
            raise UnsupportedArchitecture(f"{key} is set: {MAKE_FULL_PRECISION}")
    return {
        **_rope(config),
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": config.integer("head_dim", hidden // heads),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": config.integer("max_position_embeddings", 32768),
        "initializer_range": config.number("initializer_range", 0.02),
    }


def unbiased_decoder(config: ConfigReader) -> dict[str, Any]:
    """``decoder`` of a family whose attention_bias puts a bias on o_proj too, which no published checkpoint has.

    Raises:
        UnsupportedArchitecture: attention_bias is set, or as ``decoder``.
    """
    config.refuse("attention_bias")
    return decoder(config)


def experts(config: ConfigReader) -> dict[str, Any]:
    """Fields of a mixture of experts.

    Raises:
        UnsupportedArchitecture: as ``decoder``.
    """
    count_key = "num_experts" if config.has("num_experts") else "num_local_experts"
    return {
        "num_experts": config.integer(count_key),
        "num_experts_per_tok": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": config.integer("moe_intermediate_size"),
        "norm_topk_prob": config.flag("norm_topk_prob"),
    }


def sigmoid_gates(config: ConfigReader) -> dict[str, Any]:
    """Fields of a router with sigmoid scores, a bias for the choice of experts, and gates that are the chosen experts'
    scores over their sum.

    Raises:
        UnsupportedArchitecture: as ``decoder``, gates are not normalised, or scores are of another kind.
    """
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if config.mapping.get(key) not in (None, expected):
            value = shown(config.mapping[key])
            raise UnsupportedArchitecture(f"{key}={value}: a router with sigmoid scores and {key}={value} is missing")
    chosen = config.integer("num_experts_per_tok")
    if chosen == 1:
        raise UnsupportedArchitecture("num_experts_per_tok=1: a normalised gate of a single sigmoid score is missing")
    return {"num_experts_per_tok": chosen, "router_scores": "sigmoid", "router_bias": True}


def sigmoid_router(config: ConfigReader) -> dict[str, Any]:
    """Fields of DeepSeek-V3's experts: sigmoid scores with a bias for the choice, normalised gates, groups, shared
    experts, dense layers first.

    Raises:
        UnsupportedArchitecture: as ``decoder`` and ``sigmoid_gates``, or groups are chosen by another number of scores
            than two.
    """
    gates = sigmoid_gates(config)
    chosen, groups, limit = gates["num_experts_per_tok"], config.integer("n_group", 1), config.integer("topk_group", 1)
    if groups > 1 and chosen != 2 * limit:
        raise UnsupportedArchitecture(
            f"topk_group={limit} with num_experts_per_tok={chosen}: a choice of groups by their two best scores is "
            "there for num_experts_per_tok = 2 topk_group alone"
        )
    return {
        **gates,
        **_routed_and_shared_experts(config, shared=1),
        "router_groups": (groups, limit) if groups > 1 else None,
    }


def softmax_router(config: ConfigReader) -> dict[str, Any]:
    """Fields of DeepSeek-V2's experts (arXiv:2405.04434, section 2.2): softmax scores that are the gates as they are,
    groups chosen by their best expert (topk_method=group_limited_greedy) or none (greedy), shared experts, dense layers
    first.

    Raises:
        UnsupportedArchitecture: as ``decoder``, gates are normalised, scores are of another kind, or the choice of
            groups is none.
    """
    config.require(scoring_func="softmax", norm_topk_prob=False)
    method, chosen = config.text("topk_method", "greedy"), config.integer("num_experts_per_tok")
    groups, limit = config.integer("n_group", 1), config.integer("topk_group", 1)
    fields = _routed_and_shared_experts(config, shared=2)
    count = fields["num_experts"]
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedArchitecture(
            f"topk_method={shown(method)} is not supported for {config.text('model_type')}: only greedy and "
            "group_limited_greedy are"
        )
    if method == "greedy" and limit < groups:
        raise UnsupportedArchitecture(
            f'n_group={groups} with topk_method="greedy": transformers chooses among all experts then, and engines '
            "among those of some groups: set n_group and topk_group to 1, or topk_method to group_limited_greedy"
        )
    if count % groups or limit > groups or chosen > limit * (count // groups):
        raise UnsupportedArchitecture(
            f"n_group={groups} and topk_group={limit}: {chosen} of {count} experts cannot be chosen so"
        )
    grouped = {"router_groups": (groups, limit), "router_group_score": "best"} if limit < groups else {}
    return {**fields, **grouped, "num_experts_per_tok": chosen, "norm_topk_prob": False}


def _routed_and_shared_experts(config: ConfigReader, shared: int) -> dict[str, Any]:
    """Fields of DeepSeek's experts beside those of the choice; ``shared`` where n_shared_experts is absent."""
    if config.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedArchitecture(
            f"moe_layer_freq={shown(config.mapping['moe_layer_freq'])} is not supported: only 1 is"
        )
    width = config.integer("moe_intermediate_size")
    return {
        "num_experts": config.integer("n_routed_experts"),
        "moe_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": width * config.integer("n_shared_experts", shared),
        "routed_scaling_factor": config.number("routed_scaling_factor", 1.0),
        **first_dense_layers(config),
    }


def latent_attention(config: ConfigReader) -> dict[str, Any]:
    """Fields of multi-head latent attention, in place of those of ``decoder``'s attention.

    Raises:
        UnsupportedArchitecture: as ``decoder``, or there are fewer key heads than query heads.
    """
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise UnsupportedArchitecture("num_key_value_heads differs from num_attention_heads: latents are for all heads")
    rotated = config.integer("qk_rope_head_dim")
    size = config.integer("qk_nope_head_dim") + rotated
    return {
        "head_dim": size,
        "rotary_dim": rotated,
        "latent": LatentSizes(
            query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
            key_value_rank=config.integer("kv_lora_rank"),
            value_dim=config.integer("v_head_dim"),
            interleaved=config.flag("rope_interleave", True),
            norm_eps=config.number("rms_norm_eps", 1e-6),
        ),
        "softmax_scale": _latent_softmax_scale(config, size),
    }


def sparse_attention(config: ConfigReader, *, interleaved: bool) -> dict[str, Any]:
    """Fields of latent attention whose queries see the keys that an indexer chooses.

    Args:
        interleaved: how the family's indexer rotates features, whatever config.json says; see ``IndexerSizes``.

    Raises:
        UnsupportedArchitecture: as ``latent_attention``, config.json says something else of the indexer's positions, or
            asks for another choice than the keys with the largest scores.
    """
    if config.flag("indexer_rope_interleave") != interleaved:
        needed = "set it to true" if interleaved else "remove it"
        raise UnsupportedArchitecture(
            f"indexer_rope_interleave={shown(config.mapping.get('indexer_rope_interleave'))}: transformers rotates the "
            f"indexer of {config.text('model_type')} as if it were {shown(interleaved)}, and SGLang as it says: "
            f"{needed} if the model was trained so"
        )
    config.require(rope_interleave=True, index_k_norm_type="layer", index_kpool=1)
    config.refuse("index_init_tokens", "index_local_tokens", "cli_factor")
    config.integer("q_lora_rank")
    indexer = IndexerSizes(
        heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim"),
        index_topk=config.integer("index_topk"),
        interleaved=interleaved,
    )
    fields = latent_attention(config)
    if indexer.head_dim < fields["rotary_dim"]:
        raise UnsupportedArchitecture(
            f"index_head_dim={indexer.head_dim} is less than qk_rope_head_dim={fields['rotary_dim']}: positions rotate "
            "as many features of the indexer's heads"
        )
    return {**fields, "indexer": indexer}


def shared_choices(config: ConfigReader) -> dict[str, Any]:
    """``shared_choices``: layers that see the keys which the layer before them has chosen or taken over
    (arXiv:2603.12201). Those that indexer_types calls "shared"; without it "S" in index_topk_pattern; without either,
    all but every index_topk_freq-th from index_skip_topk_offset on.

    Raises:
        UnsupportedArchitecture: there is not a kind for each layer, a kind is unknown, or the first layer has no
            indexer.
    """
    layers = config.integer("num_hidden_layers")
    if config.has("indexer_types"):
        key, kinds = "indexer_types", config.items("indexer_types")
    elif config.has("index_topk_pattern"):
        key = "index_topk_pattern"
        names = {"F": _FULL_INDEXER, "S": _SHARED_INDEXER}
        kinds = [names.get(letter, letter) for letter in config.text(key)]
    else:
        key = "index_topk_freq"
        every, first = config.integer(key, 1), config.integer("index_skip_topk_offset", 2)
        kinds = [_SHARED_INDEXER if max(n - first + 1, 0) % every else _FULL_INDEXER for n in range(layers)]
    if len(kinds) != layers or any(kind not in (_FULL_INDEXER, _SHARED_INDEXER) for kind in kinds):
        raise UnsupportedArchitecture(
            f"{key}={shown(config.mapping[key])} does not say of each of {layers} layers whether its indexer is "
            f"{_FULL_INDEXER} or {_SHARED_INDEXER}"
        )
    if kinds[0] == _SHARED_INDEXER:
        raise UnsupportedArchitecture(f"{key}: the first layer has no layer before it whose keys it could share")
    return {"shared_choices": tuple(number for number, kind in enumerate(kinds) if kind == _SHARED_INDEXER)}


def normalise_latents(model: Any) -> Any:
    """``model``, of transformers, whose latents are normalised with rms_norm_eps as engines and the learner do it.

    transformers takes 1e-6 whatever config.json says, which is another model where that is 1e-5 (Moonlight,
    GLM-4.7-Flash). Without multi-head latent attention nothing changes.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")) and hasattr(module, "variance_epsilon"):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def _latent_softmax_scale(config: ConfigReader, size: int) -> float:
    scaling = _rope_parameters(config)[1]
    share, other = scaling.mapping.get("mscale"), scaling.mapping.get("mscale_all_dim")
    if _rope_kind(scaling) == "default":
        return size**-0.5
    if not share or share != other or scaling.has("attention_factor"):
        raise UnsupportedArchitecture(
            f"mscale={shown(share)} with mscale_all_dim={shown(other)}: a factor on rotated features alone is missing"
        )
    factor = scaling.number("factor")
    magnitude = 0.1 * scaling.number("mscale") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float(magnitude**2 * size**-0.5)


def first_dense_layers(config: ConfigReader) -> dict[str, Any]:
    """``dense_layers`` of a mixture of experts: the first_k_dense_replace first ones.

    Raises:
        UnsupportedArchitecture: it is no number of layers, or no layer with experts is left.
    """
    first, layers = config.integer("first_k_dense_replace", 0, least=0), config.integer("num_hidden_layers")
    if first > layers:
        raise UnsupportedArchitecture(f"first_k_dense_replace={first} is no number of layers up to {layers}")
    expected = ["dense"] * first + ["sparse"] * (layers - first)
    if config.has("mlp_layer_types") and (types := config.items("mlp_layer_types")) != expected:
        raise UnsupportedArchitecture(
            f"mlp_layer_types={shown(types)} is not what first_k_dense_replace={first} says, which engines read: make "
            "the two agree"
        )
    return _dense_layers(config, list(range(first)))


def partial_rotary(config: ConfigReader, default: float = 1.0, *, scaled: bool = False) -> dict[str, Any]:
    """``rotary_dim`` of a model whose positions rotate a part of each head; nothing where they rotate all of it.

    Args:
        default: of partial_rotary_factor, where config.json is silent.
        scaled: whether a factor on the rotated features alone has been tried with the family.

    Raises:
        UnsupportedArchitecture: as ``decoder``, or the part is no even number of features.
    """
    share = config.inner("rope_parameters").number(
        "partial_rotary_factor", config.number("partial_rotary_factor", default)
    )
    fields = decoder(config)
    head, scaling = fields["head_dim"], fields["rope_scaling"]
    size = int(head * min(share, 2.0))
    if size < head and scaling is not None and scaling.kind in ("yarn", "longrope") and not scaled:
        raise UnsupportedArchitecture(
            f"{scaling.kind} positions with partial_rotary_factor={share}: a factor on rotated features alone is "
            "missing"
        )
    if share > 1 or size < 2 or size % 2:
        raise UnsupportedArchitecture(f"partial_rotary_factor={share}: {size} of a head's {head} features are no pairs")
    return {} if size == head else {"rotary_dim": size}


def shared_expert(config: ConfigReader) -> dict[str, Any]:
    """Fields of a gated SwiGLU beside the experts.

    Raises:
        UnsupportedArchitecture: as ``decoder``.
    """
    return {
        "shared_expert_ffn_hidden_size": config.integer("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }


def listed_dense_layers(config: ConfigReader) -> dict[str, Any]:
    """``dense_layers`` of a mixture of experts: those of mlp_only_layers, and all but each decoder_sparse_step-th.

    Raises:
        UnsupportedArchitecture: mlp_only_layers is no list of numbers of layers, or no layer with experts is left.
    """
    layers, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    listed = config.items("mlp_only_layers")
    if not all(type(n) is int and 0 <= n < layers for n in listed):
        raise UnsupportedArchitecture(f"mlp_only_layers={shown(listed)} is no list of numbers below {layers}")
    return _dense_layers(config, [n for n in range(layers) if n in listed or (n + 1) % step])


def _dense_layers(config: ConfigReader, dense: list[int]) -> dict[str, Any]:
    if len(dense) == config.integer("num_hidden_layers"):
        raise UnsupportedArchitecture(f"none of the layers of this {config.text('model_type')} model has experts")
    return {"dense_layers": tuple(dense)}


def gated_delta_net(config: ConfigReader, full_every: int) -> dict[str, Any]:
    """Fields of gated delta nets in the layers that ``layer_types`` names; without it, in all but every so manyth.

    Args:
        full_every: where config.json has no full_attention_interval.

    Raises:
        UnsupportedArchitecture: as ``decoder``, value heads are no multiple of key heads, or layer_types names a kind
            of attention that is neither full nor linear.
    """
    sizes = DeltaNetSizes(
        key_heads=config.integer("linear_num_key_heads"),
        value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
    )
    if sizes.value_heads % sizes.key_heads:
        raise UnsupportedArchitecture(
            f"linear_num_value_heads={sizes.value_heads} is no multiple of linear_num_key_heads={sizes.key_heads}"
        )
    types = layer_types(config, (_FULL, _LINEAR))
    if types is None:
        interval = config.integer("full_attention_interval", full_every)
        layers = range(config.integer("num_hidden_layers"))
        types = [_LINEAR if (number + 1) % interval else _FULL for number in layers]
    linear = tuple(number for number, kind in enumerate(types) if kind == _LINEAR)
    return {"delta_net": sizes, "linear_layers": linear} if linear else {}


def layers_without_positions(config: ConfigReader) -> dict[str, Any]:
    """``unrotated_layers``: where no_rope_layers has 0; without it, every no_rope_layer_interval-th.

    Raises:
        UnsupportedArchitecture: as ``decoder``, no_rope_layers is no list of 0 and 1 for each layer, or positions are
            stretched with a factor on scores, which layers without positions would have too.
    """
    layers = config.integer("num_hidden_layers")
    interval, listed = config.integer("no_rope_layer_interval", 4), config.items("no_rope_layers")
    rotated = listed or [int((number + 1) % interval != 0) for number in range(layers)]
    if len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise UnsupportedArchitecture(
            f"no_rope_layers={shown(listed)} is no list of 0 or 1 for each of {layers} layers"
        )
    without = tuple(number for number, each in enumerate(rotated) if not each)
    scaling = decoder(config)["rope_scaling"]
    if without and scaling is not None and scaling.attention_factor != 1.0:
        raise UnsupportedArchitecture(
            f"{scaling.kind} positions with attention_factor={scaling.attention_factor}: a factor in layers with "
            "positions alone is missing"
        )
    return {"unrotated_layers": without} if without else {}


def set_sliding_window(config: ConfigReader) -> dict[str, Any]:
    """``sliding_window`` where config.json sets one; absent means none."""
    return sliding_window(config) if config.has("sliding_window") else {}


def sliding_window(config: ConfigReader) -> dict[str, Any]:
    """The field of a window that all layers have, unless ``sliding_window`` is null."""
    window = _window(config)
    return {} if window is None else {"sliding_window": window}


def switched_sliding_window(config: ConfigReader) -> dict[str, Any]:
    """``sliding_window`` where ``use_sliding_window`` turns it on."""
    return sliding_window(config) if config.flag("use_sliding_window") else {}


def optional_sliding_window(config: ConfigReader) -> dict[str, Any]:
    """The field of a window that ``use_sliding_window`` turns on, in the layers that ``layer_types`` or, without it,
    ``max_window_layers`` names.

    Raises:
        UnsupportedArchitecture: layers are to have a window that is not set.
    """
    window = _window(config) if config.flag("use_sliding_window") else None
    layers, types = config.integer("num_hidden_layers"), layer_types(config)
    full = config.integer("max_window_layers", _MAX_WINDOW_LAYERS, least=0)
    if types is None:
        windowed = [window is not None and number >= full for number in range(layers)]
    else:
        windowed = [kind == _SLIDING for kind in types]
    if any(windowed) and window is None:
        raise UnsupportedArchitecture(
            f"layer_types asks for {_SLIDING}, but sliding_window is not set or use_sliding_window is false"
        )
    return _windows(window, windowed)


def windows_by_layer(config: ConfigReader, full_every: int) -> dict[str, Any]:
    """The fields of a window in the layers that ``layer_types`` names; without it, in all but every so manyth.

    Raises:
        UnsupportedArchitecture: layers are to have a window, but sliding_window is not set.
    """
    types, window = layer_types(config), _window(config)
    if types is None:
        layers = range(config.integer("num_hidden_layers"))
        types = [_SLIDING if (number + 1) % full_every else _FULL for number in layers]
    if _SLIDING in types and window is None:
        raise UnsupportedArchitecture(f"layers are to have {_SLIDING}, but sliding_window is not set")
    return _windows(window, [kind == _SLIDING for kind in types])


def _windows(window: int | None, windowed: list[bool]) -> dict[str, Any]:
    if not any(windowed):
        return {}
    return {"sliding_window": window, **({} if all(windowed) else {"windowed_layers": tuple(windowed)})}


# What transformers takes for keys that are absent.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_INDEXED = "indexed_attention"
_FULL_INDEXER, _SHARED_INDEXER = "full", "shared"


def _window(config: ConfigReader) -> int | None:
    if "sliding_window" in config.mapping and config.mapping["sliding_window"] is None:
        return None
    return config.integer("sliding_window", _WINDOW)


def layer_types(config: ConfigReader, known: Sequence[str] = (_FULL, _SLIDING)) -> list[str] | None:
    """The attention of each layer, one of ``known``; None where config.json does not say.

    Raises:
        UnsupportedArchitecture: another kind is among them, or there are not as many as layers.
    """
    if not config.has("layer_types"):
        return None
    layers, types = config.integer("num_hidden_layers"), config.items("layer_types")
    if len(types) != layers:
        raise MalformedConfig(f"layer_types is no list of num_hidden_layers={layers} kinds of attention")
    types = [_FULL if kind == "attention" else kind for kind in types]  # its earlier name
    for number, kind in enumerate(types):
        if kind not in known:
            raise UnsupportedArchitecture(f"layer_types[{number}]={shown(kind)} is not one of {', '.join(known)}")
    return types


def check_layer_types(
    config: ConfigReader, windows: Sequence[int | None], linear: Sequence[int] = (), *, indexed: bool = False
) -> None:
    """Make sure that a model whose layers have these ``windows`` is the one that ``layer_types`` describes.

    Args:
        linear: numbers of the layers without attention, see ``gated_delta_net``.
        indexed: whether an indexer chooses the keys in every layer.

    Raises:
        UnsupportedArchitecture: it is not, and the learner would compute something else.
    """
    if indexed:
        layer_types(config, (_INDEXED,))
        return
    known = (_FULL, _SLIDING, _LINEAR) if linear else (_FULL, _SLIDING)
    for number, (kind, window) in enumerate(zip(layer_types(config, known) or [], windows, strict=False)):
        if kind != (_LINEAR if number in linear else _FULL if window is None else _SLIDING):
            raise UnsupportedArchitecture(
                f"layer_types[{number}]={kind!r}, but sliding_window={window} holds for every layer of a "
                f"{config.text('model_type')} model: make the two agree"
            )


def _rope(config: ConfigReader) -> dict[str, Any]:
    # transformers 5 keeps theta and scaling together in rope_parameters; 4 has rope_theta and rope_scaling apart.
    key, parameters = _rope_parameters(config)
    theta = config.number("rope_theta", 10000.0)
    if _FULL not in parameters.mapping and _SLIDING not in parameters.mapping:
        theta, scaling = _positions(config, parameters, theta)
        return {"rope_theta": theta, "rope_scaling": scaling}
    local, stretched = _positions(config, parameters.inner(_SLIDING), config.number("rope_local_base_freq", theta))
    theta, scaling = _positions(config, parameters.inner(_FULL), theta)
    if stretched is not None:
        raise UnsupportedArchitecture(
            f"{key}.{_SLIDING}={shown(parameters.mapping[_SLIDING])}: stretched positions under a window are missing"
        )
    if scaling is not None and scaling.kind == "longrope":
        raise UnsupportedArchitecture(f"{key}.{_FULL}: longrope positions beside a window's own are missing")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _rope_parameters(config: ConfigReader) -> tuple[str, ConfigReader]:
    """The key that says how positions are rotated, and what it holds."""
    key = "rope_parameters" if config.mapping.get("rope_parameters") else "rope_scaling"
    return key, config.inner(key)


def _rope_kind(parameters: ConfigReader) -> str:
    return parameters.text("rope_type" if parameters.has("rope_type") else "type", "default")


def _positions(config: ConfigReader, inner: ConfigReader, theta: float) -> tuple[float, RopeScaling | None]:
    """Base (where it is absent, ``theta``), and how positions are stretched."""
    theta = inner.number("rope_theta", theta)
    kind = _rope_kind(inner)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=inner.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return theta, _yarn(inner)
    if kind == "longrope":
        return theta, _longrope(config, inner)
    raise UnsupportedArchitecture(
        f"rope type {shown(kind)} is not one of default, linear, llama3, yarn, longrope: {kind} positions are missing"
    )


def _longrope(config: ConfigReader, parameters: ConfigReader) -> RopeScaling:
    """arXiv:2402.13753, with the attention factor of Phi-3 (arXiv:2404.14219)."""
    key, longest = "original_max_position_embeddings", config.integer("max_position_embeddings", 32768)
    # transformers prefers the key that lies outside of the positions' own.
    original = config.integer(key, parameters.integer(key, longest))
    factors = {name: parameters.items(name) for name in ("short_factor", "long_factor")}
    for name, values in factors.items():
        if not values or not all(type(each) in (int, float) and 0 < each <= _LARGEST for each in values):
            raise UnsupportedArchitecture(
                f"{name}={shown(values)} of longrope positions is no list of positive numbers"
            )
    factor = parameters.number("factor", longest / original)
    if original == 1:
        raise UnsupportedArchitecture(f"{key}=1: longrope positions are stretched from more than one")
    found = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=parameters.number("attention_factor", found),
        short_factors=tuple(float(each) for each in factors["short_factor"]),
    )


def check_short_factors(scaling: RopeScaling | None, rotated: int) -> None:
    """Make sure that longrope has a factor for each pair of the ``rotated`` features of a head.

    Raises:
        UnsupportedArchitecture: it has not.
    """
    if scaling is not None and scaling.kind == "longrope" and len(scaling.short_factors) != rotated // 2:
        raise UnsupportedArchitecture(
            f"short_factor has {len(scaling.short_factors)} numbers, and positions rotate {rotated // 2} pairs of a "
            "head's features"
        )


def _yarn(parameters: ConfigReader) -> RopeScaling:
    """arXiv:2309.00071, with what DeepSeek's (mscale) and gpt-oss's (truncate) configurations add."""
    factor = parameters.number("factor")

    def magnitude(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    found = magnitude(1.0)
    if parameters.mapping.get("mscale") and parameters.mapping.get("mscale_all_dim"):
        found = magnitude(parameters.number("mscale")) / magnitude(parameters.number("mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=parameters.integer("original_max_position_embeddings"),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        attention_factor=parameters.number("attention_factor", found),
    )
