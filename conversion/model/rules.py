"""The rows of a family's table, and the parts that tables are made of.

    rules = decoder_rules(*ATTENTION, *QKV_BIAS, *SWIGLU)

Names are those of Megatron-Core's local layer spec. ``{layer}`` and ``{expert}`` stand for global numbers; sizes are
named, see ``SIZES``.  A Hugging Face name with brackets is a part of a tensor, see ``stacked``.  Parts with a state in
place of attention are in ``recurrent_rules``, experts in one tensor in ``stacked_rules``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum


class Arrangement(Enum):
    """How the rows (dimension 0) of the Hugging Face tensors lie in the Megatron-Core tensor."""

    COPY = "copy"
    """One tensor, rows unchanged."""
    VOCABULARY = "vocabulary"
    """One tensor, followed by zero rows up to the padded vocabulary size."""
    QUERY_GROUPS = "query_groups"
    """q, k, v interleaved: for each query group its R = heads / groups query heads, its key head, its value head."""
    GATED_QUERY_GROUPS = "gated_query_groups"
    """The same of attention with a gate, whose q has each head's queries over its gate: for each query group its R
    heads' queries, their gates, its key head, its value head."""
    KEY_HEADS = "key_heads"
    """Interleaved: for each key head of a gated delta net, or each group of Mamba-2, its part of every tensor (or
    section), in turn."""
    GATE_UP = "gate_up"
    """gate over up; tensor parallelism splits each half by itself."""


class Layers(Enum):
    """Which layers have a parameter."""

    ALL = "all"
    MIXER = "mixer"
    """Those with attention or what stands in its place: all, but for ``Architecture.layers_without_mixer``."""
    MLP = "mlp"
    """Those with an MLP, dense or of experts: all, but for ``Architecture.layers_without_mlp``."""
    DENSE = "dense"
    """Those of them with a dense one: all of a dense model, ``Architecture.dense_layers`` of a mixture of experts."""
    EXPERTS = "experts"
    """Those with a router and experts."""
    ATTENTION = "attention"
    """Those with softmax attention: all with a mixer, but for ``Architecture.linear_layers``."""
    LINEAR = "linear"
    """``Architecture.linear_layers``."""
    INDEXER = "indexer"
    """Those that choose keys by themselves: all, but for ``Architecture.shared_choices``."""


@dataclass(frozen=True)
class Rule:
    """One Megatron-Core parameter and the Hugging Face tensors whose rows it is made of."""

    mcore: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    """Shape of each Hugging Face tensor, as names of ``SIZES``."""
    arrangement: Arrangement = Arrangement.COPY
    sections: tuple[str, ...] = ()
    """Where a tensor fuses several: the rows of each in turn, through all tensors, as names of ``SIZES``. They are
    arranged as if each were one by itself."""
    tp_dim: int | None = None
    """Dimension that tensor parallelism (expert tensor parallelism for experts) splits; None: replicated."""
    layers: Layers = Layers.ALL
    """Of a parameter of layers: which of them have it."""
    only_with: str = ""
    """A field of ``Architecture``: a model where it is not set lacks the parameter."""
    is_buffer: bool = False
    """A buffer of Megatron-Core's module in float32: no gradient is taken of it, and no cast changes it."""
    is_frozen: bool = False
    """A parameter that training leaves as it is: it has neither a gradient nor an optimizer's state."""


Rules = tuple[Rule, ...]

SIZES = (
    "one",
    "vocab",
    "hidden",
    "twice_hidden",
    "query",
    "key_value",
    "query_key_value",
    "head_dim",
    "ffn",
    "gate_up",
    "experts",
    "expert_hidden",
    "expert_ffn",
    "expert_gate_up",
    "shared_ffn",
    "shared_gate_up",
    "query_rank",
    "key_value_rank",
    "key_value_rank_and_rotated",
    "latent_key_value",
    "output",
    "heads",
    "gated_query",
    "linear_query",
    "linear_value",
    "linear_value_heads",
    "linear_value_dim",
    "linear_convolved",
    "linear_projected",
    "linear_rates",
    "linear_kernel",
    "mamba_heads",
    "mamba_value",
    "mamba_group",
    "mamba_convolved",
    "mamba_projected",
    "mamba_kernel",
    "index_query",
    "index_head_dim",
    "index_heads",
)
"""Names of sizes; ``WeightMap`` has their values for one model."""

HF_LAYER, MCORE_LAYER = "model.layers.{layer}.", "decoder.layers.{layer}."
EMBEDDING_NAME, OUTPUT_NAME = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron-Core's names: a tied output layer is read from the embedding."""


