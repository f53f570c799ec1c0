"""What each part of DAPO does to entropy and accuracy.

`python -m experiments.mismatch.dapo_ablation`

Float32 on both sides: only the algorithm differs.
"""

import sys

from experiments.mismatch.arms import Arm, Experiment
from experiments.mismatch.experiment import main

EXPERIMENT = Experiment(
    name="dapo_ablation",
    title="DAPO, part by part",
    arms=(
        Arm("dapo", ()),
        Arm("without_clip_higher", ("algorithm.clip_ratio_high=0.2",)),
        Arm("without_dynamic_sampling", ("algorithm.dynamic_sampling.enable=false",)),
        Arm("without_token_level_loss", ("algorithm.loss_aggregation=seq-mean-token-mean",)),
        Arm(
            "with_overlong_punishment",
            ("reward.overlong.mode=soft_punish", "reward.overlong.buffer_length=40", "reward.overlong.penalty=1.0"),
            quick=True,
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
