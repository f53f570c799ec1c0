"""Operators of a model, and which of them ``learner.match_engine=exact`` knows."""

from __future__ import annotations

from conversion.model.architecture import Architecture
from conversion.model.rotary import query_factor

OPERATORS = (
    "embedding", "norm", "qkv", "rotary", "attention", "delta_net", "mamba", "attention_output", "mlp_up",
    "activation", "mlp_down", "router", "experts", "head",
)  # fmt: skip
"""What engine and learner exchange, in the order of a layer. embedding: the factor of those that have one; the four
linear layers by what they are for; delta_net: convolution, rates, delta rule and gated norm; mamba: convolution, steps,
state space and norm of what is gated; experts: both of an expert's products, its activation and the sum; head: output
layer, log-softmax and sampling filters."""


def operators_of(architecture: Architecture) -> tuple[str, ...]:
    """Those of ``OPERATORS`` that the model has."""
    absent = set() if architecture.is_moe else {"router", "experts"}
    if architecture.is_moe and not architecture.dense_layers and architecture.shared_expert_ffn_hidden_size is None:
        absent |= {"mlp_up", "activation", "mlp_down"}
    if architecture.embedding_scale == 1.0:
        absent.add("embedding")
    if architecture.delta_net is None:
        absent.add("delta_net")
    if architecture.mamba is None:
        absent.add("mamba")
    return tuple(each for each in OPERATORS if each not in absent)


def missing_operators(architecture: Architecture) -> list[str]:
    """What a model has that ``exact.operators`` has not, in words."""
    scaling = architecture.rope_scaling
    has = {
        "sparse attention": architecture.indexer is not None,
        "attention sinks": architecture.attention_sinks,
        f"the activation {architecture.activation}": architecture.activation not in ("silu", "gelu_tanh"),
        "layers of one half": bool(architecture.layers_without_mixer),
        "biases of the MLP": architecture.linear_bias,
        "longrope": scaling is not None and scaling.kind == "longrope",
        "a factor of rotated features beside others": query_factor(architecture) != 1.0,
    }
    return [words for words, there in has.items() if there]
