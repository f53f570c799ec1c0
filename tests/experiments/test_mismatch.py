"""The experiments' definitions: what each arm sets. What becomes of their runs is in test_runs."""

import functools

import pytest

from experiments.mismatch import (
    collapse_and_cure,
    collapse_search,
    collapse_search_dense,
    dapo_ablation,
    ppo_and_arpo,
    top_p,
    where_it_lives,
)
from experiments.mismatch.arms import CONFIG
from experiments.mismatch.experiment import QUICK
from megatron_retool.algorithms.rejection_rules import parse_rejection_rules
from megatron_retool.config import load_config
from megatron_retool.config.tree import walk

MODULES = (
    collapse_and_cure, collapse_search, collapse_search_dense, where_it_lives, top_p, dapo_ablation, ppo_and_arpo,
)  # fmt: skip
EXPERIMENTS = [module.EXPERIMENT for module in MODULES]


@functools.cache
def load(experiment, arm):
    return load_config(experiment.config, [*experiment.common, *arm.overrides])


@pytest.mark.parametrize("chosen", EXPERIMENTS, ids=lambda e: e.name)
def test_arms_are_valid_and_differ(chosen):
    known = [arm.name for arm in chosen.arms]
    assert len(set(known)) == len(known)
    runs = [(arm.starts_from, load(chosen, arm)) for arm in chosen.arms]
    assert all(a != b for i, a in enumerate(runs) for b in runs[:i])
    for place, arm in enumerate(chosen.arms):
        assert arm.against in (None, *known) and arm.starts_from in (None, *known[:place])
    quick = [arm for arm in chosen.arms if arm.quick]
    assert quick
    for arm in quick:
        load_config(chosen.config, [*chosen.common, *arm.overrides, *QUICK])


def test_the_cures_are_those_of_the_literature():
    arms = {arm.name: arm for arm in collapse_and_cure.EXPERIMENT.arms}
    corrections = {name: load_config(CONFIG, arm.overrides).algorithm.rollout_correction for name, arm in arms.items()}
    uncorrected = corrections["uncorrected"]
    assert (uncorrected.mode, uncorrected.rejection, uncorrected.veto_threshold) == ("none", [], None)
    mis = corrections["sequence_mis"]
    assert (mis.level, mis.mode, mis.lower, mis.upper) == ("sequence", "mask", 0.5, 2.0)
    geometric = corrections["geometric_mis"]
    (rule,) = parse_rejection_rules(geometric.rejection)
    assert rule.name == "geometric_ratio" and geometric.veto_threshold == 1e-4 and geometric.mode == "truncate"
    for name, arm in arms.items():
        config = load_config(CONFIG, arm.overrides)
        mismatched = (config.rollout.engine.dtype, config.weight_sync.round_to)
        assert mismatched == (("float32", None) if name == "same_numbers" else ("bfloat16", "fp8"))


def test_branching_is_the_papers():
    """arXiv:2507.19849: alpha 0.5, beta 0.2, threshold 0.5, beam 2, half of the group to begin with."""
    arms = {arm.name: arm for arm in ppo_and_arpo.EXPERIMENT.arms}
    for name in ("arpo_soft", "arpo_hard"):
        rollout = load_config(ppo_and_arpo.EXPERIMENT.config, arms[name].overrides).rollout
        branching = rollout.branching
        assert (branching.branch_probability, branching.entropy_weight, branching.threshold) == (0.5, 0.2, 0.5)
        assert branching.timing == "after_tool_result" and branching.beam_size == 2
        assert 2 * branching.initial_rollouts == rollout.train.n
        assert rollout.multi_turn.tools == ["code_interpreter", "search"]


C = "algorithm.rollout_correction."
TOKEN_TIS = {C + "mode": "truncate"}
GEOMETRIC_MIS = {C + "rejection": ["geometric_ratio 0.95 1.05"], C + "veto_threshold": 1e-4}
MASK = {C + "mode": "mask", C + "lower": 0.5}
REPLAY = {"learner.routing_replay": "rollout"}
BFLOAT16 = {"rollout.engine.dtype": "bfloat16"}
ROUND, LENGTH = "weight_sync.round_to", {"data.max_response_length": 320}
CALLS, TURNS = "rollout.multi_turn.max_tool_calls", "rollout.multi_turn.max_assistant_turns"
ENGINE = "rollout.engine.extra_args"
FP32_HEAD = {"learner.fp32_lm_head": True, ENGINE: ["--enable-fp32-lm-head"]}

