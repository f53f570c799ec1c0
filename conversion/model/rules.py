"""The rows of a family's table, and the parts that tables are made of.

    rules = decoder_rules(*ATTENTION, *QKV_BIAS, *SWIGLU)

Names are those of Megatron-Core's local layer spec. ``{layer}`` and ``{expert}`` stand for global numbers; sizes are
named, see ``SIZES``.
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
    GATE_UP = "gate_up"
    """gate over up; tensor parallelism splits each half by itself."""


@dataclass(frozen=True)
class Rule:
    """One Megatron-Core parameter and the Hugging Face tensors whose rows it is made of."""

    mcore: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    """Shape of each Hugging Face tensor, as names of ``SIZES``."""
    arrangement: Arrangement = Arrangement.COPY
    sections: tuple[str, ...] = ()
    """Of one tensor that fuses several: their rows, as names of ``SIZES``, arranged as if each were one by itself."""
    tp_dim: int | None = None
    """Dimension that tensor parallelism (expert tensor parallelism for experts) splits; None: replicated."""


Rules = tuple[Rule, ...]

SIZES = (
    "one",
    "vocab",
    "hidden",
    "query",
    "key_value",
    "query_key_value",
    "head_dim",
    "ffn",
    "gate_up",
    "experts",
    "expert_ffn",
    "shared_ffn",
)
"""Names of sizes; ``WeightMap`` has their values for one model."""

HF_LAYER, MCORE_LAYER = "model.layers.{layer}.", "decoder.layers.{layer}."
EMBEDDING_NAME, OUTPUT_NAME = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron-Core's names: a tied output layer is read from the embedding."""


def norm(mcore: str, hf: str, size: str = "hidden") -> Rule:
    """The weight of an RMSNorm."""
    return Rule(mcore, (hf,), ((size,),))


def swiglu(mcore: str, hf: str, width: str) -> Rules:
    """A SwiGLU of ``width`` columns: gate_proj over up_proj, and down_proj; both arguments are prefixes."""
    return (
        Rule(
            mcore + "linear_fc1.weight",
            (hf + "gate_proj.weight", hf + "up_proj.weight"),
            ((width, "hidden"), (width, "hidden")),
            Arrangement.GATE_UP,
            tp_dim=0,
        ),
        Rule(mcore + "linear_fc2.weight", (hf + "down_proj.weight",), (("hidden", width),), tp_dim=1),
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

QK_NORM: Rules = (
    norm(MCORE_LAYER + "self_attention.q_layernorm.weight", HF_LAYER + "self_attn.q_norm.weight", "head_dim"),
    norm(MCORE_LAYER + "self_attention.k_layernorm.weight", HF_LAYER + "self_attn.k_norm.weight", "head_dim"),
)
"""With ``Architecture.qk_norm``."""

SWIGLU: Rules = swiglu(MCORE_LAYER + "mlp.", HF_LAYER + "mlp.", "ffn")

FUSED_SWIGLU: Rules = (
    Rule(
        MCORE_LAYER + "mlp.linear_fc1.weight",
        (HF_LAYER + "mlp.gate_up_proj.weight",),
        (("gate_up", "hidden"),),
        Arrangement.GATE_UP,
        ("ffn", "ffn"),
        tp_dim=0,
    ),
    *SWIGLU[1:],
)
"""``SWIGLU`` whose gate and up are one tensor on disk."""

EXPERTS: Rules = (
    Rule(MCORE_LAYER + "mlp.router.weight", (HF_LAYER + "mlp.gate.weight",), (("experts", "hidden"),)),
    *swiglu(MCORE_LAYER + "mlp.experts.local_experts.{expert}.", HF_LAYER + "mlp.experts.{expert}.", "expert_ffn"),
)
"""A router and its SwiGLU experts, in place of ``SWIGLU``."""

SHARED_EXPERT: Rules = swiglu(MCORE_LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.shared_expert.", "shared_ffn")
"""Beside ``EXPERTS``: a SwiGLU for every token, with ``Architecture.shared_expert_ffn_hidden_size``."""

SHARED_EXPERT_GATE: Rules = (
    Rule(
        MCORE_LAYER + "mlp.shared_experts.gate_weight",
        (HF_LAYER + "mlp.shared_expert_gate.weight",),
        (("one", "hidden"),),
    ),
)
"""With ``Architecture.shared_expert_gate``."""


def decoder_rules(*layer: Rule) -> Rules:
    """A whole table: embedding, these rules of every layer, final norm, output layer."""
    return (EMBEDDING, *layer, FINAL_NORM, OUTPUT)


def renamed(rules: Iterable[Rule], names: Mapping[str, str]) -> Rules:
    """``rules`` with parts of the Hugging Face names replaced, such as {"self_attn.o_proj": "attention.dense"}."""

    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return tuple(replace(rule, hf=tuple(rename(name) for name in rule.hf)) for rule in rules)
