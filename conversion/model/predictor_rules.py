"""Rules for layers for multi-token prediction, in the forms that checkpoints have them."""

from __future__ import annotations

from dataclasses import replace

from conversion.model.rules import EMBEDDING_NAME, HF_LAYER, MCORE_LAYER, OUTPUT_NAME, Rule, Rules, norm

PREDICTOR_LAYER = "mtp.layers.{layer}."
"""How Megatron-Core's names of a layer for multi-token prediction begin; ``layer`` counts from 0."""


def predictor_rules(
    *layer: Rule, hf: str, first_norm: str, second_norm: str, projection: str, final_norm: str, around: str = ""
) -> Rules:
    """The table of one layer for multi-token prediction: a projection of two normed inputs, a layer and a norm.

    Args:
        layer: rules of the layer, as they are for the model's own.
        hf: prefix of its Hugging Face names, with ``{layer}``, or with ``{behind}`` where layers are counted on behind
            the model's own.
        first_norm, second_norm: modules that norm the first and the second half of what is projected. Megatron-Core
            calls them enorm and hnorm, after the embedding and the hidden state, which it has in this order.
        projection, final_norm: the other modules.
        around: prefix of these modules' names; empty: the layer's.
    """
    around = around or hf
    own = PREDICTOR_LAYER + "mtp_model_layer."
    return (
        norm(PREDICTOR_LAYER + "enorm.weight", f"{around}{first_norm}.weight"),
        norm(PREDICTOR_LAYER + "hnorm.weight", f"{around}{second_norm}.weight"),
        Rule(
            PREDICTOR_LAYER + "eh_proj.weight",
            (f"{around}{projection}.weight",),
            (("hidden", "twice_hidden"),),
            tp_dim=0,
        ),
        *(
            replace(
                rule,
                mcore=rule.mcore.replace(MCORE_LAYER, own),
                hf=tuple(name.replace(HF_LAYER, hf) for name in rule.hf),
            )
            for rule in layer
        ),
        norm(PREDICTOR_LAYER + "final_layernorm.weight", f"{around}{final_norm}.weight"),
    )


def predictor_apart(*layer: Rule) -> Rules:
    """``predictor_rules`` of Qwen3-Next's and Qwen3.5's names: several layers would share projection and norms."""
    return predictor_rules(
        *layer,
        hf="mtp.layers.{layer}.",
        around="mtp.",
        first_norm="pre_fc_norm_embedding",
        second_norm="pre_fc_norm_hidden",
        projection="fc",
        final_norm="norm",
    )


def predictor_behind(*layer: Rule) -> Rules:
    """``predictor_rules`` of DeepSeek-V3's names, as GLM-4.5 has them too."""
    return predictor_rules(
        *layer,
        hf="model.layers.{behind}.",
        first_norm="enorm",
        second_norm="hnorm",
        projection="eh_proj",
        final_norm="shared_head.norm",
    )


COPIES_BEHIND = {
    EMBEDDING_NAME: "model.layers.{behind}.embed_tokens.weight",
    OUTPUT_NAME: "model.layers.{behind}.shared_head.head.weight",
}
"""With ``predictor_behind``: the copies of embedding and output layer that such a checkpoint has beside it."""
