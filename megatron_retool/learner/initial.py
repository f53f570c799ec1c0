"""The models that a learner starts with: the policy or the critic, with weights from files, and a frozen copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.core.transformer.transformer_config import TransformerConfig

from conversion.model.architecture import Architecture
from megatron_retool.learner.model import CriticModel, PackedModel, build_model_chunks
from megatron_retool.learner.precision import Acceleration
from megatron_retool.learner.weights import global_tensors, load_hf_weights


def initial_chunks(
    model_class: type[PackedModel],
    architecture: Architecture,
    config: TransformerConfig,
    acceleration: Acceleration,
    *,
    hf_dir: str | Path | None,
    mcore_dir: str | Path | None,
    verify: bool,
    share_prefixes: bool,
    exact: bool = False,
) -> list[PackedModel]:
    """This rank's virtual pipeline stages, with weights of ``mcore_dir``, else ``hf_dir``, else random ones.

    Args:
        verify: hold the files against their checksums first, all ranks together.
        share_prefixes: learner.share_prefixes.
        exact: learner.match_engine=exact.

    Raises:
        ConfigError: ``exact`` does not go with the model or the machine.
    """
    from megatron_retool.learner.checkpoint.load import load_model_weights, verify_together

    chunks = build_model_chunks(architecture, config, acceleration, model_class, share_prefixes=share_prefixes)
    if exact:
        from megatron_retool.learner.exact import place

        place(chunks, architecture)
    own = ("value_head.weight",) if model_class is CriticModel else ()
    source = mcore_dir or hf_dir
    if source is not None and verify:
        verify_together(source)
    if mcore_dir is not None:
        load_model_weights(chunks, architecture, mcore_dir)
    elif hf_dir is not None:
        load_hf_weights(chunks, architecture, hf_dir, except_names=own)
    return chunks


def frozen_copy(
    chunks: Sequence[PackedModel],
    architecture: Architecture,
    config: TransformerConfig,
    acceleration: Acceleration,
    share_prefixes: bool,
) -> list[PackedModel]:
    """A reference policy: models like ``chunks`` with the weights that they have now, which nothing changes; without
    layers for multi-token prediction."""
    architecture, config = replace(architecture, predictors=0), copy.copy(config)
    config.mtp_num_layers = None
    copies = build_model_chunks(architecture, config, acceleration, share_prefixes=share_prefixes)
    for frozen, chunk in zip(copies, chunks, strict=True):
        frozen.requires_grad_(False).eval()
        weights = dict(global_tensors([chunk]))
        for name, tensor in global_tensors([frozen]):
            tensor.data.copy_(weights[name].data)
    return copies
