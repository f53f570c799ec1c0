"""Granite 4: Granite 3 with Mamba-2 in most layers of some models, and an MLP that every token goes through, alone or
beside experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conversion.model.attention_config import mamba
from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture, shown
from conversion.model.families import granitemoe
from conversion.model.family import Family
from conversion.model.hf_config import multipliers, unbiased_decoder
from conversion.model.recurrent_rules import MAMBA
from conversion.model.rules import ATTENTION, FUSED_SWIGLU, PROJECTIONS, Layers, decoder_rules, renamed
from conversion.model.stacked_rules import FUSED_SHARED_EXPERT, ROW_STACKED_EXPERTS

NAMES = {"mlp.gate_up_proj.": "shared_mlp.input_linear.", "mlp.down_proj.": "shared_mlp.output_linear."}
_ATTENTION = (ATTENTION[0], *(replace(rule, layers=Layers.ATTENTION) for rule in PROJECTIONS), ATTENTION[-1])
_EXPERTS = (*ROW_STACKED_EXPERTS, *FUSED_SHARED_EXPERT)


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    if config.has("layers_block_type"):  # another name of layer_types
        config = config.with_defaults(layer_types=config.items("layers_block_type"))
    config.require(mamba_n_groups=1)  # of more, transformers normalises all features together, and SGLang each group
    width = config.integer("shared_intermediate_size", 1024)
    if config.integer("num_local_experts", 8, least=0):
        fields = {**granitemoe.read(config), "shared_expert_ffn_hidden_size": width}
    else:
        fields = {**unbiased_decoder(config), **multipliers(config), "ffn_hidden_size": width}
    positions = config.text("position_embedding_type", "nope")
    if positions not in ("rope", "nope"):
        raise UnsupportedArchitecture(f"position_embedding_type={shown(positions)} is neither rope nor nope")
    if positions == "nope":
        fields["unrotated_layers"] = tuple(range(fields["num_layers"]))
    return {**fields, **mamba(config)}


FAMILY = Family(
    "granitemoehybrid",
    rules=decoder_rules(*_ATTENTION, *MAMBA, *renamed(FUSED_SWIGLU, NAMES), *_EXPERTS),
    read=read,
    engine_classes={"GraniteMoeHybridForCausalLM": "sglang.srt.models.granitemoehybrid:GraniteMoeHybridForCausalLM"},
)
