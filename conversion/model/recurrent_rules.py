"""Parts of families' tables: what layers with a state have in place of attention."""

from __future__ import annotations

from dataclasses import replace

from conversion.model.rules import HF_LAYER, MCORE_LAYER, Arrangement, Layers, Rule, Rules, norm

_DELTA, _HF_DELTA = MCORE_LAYER + "self_attention.", HF_LAYER + "linear_attn."

GATED_DELTA_NET: Rules = tuple(
    replace(rule, layers=Layers.LINEAR)
    for rule in (
        Rule(
            _DELTA + "in_proj.weight",
            (_HF_DELTA + "in_proj_qkvz.weight", _HF_DELTA + "in_proj_ba.weight"),
            (("linear_projected", "hidden"), ("linear_rates", "hidden")),
            Arrangement.KEY_HEADS,
            tp_dim=0,
        ),
        Rule(
            _DELTA + "conv1d.weight",
            (_HF_DELTA + "conv1d.weight",),
            (("linear_convolved", "one", "linear_kernel"),),
            Arrangement.KEY_HEADS,
            ("linear_query", "linear_query", "linear_value"),
            tp_dim=0,
        ),
        Rule(_DELTA + "dt_bias", (_HF_DELTA + "dt_bias",), (("linear_value_heads",),), tp_dim=0),
        Rule(_DELTA + "A_log", (_HF_DELTA + "A_log",), (("linear_value_heads",),), tp_dim=0),
        norm(_DELTA + "out_norm.weight", _HF_DELTA + "norm.weight", "linear_value_dim"),
        Rule(_DELTA + "out_proj.weight", (_HF_DELTA + "out_proj.weight",), (("hidden", "linear_value"),), tp_dim=1),
    )
)
"""With ``Architecture.delta_net``: what ``Architecture.linear_layers`` have in place of attention. On disk the
projections are interleaved by key head already; here the convolution is too, so that a tensor-parallel rank has a run
of rows of every parameter."""

SPLIT_GATED_DELTA_NET: Rules = (
    replace(
        GATED_DELTA_NET[0],
        hf=tuple(f"{_HF_DELTA}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        shapes=tuple((size, "hidden") for size in ("linear_convolved", "linear_value", *2 * ("linear_value_heads",))),
        sections=("linear_query", "linear_query", "linear_value", "linear_value", *2 * ("linear_value_heads",)),
    ),
    *GATED_DELTA_NET[1:],
)
"""``GATED_DELTA_NET`` whose projections are not interleaved on disk: q over k over v, and three tensors beside it."""

_MAMBA = HF_LAYER + "mamba."
_MAMBA_CONVOLVED = ("mamba_value", "mamba_group", "mamba_group")

MAMBA: Rules = tuple(
    replace(rule, layers=Layers.LINEAR)
    for rule in (
        Rule(
            _DELTA + "in_proj.weight",
            (_MAMBA + "in_proj.weight",),
            (("mamba_projected", "hidden"),),
            Arrangement.KEY_HEADS,
            ("mamba_value", *_MAMBA_CONVOLVED, "mamba_heads"),
            tp_dim=0,
        ),
        Rule(
            _DELTA + "conv1d.weight",
            (_MAMBA + "conv1d.weight",),
            (("mamba_convolved", "one", "mamba_kernel"),),
            Arrangement.KEY_HEADS,
            _MAMBA_CONVOLVED,
            tp_dim=0,
        ),
        Rule(
            _DELTA + "conv1d.bias",
            (_MAMBA + "conv1d.bias",),
            (("mamba_convolved",),),
            Arrangement.KEY_HEADS,
            _MAMBA_CONVOLVED,
            tp_dim=0,
        ),
        Rule(_DELTA + "dt_bias", (_MAMBA + "dt_bias",), (("mamba_heads",),), tp_dim=0),
        Rule(_DELTA + "A_log", (_MAMBA + "A_log",), (("mamba_heads",),), tp_dim=0),
        Rule(_DELTA + "D", (_MAMBA + "D",), (("mamba_heads",),), tp_dim=0),
        Rule(_DELTA + "norm.weight", (_MAMBA + "norm.weight",), (("mamba_value",),), tp_dim=0),
        Rule(_DELTA + "out_proj.weight", (_MAMBA + "out_proj.weight",), (("hidden", "mamba_value"),), tp_dim=1),
    )
)
"""With ``Architecture.mamba``: what ``Architecture.linear_layers`` have in place of attention. On disk a projection's
rows are gates over values, over what states are written by, over what they are read by, over steps; here each group has
its own run of rows of every parameter."""
