"""Which tokens do engine and learner disagree on: by rollout probability, by turn, by tool calls?

`python -m experiments.mismatch.where_it_lives`

One run without correction for each source of mismatch; the pictures are in each run's report/.
"""

import sys

from experiments.mismatch.arms import NO_CORRECTION, REAL_MISMATCH, Arm, Experiment
from experiments.mismatch.experiment import main

EXPERIMENT = Experiment(
    name="where_it_lives",
    title="Where mismatch lives",
    common=NO_CORRECTION,
    seeds=(0,),
    arms=(
        Arm("bfloat16", ("rollout.engine.dtype=bfloat16",)),
        Arm("bfloat16_fp8_weights", REAL_MISMATCH, quick=True),
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
