"""A mixture of experts whose engine holds INT4 or INT3 weights: what does that do to a run, and what cures it?

`python -m experiments.mismatch.collapse_search --base runs/demo_moe --seeds 1 2 3`

The learner computes in float32, the engine in bfloat16 with weights rounded at every sync. INT3 breaks the run, so most
arms are about it. The learning rate is three times the demo's: the control, float32 on both sides, has to stay
healthy at it. What a rounded engine answers hides what became of the weights, so that at the end of every run its own
weights answer the held-out problems in a float32 engine.
"""

import sys

from experiments.mismatch.arms import (
    CORRECTION,
    MOE_CONFIG,
    NO_CORRECTION,
    SEQUENCE_MIS,
    SEQUENCE_TIS,
    TOKEN_MIS,
    TOKEN_TIS,
    Arm,
    Experiment,
    rejection,
)
from experiments.mismatch.experiment import main

FLOAT32 = ("rollout.engine.dtype=float32",)
BFLOAT16 = ("rollout.engine.dtype=bfloat16",)
INT4 = (*BFLOAT16, "weight_sync.round_to=int4")
INT3 = (*BFLOAT16, "weight_sync.round_to=int3")

# Of some fifty sampled tokens, one whose log-ratio is beyond 2.5 leaves these bounds, and what INT4 does to all of them
# stays within. [0.999, 1.001] is meant for thousands of tokens.
GEOMETRIC_MIS = rejection("geometric_ratio 0.95 1.05", veto=1e-4)

REPLAY = ("learner.routing_replay=rollout",)
FP32_HEAD = ("learner.fp32_lm_head=true", "rollout.engine.extra_args=[--enable-fp32-lm-head]")
BFLOAT16_LEARNER = (*BFLOAT16, "learner.dtype=bfloat16")
SMALL_MINI_BATCHES = ("learner.mini_batch_size=32",)
# Room for more calls than the demo's responses make; both arms have it, so that the limit alone differs.
LONG_RESPONSES = ("data.max_response_length=320",)
# Without chunks SGLang reserves so much for activations that its own guess of the weights' share falls below 0.
WHOLE_PREFILL = "rollout.engine.extra_args=[--chunked-prefill-size,'-1',--mem-fraction-static,'0.5']"


CURES = {
    "token_tis": TOKEN_TIS,
    "sequence_tis": SEQUENCE_TIS,
    "token_mis": TOKEN_MIS,
    "sequence_mis": SEQUENCE_MIS,
    "geometric_mis": GEOMETRIC_MIS,
    "geometric_mis_token_tis": (*GEOMETRIC_MIS, *TOKEN_TIS),
    "replay": REPLAY,
    "replay_old_log_probs": ("learner.routing_replay=old_log_probs",),
    "replay_token_tis": (*REPLAY, *TOKEN_TIS),
    "replay_geometric_mis": (*REPLAY, *GEOMETRIC_MIS),
    "dual_clip": ("algorithm.dual_clip=3.0",),
}


def int3(name: str, *overrides: str, against: str = "int3", starts_from: str | None = None, quick: bool = False) -> Arm:
    return Arm(f"int3_{name}", (*INT3, *overrides), quick=quick, against=against, starts_from=starts_from)


def cures(engine: str, overrides: tuple[str, ...]) -> tuple[Arm, ...]:
    """Corrections of what the arm ``engine`` has wrong, one at a time and together."""
    return tuple(Arm(f"{engine}_{name}", (*overrides, *cure), against=engine) for name, cure in CURES.items())


EXPERIMENT = Experiment(
    name="collapse_search",
    title="Collapse and cure with an INT4 or INT3 engine, mixture of experts",
    config=MOE_CONFIG,
    common=(
        *NO_CORRECTION,
        # The demo of experts replays and has a float32 output layer in its engine; here these are arms.
        "learner.routing_replay=none",
        "rollout.engine.extra_args=[]",
        "learner.optimizer.lr=3.0e-4",
        "learner.world_size=1",
        # Every step generates the same number of responses, so that arms differ in nothing but what they are about.
        "algorithm.dynamic_sampling.enable=false",
        # A run that collapsed has no group with different rewards, and is to show that to its end.
        "trainer.max_skipped_steps=0",
    ),
    steps=100,
    evaluate_in_float32=True,
    arms=(
        # What the engine computes with.
        Arm("float32", FLOAT32),
        Arm("bfloat16", BFLOAT16, against="float32"),
        Arm("fp8", (*BFLOAT16, "weight_sync.round_to=fp8"), against="float32"),
        Arm("int4", INT4, against="float32"),
        Arm("int3", INT3, quick=True, against="float32"),
        *cures("int4", INT4),
        *cures("int3", INT3),
        int3("batch_filter", f"{CORRECTION}batch_k3_limit=0.02"),
        # One, two (all others) and four updates a step.
        int3("on_policy", "learner.mini_batch_size=128"),
        int3("off_policy", *SMALL_MINI_BATCHES),
        Arm("float32_off_policy", (*FLOAT32, *SMALL_MINI_BATCHES), against="float32"),
        # The engine's own part in it.
        int3("fp32_head", *FP32_HEAD),
        Arm("bfloat16_learner", BFLOAT16_LEARNER, against="bfloat16"),
        Arm("exact", (*BFLOAT16_LEARNER, "learner.match_engine=exact"), against="bfloat16_learner"),
        Arm("bfloat16_learner_fp32_head", (*BFLOAT16_LEARNER, *FP32_HEAD), against="bfloat16_learner"),
        int3("chunked_prefill_off", WHOLE_PREFILL),
        int3("radix_cache_off", "rollout.engine.extra_args=[--disable-radix-cache]"),
        int3("top_p", "rollout.train.top_p=0.999"),
        # Five times as many calls, as 20 against 100 in long runs.
        int3(
            "tool_limit_1", *LONG_RESPONSES,
            "rollout.multi_turn.max_tool_calls=1", "rollout.multi_turn.max_assistant_turns=2",
        ),
        int3(
            "tool_limit_5", *LONG_RESPONSES,
            "rollout.multi_turn.max_tool_calls=5", "rollout.multi_turn.max_assistant_turns=6",
            against="int3_tool_limit_1",
        ),
        # A run that went on without correction until halfway, and from there with one.
        int3("then_token_tis", *TOKEN_TIS, starts_from="int3", quick=True),
        int3("then_geometric_mis", *GEOMETRIC_MIS, starts_from="int3"),
        Arm("int3_then_float32", FLOAT32, against="int3", starts_from="int3"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
