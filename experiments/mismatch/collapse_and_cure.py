"""Does a real mismatch degrade training at a high learning rate, and which correction helps?

`python -m experiments.mismatch.collapse_and_cure`

The engine computes in bfloat16 with weights rounded to FP8 at every sync, the learner in float32. Every arm has the
same learning rate, ten times the demo's: with three times, nothing went wrong in 100 steps. "same_numbers" is the
control: float32 on both sides.
"""

import sys

from experiments.mismatch.arms import (
    NO_CORRECTION,
    REAL_MISMATCH,
    SEQUENCE_MIS,
    SEQUENCE_TIS,
    TOKEN_TIS,
    Arm,
    Experiment,
    rejection,
)
from experiments.mismatch.experiment import main

EXPERIMENT = Experiment(
    name="collapse_and_cure",
    title="Collapse and cure",
    common=(
        "learner.optimizer.lr=1.0e-3",
        # Every step generates the same number of responses, so that arms differ in nothing but the correction.
        "algorithm.dynamic_sampling.enable=false",
    ),
    steps=60,
    arms=(
        Arm("same_numbers", NO_CORRECTION),
        Arm("uncorrected", (*REAL_MISMATCH, *NO_CORRECTION), quick=True),
        Arm("token_tis", (*REAL_MISMATCH, *NO_CORRECTION, *TOKEN_TIS)),
        Arm("sequence_tis", (*REAL_MISMATCH, *NO_CORRECTION, *SEQUENCE_TIS)),
        Arm("sequence_mis", (*REAL_MISMATCH, *NO_CORRECTION, *SEQUENCE_MIS)),
        Arm(
            "geometric_mis",
            (
                *REAL_MISMATCH,
                *NO_CORRECTION,
                *TOKEN_TIS,
                *rejection("geometric_ratio 0.99 1.01", veto=1e-4),
            ),
            quick=True,
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
