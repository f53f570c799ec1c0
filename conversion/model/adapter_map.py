"""Which weights a low-rank adapter (LoRA, arXiv:2106.09685) may change, and the sizes of its factors. Without torch.

Each Hugging Face matrix W [out, in] of an adapted weight has a pair of factors of its own, A [rank, in] and
B [out, rank], as in PEFT's files:

    W' = W + (alpha / rank) B A
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from conversion.model.architecture import Architecture
from conversion.model.mapping import Mapping, shard_shape
from conversion.model.rules import Arrangement
from conversion.model.weight_map import WeightMap

TARGETS = ("attention", "mlp", "experts")
FACTORS = ".lora."
"""Part of the name of every factor's parameter: ``decoder.layers.0.self_attention.linear_qkv.lora.a.0``."""


LATENTS = ("_down_proj.weight",)
"""How names end of the matrices of latent attention that every tensor-parallel rank has whole."""


def target_of(mapping: Mapping) -> str | None:
    """Which of ``TARGETS`` a weight belongs to; None: no adapter changes it."""
    split = mapping.tp_dim is not None or mapping.mcore_name.endswith(LATENTS)
    if mapping.layer is None or len(mapping.mcore_shape) != 2 or not split:
        return None
    if mapping.expert is not None:
        return "experts"
    return "attention" if ".self_attention." in mapping.mcore_name else "mlp"


def module_names(architecture: Architecture, targets: Collection[str]) -> list[str]:
    """Last parts of the names of the Hugging Face matrices that ``targets`` adapt: q_proj, k_proj, …; sorted."""
    adapted = [mapping for mapping in WeightMap(architecture) if target_of(mapping) in targets]
    return sorted({name.split(".")[-2] for mapping in adapted for name in mapping.hf_names})


def why_not(architecture: Architecture, targets: Collection[str]) -> str:
    """What of ``targets`` cannot be adapted in this model, and why; empty: all that it has of them can be."""
    adapted = [mapping for mapping in WeightMap(architecture) if target_of(mapping) in targets]
    if any(mapping.is_stacked for mapping in adapted):
        return "experts: adapters do not know experts that are stored as one tensor"
    if not adapted:
        return f"{', '.join(targets)}: the model has none"
    return ""


_WITHOUT_ENGINE_CLASS = ("dots1", "seed_oss", "smollm3")
"""Families that SGLang 0.5.23 serves by transformers' modules, whose inputs its adapters do not take."""


def why_not_in_engine(architecture: Architecture, targets: Collection[str]) -> str:
    """What of ``targets`` SGLang 0.5.23 cannot adapt in this model, and why; empty: all that it has of them can be.

    Source: its lora/utils.py (names and shapes of the matrices), lora/layers.py (kernels of experts).
    """
    if architecture.family in _WITHOUT_ENGINE_CLASS:
        return "SGLang has no class of its own for the family, and no adapters in the one that it takes"
    if architecture.latent is not None:
        return "SGLang's adapters of latent attention do not compute the same here"
    if architecture.delta_net is not None:
        return "SGLang knows other names of a gated delta net's projections than the model has"
    if architecture.mamba is not None:
        return "SGLang's adapters of Mamba-2's projections need kernels that no test here has run"
    present = {target_of(mapping) for mapping in WeightMap(architecture)}
    if architecture.is_moe and (named := [target for target in ("mlp", "experts") if target in present & {*targets}]):
        return f"{', '.join(named)}: SGLang adapts these in a mixture of experts with kernels that no test here has run"
    return ""


def factor_mappings(mapping: Mapping, rank: int) -> Iterator[Mapping]:
    """The factors of one weight as mappings of their own: every A, then every B.

    Where a Hugging Face matrix is fused on disk, each of its sections has its own rows of B, and the Hugging Face name
    ends with ``[first row:last row]``; see ``peft_tensor``.
    """
    stem = mapping.mcore_name.removesuffix(".weight") + FACTORS
    whole = [block.start == 0 and block.stop == mapping.hf_shapes[block.source or 0][0] for block in mapping.blocks]
    plain = replace(mapping, arrangement=Arrangement.COPY, sections=(), query_groups=1)

    def factor(name: str, hf_name: str, shape: tuple[int, int], split: int) -> Mapping:
        tp_dim = split if mapping.tp_dim == split else None
        return replace(plain, mcore_name=stem + name, hf_names=(hf_name,), hf_shapes=(shape,), tp_dim=tp_dim)

    names = [name.removesuffix(".weight") for name in mapping.hf_names]
    for source, (name, shape) in enumerate(zip(names, mapping.hf_shapes, strict=True)):
        yield factor(f"a.{source}", f"{name}.lora_A.weight", (rank, shape[1]), 1)
    for number, (block, is_whole) in enumerate(zip(mapping.blocks, whole, strict=True)):
        rows = "" if is_whole else f"[{block.start}:{block.stop}]"
        shape = (block.stop - block.start, rank)
        yield factor(f"b.{number}", f"{names[block.source or 0]}.lora_B.weight{rows}", shape, 0)


def peft_tensor(factor_name: str) -> tuple[str, int]:
    """(name of the tensor in PEFT's files, first row) of a Hugging Face name of ``factor_mappings``."""
    name, _, rows = factor_name.partition("[")
    return name, int(rows.partition(":")[0] or 0)


def factor_elements(mapping: Mapping, rank: int, tp_size: int) -> list[int]:
    """Elements of each factor of one weight on one of ``tp_size`` ranks that share it."""
    return [math.prod(shard_shape(factor, tp_size, 0)) for factor in factor_mappings(mapping, rank)]