def norm(mcore: str, hf: str, size: str = "hidden") -> Rule:
    """The weight of an RMSNorm."""
    return Rule(mcore, (hf,), ((size,),))


def swiglu(mcore: str, hf: str, width: str, layers: Layers = Layers.ALL) -> Rules:
    """A SwiGLU of ``width`` columns: gate_proj over up_proj, and down_proj; ``mcore`` and ``hf`` are prefixes."""
    return (
        Rule(
            mcore + "linear_fc1.weight",
            (hf + "gate_proj.weight", hf + "up_proj.weight"),
            ((width, "hidden"), (width, "hidden")),
            Arrangement.GATE_UP,
            tp_dim=0,
            layers=layers,
        ),
        Rule(mcore + "linear_fc2.weight", (hf + "down_proj.weight",), (("hidden", width),), tp_dim=1, layers=layers),
    )


def ungated_mlp(mcore: str, hf: str, width: str, layers: Layers, hidden: str = "hidden") -> Rules:
    """An MLP of ``width`` columns without a gate: up_proj and down_proj; ``mcore`` and ``hf`` are prefixes."""
    return (
        Rule(mcore + "linear_fc1.weight", (hf + "up_proj.weight",), ((width, hidden),), tp_dim=0, layers=layers),
        Rule(mcore + "linear_fc2.weight", (hf + "down_proj.weight",), ((hidden, width),), tp_dim=1, layers=layers),
    )


def fused_swiglu(mcore: str, gate_up: str, down: str, width: str, both: str, layers: Layers) -> Rules:
    """``swiglu`` with one tensor of ``both`` rows on disk, gate over up; ``mcore`` is a prefix, the others names."""
    return (
        Rule(
            mcore + "linear_fc1.weight",
            (gate_up,),
            ((both, "hidden"),),
            Arrangement.GATE_UP,
            (width, width),
            tp_dim=0,
            layers=layers,
        ),
        Rule(mcore + "linear_fc2.weight", (down,), (("hidden", width),), tp_dim=1, layers=layers),
    )


EMBEDDING = Rule(
    EMBEDDING_NAME, ("model.embed_tokens.weight",), (("vocab", "hidden"),), Arrangement.VOCABULARY, tp_dim=0
)
FINAL_NORM = norm("decoder.final_layernorm.weight", "model.norm.weight")
OUTPUT = Rule(OUTPUT_NAME, ("lm_head.weight",), (("vocab", "hidden"),), Arrangement.VOCABULARY, tp_dim=0)

_QKV_NAMES = tuple(f"{HF_LAYER}self_attn.{x}_proj" for x in "qkv")

ATTENTION: Rules = (
    norm(MCORE_LAYER + "input_layernorm.weight", HF_LAYER + "input_layernorm.weight"),
    Rule(
        MCORE_LAYER + "self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in _QKV_NAMES),
        (("query", "hidden"), ("key_value", "hidden"), ("key_value", "hidden")),
        Arrangement.QUERY_GROUPS,
        tp_dim=0,
    ),
    Rule(
        MCORE_LAYER + "self_attention.linear_proj.weight",
        (HF_LAYER + "self_attn.o_proj.weight",),
        (("hidden", "query"),),
        tp_dim=1,
    ),
    norm(MCORE_LAYER + "pre_mlp_layernorm.weight", HF_LAYER + "post_attention_layernorm.weight"),
)
"""Grouped-query attention, and the norms before it and before the MLP."""

PROJECTIONS: Rules = ATTENTION[1:-1]
"""``ATTENTION`` without norms."""

POST_NORMS: Rules = (
    norm(MCORE_LAYER + "self_attention.linear_proj.post_norm.weight", HF_LAYER + "post_attention_layernorm.weight"),
    norm(MCORE_LAYER + "mlp.linear_fc2.post_norm.weight", HF_LAYER + "post_feedforward_layernorm.weight"),
)
"""With ``Architecture.post_norm``."""

FUSED_ATTENTION: Rules = tuple(
    Rule(
        rule.mcore,
        (HF_LAYER + "self_attn.qkv_proj.weight",),
        (("query_key_value", "hidden"),),
        Arrangement.QUERY_GROUPS,
        ("query", "key_value", "key_value"),
        tp_dim=0,
    )
    if rule.arrangement is Arrangement.QUERY_GROUPS
    else rule
    for rule in ATTENTION
)
"""``ATTENTION`` whose q, k and v are one tensor on disk, q over k over v."""

_LATENT, _HF_LATENT = MCORE_LAYER + "self_attention.", HF_LAYER + "self_attn."

