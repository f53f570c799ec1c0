"""Fields of ``config.json`` about attention: windows by layer, latent and sparse attention, and what stands in
its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conversion.model.config_reader import (
    FULL,
    LINEAR,
    SLIDING,
    ConfigReader,
    MalformedConfig,
    UnsupportedArchitecture,
    shown,
)
from conversion.model.position_config import rope_kind, rope_parameters

EARLIER_NAMES = {"attention": FULL, "mamba": LINEAR}
"""What kinds of layers were called in config.json before transformers 5."""
_UNLIMITED = (math.inf, {"__float__": "Infinity"})
"""How config.json says that there is no end."""


@dataclass(frozen=True)
class LatentSizes:
    """Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A head's queries and keys have ``Architecture.head_dim`` features; positions rotate ``rotary_dim`` of them: in a
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
class MambaSizes:
    """Of a Mamba-2 layer (Transformers are SSMs, arXiv:2405.21060, section 7).

    heads is a multiple of groups: so many heads in turn share what a group writes their states by and reads them by.
    """

    heads: int
    head_dim: int
    """Features of a head's values."""
    groups: int
    state_dim: int
    """Features that a state is written by, and read by: a head's state is head_dim x state_dim numbers."""
    kernel: int
    """Tokens that the causal convolution sees, the present one included."""

    @property
    def value_size(self) -> int:
        """Features of all heads' values, and of the output's gate."""
        return self.heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Features of all groups that states are written by, and of those that they are read by."""
        return self.groups * self.state_dim

    @property
    def convolved_size(self) -> int:
        """Features of values, and of what states are written and read by."""
        return self.value_size + 2 * self.group_size

    @property
    def rates(self) -> int:
        """Numbers of a token that say how fast states change, of all heads."""
        return self.heads

    @property
    def state_size(self) -> int:
        """Numbers of all heads' states."""
        return self.value_size * self.state_dim

    @property
    def state_flops(self) -> float:
        """FLOPs of a token beside projections and convolution: its state decays and is written, and is read."""
        return 4.0 * self.state_size


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

    @property
    def rates(self) -> int:
        """Numbers of a token that say how fast states change, of all heads: decay and share of what is replaced."""
        return 2 * self.value_heads

    @property
    def state_size(self) -> int:
        """Numbers of all heads' states."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def state_flops(self) -> float:
        """FLOPs of a token beside projections and convolution: a key reads its state, an outer product changes it, and
        a query reads it."""
        return 6.0 * self.state_size


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
    scaling = rope_parameters(config)[1]
    share, other = scaling.mapping.get("mscale"), scaling.mapping.get("mscale_all_dim")
    if rope_kind(scaling) == "default":
        return size**-0.5
    if not share or share != other or scaling.has("attention_factor"):
        raise UnsupportedArchitecture(
            f"mscale={shown(share)} with mscale_all_dim={shown(other)}: a factor on only the rotated features is "
            "missing"
        )
    factor = scaling.number("factor")
    magnitude = 0.1 * scaling.number("mscale") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float(magnitude**2 * size**-0.5)


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
    types = layer_types(config, (FULL, LINEAR))
    if types is None:
        interval = config.integer("full_attention_interval", full_every)
        layers = range(config.integer("num_hidden_layers"))
        types = [LINEAR if (number + 1) % interval else FULL for number in layers]
    linear = tuple(number for number, kind in enumerate(types) if kind == LINEAR)
    return {"delta_net": sizes, "linear_layers": linear} if linear else {}


def mamba(config: ConfigReader) -> dict[str, Any]:
    """Fields of Mamba-2 layers, where ``layer_types`` names them; without it, everywhere.

    Raises:
        UnsupportedArchitecture: as ``decoder``, heads are no multiple of groups or do not make mamba_expand times
            hidden_size, or a key asks for what the learner does not compute.
    """
    layers = range(config.integer("num_hidden_layers"))
    types = layer_types(config, (FULL, LINEAR)) or [LINEAR] * len(layers)
    linear = tuple(number for number in layers if types[number] == LINEAR)
    if not linear:
        return {}
    config.refuse("mamba_proj_bias")
    config.require(mamba_conv_bias=True)
    check_steps(config)
    heads = config.integer("mamba_n_heads", 128)
    width = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    size = width // heads if config.mapping.get("mamba_d_head", "auto") == "auto" else config.integer("mamba_d_head")
    sizes = MambaSizes(
        heads=heads,
        head_dim=size,
        groups=config.integer("mamba_n_groups", 1),
        state_dim=config.integer("mamba_d_state", 256),
        kernel=config.integer("mamba_d_conv", 4),
    )
    if sizes.value_size != width or heads % sizes.groups:
        raise UnsupportedArchitecture(
            f"mamba_n_heads={heads} of mamba_d_head={size} have to make mamba_expand x hidden_size = {width}, and to "
            f"be a multiple of mamba_n_groups={sizes.groups}"
        )
    return {"mamba": sizes, "linear_layers": linear}


def check_steps(config: ConfigReader) -> None:
    """Raise UnsupportedArchitecture where the steps of Mamba-2 have bounds."""
    limits = config.items("time_step_limit")
    if limits and not (len(limits) == 2 and limits[0] == 0.0 and limits[1] in _UNLIMITED):
        raise UnsupportedArchitecture(f"time_step_limit={shown(limits)}: only steps from 0 without an end are computed")


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
        windowed = [kind == SLIDING for kind in types]
    if any(windowed) and window is None:
        raise UnsupportedArchitecture(
            f"layer_types asks for {SLIDING}, but sliding_window is not set or use_sliding_window is false"
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
        types = [SLIDING if (number + 1) % full_every else FULL for number in layers]
    if SLIDING in types and window is None:
        raise UnsupportedArchitecture(f"layers are to have {SLIDING}, but sliding_window is not set")
    return _windows(window, [kind == SLIDING for kind in types])


def _windows(window: int | None, windowed: list[bool]) -> dict[str, Any]:
    if not any(windowed):
        return {}
    return {"sliding_window": window, **({} if all(windowed) else {"windowed_layers": tuple(windowed)})}


# What transformers takes for keys that are absent.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
_INDEXED = "indexed_attention"
_FULL_INDEXER, _SHARED_INDEXER = "full", "shared"


def _window(config: ConfigReader) -> int | None:
    if "sliding_window" in config.mapping and config.mapping["sliding_window"] is None:
        return None
    return config.integer("sliding_window", _WINDOW)


def layer_types(config: ConfigReader, known: Sequence[str] = (FULL, SLIDING)) -> list[str] | None:
    """The attention of each layer, one of ``known``; None where config.json does not say.

    Raises:
        UnsupportedArchitecture: another kind is among them, or there are not as many as layers.
    """
    if not config.has("layer_types"):
        return None
    layers, types = config.integer("num_hidden_layers"), config.items("layer_types")
    if len(types) != layers:
        raise MalformedConfig(f"layer_types is no list of num_hidden_layers={layers} kinds of attention")
    types = [EARLIER_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
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
    known = (FULL, SLIDING, LINEAR) if linear else (FULL, SLIDING)
    for number, (kind, window) in enumerate(zip(layer_types(config, known) or [], windows, strict=False)):
        if kind != (LINEAR if number in linear else FULL if window is None else SLIDING):
            raise UnsupportedArchitecture(
                f"layer_types[{number}]={kind!r}, but sliding_window={window} holds for every layer of a "
                f"{config.text('model_type')} model: make the two agree"
            )
