"""The layouts in which a family is compared with transformers, by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.layout import LayoutError
from megatron_retool.config import ConfigError, LearnerConfig, RecomputeConfig

TP, SP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
SHARE = "share_prefixes"
# Budgets in which some sequences need all context-parallel ranks and others fewer.
DYNAMIC = {"dynamic_context_parallel": True, "max_tokens_per_micro_batch": 96}
MAX_PROCESSES = 4


@dataclass(frozen=True)
class Case:
    """A layout on ``world`` processes.

    Attributes:
        settings: of ``learner``.
        recompute: learner.recompute.granularity.
        inapplicable: why the model cannot be cut so; empty: it can.
    """

    name: str
    world: int
    settings: dict[str, Any] = field(default_factory=dict)
    recompute: str | None = None
    inapplicable: str = ""


_NAMED = (
    Case("one process", 1),
    Case("unpacked", 1, {"max_tokens_per_micro_batch": 56}),
    Case("recompute", 1, recompute="full"),
    Case("unpacked, recompute", 1, {"max_tokens_per_micro_batch": 56}, recompute="full"),
    Case("shared prefixes", 1, {SHARE: True}),
    Case("shared prefixes, unpacked", 1, {SHARE: True, "max_tokens_per_micro_batch": 64}),
    Case("shared prefixes, recompute", 1, {SHARE: True}, recompute="full"),
    Case("tp2", 2, {TP: 2}),
    Case("tp2 sp", 2, {TP: 2, SP: True}),
    Case("pp2", 2, {PP: 2}),
    Case("pp2 vpp2", 2, {PP: 2, VPP: 2, "overlap_p2p_comm": True}),
    Case("cp2", 2, {CP: 2}),
    Case("cp2, dynamic", 2, {CP: 2, **DYNAMIC}),
    Case("dp2", 2),
    Case("dp2, plain optimizer", 2, {"use_distributed_optimizer": False}),
    Case("ep2", 2, {EP: 2}),
    Case("ep2 tp2", 2, {EP: 2, TP: 2, SP: True, ETP: 1}),
    Case("tp2 sp etp1", 2, {TP: 2, SP: True, ETP: 1}),
    Case("tp2 sp, shared prefixes", 2, {TP: 2, SP: True, SHARE: True}),
    Case("pp2, shared prefixes", 2, {PP: 2, SHARE: True}),
    Case("dp2, shared prefixes", 2, {SHARE: True}),
    Case("ep2 tp2, shared prefixes", 2, {EP: 2, TP: 2, SP: True, ETP: 1, SHARE: True}),
    Case("pp4 vpp2", 4, {PP: 4, VPP: 2}),
    Case("tp2 sp cp2", 4, {TP: 2, SP: True, CP: 2}),
    Case("tp2 sp pp2", 4, {TP: 2, SP: True, PP: 2}),
    Case("pp2 cp2", 4, {PP: 2, CP: 2}),
    Case("cp4, dynamic", 4, {CP: 4, **DYNAMIC}),
    Case("pp2 cp2, dynamic", 4, {PP: 2, CP: 2, **DYNAMIC}),
    Case("tp4", 4, {TP: 4}),
    Case("ep2 etp2 dp2", 4, {EP: 2, TP: 2, SP: True, ETP: 2}),
    Case("ep4", 4, {EP: 4}),
    Case("ep2 pp2", 4, {EP: 2, PP: 2}),
    Case("pp4 vpp2, shared prefixes", 4, {PP: 4, VPP: 2, SHARE: True}),
    Case("ep2 pp2, shared prefixes", 4, {EP: 2, PP: 2, SHARE: True}),
)
FEW = ("one process", "unpacked, recompute", "shared prefixes", "tp2 sp", "pp2", "cp2", "ep2 tp2")
"""At most two processes: each kind of parallelism once."""
NAMED = tuple(case.name for case in _NAMED if case.name != "unpacked, recompute")


def process_groups(case: Case) -> str:
    """The same for cases that share process groups, which cost more to make than a case does."""
    return str(sorted((key, size) for key, size in case.settings.items() if key in _KINDS))


def cases(architecture: Architecture, names: tuple[str, ...] | None = NAMED) -> list[Case]:
    """The cases of these names, or (None) all that have one, and every product of the kinds of parallelism on up to 4
    processes."""
    chosen = _products() if names is None else (case for case in _NAMED if case.name in names)
    return [_judged(case, architecture) for case in chosen]


def learner_config(case: Case) -> LearnerConfig:
    """The section ``learner`` of a case.

    Raises:
        ConfigError, LayoutError: the sizes do not fit one another.
    """
    budget = {"max_tokens_per_micro_batch": 112, "log_prob_chunk_tokens": 19}
    recompute = {} if case.recompute is None else {"recompute": RecomputeConfig(granularity=case.recompute)}
    return LearnerConfig(world_size=case.world, dtype="float32", **(budget | case.settings | recompute))


def _judged(case: Case, architecture: Architecture) -> Case:
    reason = ""
    if architecture.linear_bias and TP in case.settings:
        case = replace(case, settings={ETP: 1, **case.settings})
    if {EP, ETP} & case.settings.keys() and not architecture.is_moe:
        reason = "no experts"
    elif SHARE in case.settings and architecture.attention_sinks:
        reason = "prefixes are not shared under attention sinks"
    elif SHARE in case.settings and architecture.sliding_window is not None:
        reason = "prefixes are not shared under a sliding window"
    elif SHARE in case.settings and architecture.indexer is not None:
        reason = "prefixes are not shared under sparse attention"
    elif SHARE in case.settings and architecture.linear_layers:
        reason = "prefixes are not shared in layers with a state"
    else:
        try:
            learner_config(case).layout(architecture)
        except (ConfigError, LayoutError) as error:
            reason = str(error)
    return replace(case, inapplicable=reason)


_KINDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    TP: ("tp", (1, 2, 4)),
    SP: ("sp", (False, True)),
    PP: ("pp", (1, 2, 4)),
    VPP: ("vpp", (None, 2)),
    CP: ("cp", (1, 2, 4)),
    EP: ("ep", (1, 2, 4)),
    ETP: ("etp", (None, 1)),
}
"""Of each kind of parallelism: its word in a name, and its sizes. The first is the learner's default."""


def _products() -> Iterator[Case]:
    yield from _NAMED
    named = [(case.world, case.settings) for case in _NAMED]
    for values in itertools.product(*(sizes for _, sizes in _KINDS.values())):
        settings = dict(zip(_KINDS, values, strict=True))
        kept = {key: value for key, value in settings.items() if value != _KINDS[key][1][0]}
        ranks = settings[TP] * settings[PP] * settings[CP]
        experts = (settings[ETP] or settings[TP]) * settings[EP] * settings[PP]
        world = max(ranks, experts)
        needless = settings[TP] == 1 and (SP in kept or ETP in kept) or VPP in kept and settings[PP] != 4
        fits = world <= MAX_PROCESSES and not world % ranks and not world % experts
        if kept and fits and not needless and (world, kept) not in named:
            yield Case(_name(kept), world, kept)


def _name(settings: dict[str, Any]) -> str:
    words = [_KINDS[key][0] + ("" if value is True else str(value)) for key, value in settings.items()]
    return " ".join(words)