LATENT_ATTENTION: Rules = (
    ATTENTION[0],
    Rule(
        _LATENT + "linear_q_proj.weight",
        (_HF_LATENT + "q_proj.weight",),
        (("query", "hidden"),),
        tp_dim=0,
        only_with="has_whole_queries",
    ),
    Rule(
        _LATENT + "linear_q_down_proj.weight",
        (_HF_LATENT + "q_a_proj.weight",),
        (("query_rank", "hidden"),),
        only_with="query_rank",
    ),
    replace(
        norm(_LATENT + "q_layernorm.weight", _HF_LATENT + "q_a_layernorm.weight", "query_rank"), only_with="query_rank"
    ),
    Rule(
        _LATENT + "linear_q_up_proj.weight",
        (_HF_LATENT + "q_b_proj.weight",),
        (("query", "query_rank"),),
        tp_dim=0,
        only_with="query_rank",
    ),
    Rule(
        _LATENT + "linear_kv_down_proj.weight",
        (_HF_LATENT + "kv_a_proj_with_mqa.weight",),
        (("key_value_rank_and_rotated", "hidden"),),
    ),
    norm(_LATENT + "kv_layernorm.weight", _HF_LATENT + "kv_a_layernorm.weight", "key_value_rank"),
    Rule(
        _LATENT + "linear_kv_up_proj.weight",
        (_HF_LATENT + "kv_b_proj.weight",),
        (("latent_key_value", "key_value_rank"),),
        tp_dim=0,
    ),
    Rule(_LATENT + "linear_proj.weight", (_HF_LATENT + "o_proj.weight",), (("hidden", "output"),), tp_dim=1),
    ATTENTION[-1],
)
"""With ``Architecture.latent``, in place of ``ATTENTION``."""

_INDEXER, _HF_INDEXER = _LATENT + "core_attention.indexer.", _HF_LATENT + "indexer."

INDEXER: Rules = tuple(
    replace(rule, layers=Layers.INDEXER, is_frozen=True)
    for rule in (
        Rule(_INDEXER + "linear_wq_b.weight", (_HF_INDEXER + "wq_b.weight",), (("index_query", "query_rank"),)),
        Rule(_INDEXER + "linear_wk.weight", (_HF_INDEXER + "wk.weight",), (("index_head_dim", "hidden"),)),
        norm(_INDEXER + "k_norm.weight", _HF_INDEXER + "k_norm.weight", "index_head_dim"),
        norm(_INDEXER + "k_norm.bias", _HF_INDEXER + "k_norm.bias", "index_head_dim"),
        Rule(
            _INDEXER + "linear_weights_proj.weight",
            (_HF_INDEXER + "weights_proj.weight",),
            (("index_heads", "hidden"),),
        ),
    )
)
"""With ``Architecture.indexer``, beside ``LATENT_ATTENTION``. Every tensor-parallel rank has all of it."""

QKV_BIAS: Rules = (
    Rule(
        MCORE_LAYER + "self_attention.linear_qkv.bias",
        tuple(f"{name}.bias" for name in _QKV_NAMES),
        (("query",), ("key_value",), ("key_value",)),
        Arrangement.QUERY_GROUPS,
        tp_dim=0,
    ),
)
"""With ``Architecture.attention_bias``."""

OUTPUT_BIAS: Rules = (
    Rule(MCORE_LAYER + "self_attention.linear_proj.bias", (HF_LAYER + "self_attn.o_proj.bias",), (("hidden",),)),
)
"""With ``Architecture.linear_bias``."""

SINKS: Rules = (
    Rule(
        MCORE_LAYER + "self_attention.core_attention.softmax_offset",
        (HF_LAYER + "self_attn.sinks",),
        (("heads",),),
        tp_dim=0,
    ),
)
"""With ``Architecture.attention_sinks``."""

QK_NORM: Rules = (
    norm(MCORE_LAYER + "self_attention.q_layernorm.weight", HF_LAYER + "self_attn.q_norm.weight", "head_dim"),
    norm(MCORE_LAYER + "self_attention.k_layernorm.weight", HF_LAYER + "self_attn.k_norm.weight", "head_dim"),
)
"""With ``Architecture.qk_norm``."""

FULL_WIDTH_QK_NORM: Rules = (
    replace(QK_NORM[0], shapes=(("query",),)),
    replace(QK_NORM[1], shapes=(("key_value",),)),
)
"""With ``Architecture.qk_norm_full_width``."""

_GATED_QKV = replace(
    ATTENTION[1],
    shapes=(("gated_query", "hidden"), *ATTENTION[1].shapes[1:]),
    arrangement=Arrangement.GATED_QUERY_GROUPS,
)

