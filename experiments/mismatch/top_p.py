"""Does cutting the engine's low-probability tokens off (top_p below 1) help, with and without correction?

`python -m experiments.mismatch.top_p`

The learner trains the distribution that was sampled: it applies the same top_p to its own logits.
"""

import sys

from experiments.mismatch.arms import NO_CORRECTION, REAL_MISMATCH, Arm, Experiment
from experiments.mismatch.experiment import main

CORRECTIONS = {"corrected": (), "uncorrected": NO_CORRECTION}

EXPERIMENT = Experiment(
    name="top_p",
    title="Top-p with and without correction",
    common=(*REAL_MISMATCH, "algorithm.dynamic_sampling.enable=false"),
    arms=tuple(
        Arm(f"{top_p}_{name}", (f"rollout.train.top_p={top_p}", *overrides), quick=top_p < 0.99 and name == "corrected")
        for top_p in (1.0, 0.99, 0.98)
        for name, overrides in CORRECTIONS.items()
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