CURES = {
    "token_tis": TOKEN_TIS,
    "sequence_tis": {**TOKEN_TIS, C + "level": "sequence"},
    "token_mis": MASK,
    "sequence_mis": {**MASK, C + "level": "sequence"},
    "geometric_mis": GEOMETRIC_MIS,
    "geometric_mis_token_tis": {**GEOMETRIC_MIS, **TOKEN_TIS},
    "replay": REPLAY,
    "replay_old_log_probs": {"learner.routing_replay": "old_log_probs"},
    "replay_token_tis": {**REPLAY, **TOKEN_TIS},
    "replay_geometric_mis": {**REPLAY, **GEOMETRIC_MIS},
    "dual_clip": {"algorithm.dual_clip": 3.0},
}
WHAT_AN_ARM_IS_ABOUT = {
    "bfloat16": ("float32", BFLOAT16),
    "fp8": ("float32", {**BFLOAT16, ROUND: "fp8"}),
    "int4": ("float32", {**BFLOAT16, ROUND: "int4"}),
    "int3": ("float32", {**BFLOAT16, ROUND: "int3"}),
    **{f"{engine}_{name}": (engine, cure) for engine in ("int4", "int3") for name, cure in CURES.items()},
    "int3_batch_filter": ("int3", {C + "batch_k3_limit": 0.02}),
    "int3_on_policy": ("int3", {"learner.mini_batch_size": 128}),
    "int3_off_policy": ("int3", {"learner.mini_batch_size": 32}),
    "float32_off_policy": ("float32", {"learner.mini_batch_size": 32}),
    "int3_fp32_head": ("int3", FP32_HEAD),
    "bfloat16_learner": ("bfloat16", {"learner.dtype": "bfloat16"}),
    "bfloat16_learner_fp32_head": ("bfloat16_learner", FP32_HEAD),
    "exact": ("bfloat16_learner", {"learner.match_engine": "exact"}),
    "int3_chunked_prefill_off": ("int3", {ENGINE: ["--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"]}),
    "int3_radix_cache_off": ("int3", {ENGINE: ["--disable-radix-cache"]}),
    "int3_top_p": ("int3", {"rollout.train.top_p": 0.999}),
    "int3_tool_limit_1": ("int3", {**LENGTH, CALLS: 1, TURNS: 2}),
    "int3_tool_limit_5": ("int3_tool_limit_1", {CALLS: 5, TURNS: 6}),
    "int3_then_token_tis": ("int3", TOKEN_TIS),
    "int3_then_geometric_mis": ("int3", GEOMETRIC_MIS),
    "int3_then_float32": ("int3", {"rollout.engine.dtype": "float32", ROUND: None}),
}


@pytest.mark.parametrize("chosen", [collapse_search.EXPERIMENT, collapse_search_dense.EXPERIMENT], ids=lambda e: e.name)
def test_an_arm_of_the_search_differs_only_where_it_says(chosen):
    def settings(arm):
        return {key: value for key, _, value in walk(load(chosen, arm)) if not hasattr(value, "__dataclass_fields__")}

    arms = {arm.name: arm for arm in chosen.arms}
    of = {name: settings(arm) for name, arm in arms.items()}
    control = of["float32"]
    assert control["rollout.engine.dtype"] == control["learner.dtype"] == "float32" and control[ROUND] is None
    assert (control[C + "mode"], control[C + "rejection"], control[C + "veto_threshold"]) == ("none", [], None)
    assert (control[C + "level"], control[C + "lower"], control[C + "upper"]) == ("token", 0.0, 2.0)
    differences = {
        name: (arm.against, {key: value for key, value in of[name].items() if value != of[arm.against][key]})
        for name, arm in arms.items()
        if name != "float32"
    }
    dense = chosen is collapse_search_dense.EXPERIMENT
    assert differences == {name: d for name, d in WHAT_AN_ARM_IS_ABOUT.items() if not (dense and "replay" in name)}
    assert {name for name, arm in arms.items() if arm.starts_from} == {name for name in arms if "then" in name}