GATED_ATTENTION: Rules = (
    ATTENTION[0],
    *(replace(rule, layers=Layers.ATTENTION) for rule in (_GATED_QKV, ATTENTION[2], *QK_NORM)),
    ATTENTION[-1],
)
"""With ``Architecture.attention_gate`` and ``Architecture.qk_norm``, in place of ``ATTENTION`` and ``QK_NORM``; beside
``GATED_DELTA_NET``."""

SWIGLU: Rules = swiglu(MCORE_LAYER + "mlp.", HF_LAYER + "mlp.", "ffn", Layers.DENSE)
"""The MLP of dense layers; beside ``EXPERTS`` where ``Architecture.dense_layers`` may name some."""

FUSED_SWIGLU: Rules = fused_swiglu(
    MCORE_LAYER + "mlp.", HF_LAYER + "mlp.gate_up_proj.weight", SWIGLU[1].hf[0], "ffn", "gate_up", Layers.DENSE
)
"""``SWIGLU`` whose gate and up are one tensor on disk."""

EXPERTS: Rules = (
    Rule(
        MCORE_LAYER + "mlp.router.weight",
        (HF_LAYER + "mlp.gate.weight",),
        (("experts", "hidden"),),
        layers=Layers.EXPERTS,
    ),
    *swiglu(
        MCORE_LAYER + "mlp.experts.local_experts.{expert}.",
        HF_LAYER + "mlp.experts.{expert}.",
        "expert_ffn",
        Layers.EXPERTS,
    ),
)
"""A router and its SwiGLU experts, in place of ``SWIGLU``."""

LATENT_PROJECTIONS: Rules = tuple(
    Rule(
        f"{MCORE_LAYER}mlp.{name}.weight",
        (f"{HF_LAYER}mlp.{name}.weight",),
        (shape,),
        layers=Layers.EXPERTS,
        only_with="moe_latent_size",
    )
    for name, shape in (
        ("fc1_latent_proj", ("expert_hidden", "hidden")),
        ("fc2_latent_proj", ("hidden", "expert_hidden")),
    )
)
"""With ``Architecture.moe_latent_size``: what experts' latent vectors are made by, and hidden states of them."""

ROUTER_BIAS: Rules = (
    Rule(
        MCORE_LAYER + "mlp.router.expert_bias",
        (HF_LAYER + "mlp.gate.e_score_correction_bias",),
        (("experts",),),
        layers=Layers.EXPERTS,
        is_buffer=True,
    ),
)
"""With ``Architecture.router_bias``."""

SHARED_EXPERT: Rules = swiglu(
    MCORE_LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.shared_expert.", "shared_ffn", Layers.EXPERTS
)
"""Beside ``EXPERTS``: a SwiGLU for every token, with ``Architecture.shared_expert_ffn_hidden_size``."""

SHARED_EXPERT_GATE: Rules = (
    Rule(
        MCORE_LAYER + "mlp.shared_experts.gate_weight",
        (HF_LAYER + "mlp.shared_expert_gate.weight",),
        (("one", "hidden"),),
        layers=Layers.EXPERTS,
    ),
)
"""With ``Architecture.shared_expert_gate``."""


BUFFER_SUFFIXES = (".e_score_correction_bias",)
"""How Hugging Face names of buffers end, which engines hold in float32 too."""

MCORE_BUFFER_SUFFIXES = (".router.expert_bias",)
"""How Megatron-Core's names of the same buffers end."""


def updated_by_muon(mcore_name: str, dimensions: int) -> bool:
    """Whether Muon, where it is the optimizer, updates a parameter of this name and so many dimensions: the matrices
    inside of layers, but for routers, whose rows are one for each expert, and gates with a single row."""
    in_layers = mcore_name.startswith(("decoder.layers.", "mtp.layers."))
    return in_layers and dimensions == 2 and not mcore_name.endswith((".router.weight", ".gate_weight"))


def decoder_rules(*layer: Rule) -> Rules:
    """A whole table: embedding, these rules of every layer, final norm, output layer."""
    return (EMBEDDING, *layer, FINAL_NORM, OUTPUT)


def optional(rules: Iterable[Rule], field: str) -> Rules:
    """``rules`` only of models that set a field of ``Architecture``, such as "qk_norm"."""
    return tuple(replace(rule, only_with=field) for rule in rules)


def renamed(rules: Iterable[Rule], names: Mapping[str, str]) -> Rules:
    """``rules`` with parts of the Hugging Face names replaced, such as {"self_attn.o_proj": "attention.dense"}."""

    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return tuple(replace(rule, hf=tuple(rename(name) for name in rule.hf)) for rule in rules)
