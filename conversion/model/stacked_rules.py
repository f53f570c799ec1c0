"""Parts of families' tables: experts of a layer that lie in one tensor on disk, see ``stacked``."""

from __future__ import annotations

from conversion.model.rules import HF_LAYER, MCORE_LAYER, Arrangement, Layers, Rule, Rules, fused_swiglu

_STACKED, _LOCAL = HF_LAYER + "mlp.experts.", MCORE_LAYER + "mlp.experts.local_experts.{expert}."

STACKED_EXPERTS: Rules = (
    Rule(
        MCORE_LAYER + "mlp.router.weight",
        (HF_LAYER + "mlp.router.weight",),
        (("experts", "hidden"),),
        layers=Layers.EXPERTS,
    ),
    Rule(MCORE_LAYER + "mlp.router.bias", (HF_LAYER + "mlp.router.bias",), (("experts",),), layers=Layers.EXPERTS),
    Rule(
        _LOCAL + "linear_fc1.weight",
        (_STACKED + "gate_up_proj[{expert}, 0::2]", _STACKED + "gate_up_proj[{expert}, 1::2]"),
        (("expert_ffn", "hidden"), ("expert_ffn", "hidden")),
        Arrangement.GATE_UP,
        tp_dim=0,
        layers=Layers.EXPERTS,
    ),
    Rule(
        _LOCAL + "linear_fc1.bias",
        (_STACKED + "gate_up_proj_bias[{expert}, 0::2]", _STACKED + "gate_up_proj_bias[{expert}, 1::2]"),
        (("expert_ffn",), ("expert_ffn",)),
        Arrangement.GATE_UP,
        tp_dim=0,
        layers=Layers.EXPERTS,
    ),
    Rule(
        _LOCAL + "linear_fc2.weight",
        (_STACKED + "down_proj[{expert}]",),
        (("hidden", "expert_ffn"),),
        tp_dim=1,
        layers=Layers.EXPERTS,
    ),
    Rule(_LOCAL + "linear_fc2.bias", (_STACKED + "down_proj_bias[{expert}]",), (("hidden",),), layers=Layers.EXPERTS),
)
"""In place of ``EXPERTS``, with ``Architecture.linear_bias``: all experts of a layer in one tensor, see ``stacked``."""

_GRANITE, _SHARED_MLP = HF_LAYER + "block_sparse_moe.", HF_LAYER + "shared_mlp."

ROW_STACKED_EXPERTS: Rules = (
    Rule(
        MCORE_LAYER + "mlp.router.weight",
        (_GRANITE + "router.layer.weight",),
        (("experts", "hidden"),),
        layers=Layers.EXPERTS,
    ),
    *fused_swiglu(
        _LOCAL,
        _GRANITE + "input_linear.weight[{expert}, :]",
        _GRANITE + "output_linear.weight[{expert}, :]",
        "expert_ffn",
        "expert_gate_up",
        Layers.EXPERTS,
    ),
)
"""In place of ``EXPERTS``, in Granite: all experts of a layer in one tensor, gate over up."""

FUSED_SHARED_EXPERT: Rules = fused_swiglu(
    MCORE_LAYER + "mlp.shared_experts.",
    _SHARED_MLP + "input_linear.weight",
    _SHARED_MLP + "output_linear.weight",
    "shared_ffn",
    "shared_gate_up",
    Layers.EXPERTS,
)
"""Beside ``ROW_STACKED_EXPERTS``, in place of ``SHARED_EXPERT``: gate and up are one tensor on disk."""
