"""PPO with a critic, and ARPO's branching at uncertain tool results, against DAPO.

`python -m experiments.mismatch.ppo_and_arpo`
"""

import sys

from experiments.mismatch.experiment import Arm, Experiment, main

PPO = (
    "algorithm.advantage=gae",
    # A group without a difference in reward still tells a critic something.
    "algorithm.dynamic_sampling.enable=false",
    "algorithm.gae_lambda=1.0",
    "learner.critic.optimizer.lr=1.0e-3",
    "learner.critic.warmup_steps=5",
)
ARPO = (
    "rollout.branching.enable=true",
    "rollout.branching.initial_rollouts=4",
    # The demo's model is a little surer after a tool result than at the start (P = 0.49): a threshold of 0.5 on the
    # tokens after the result would hardly ever branch. This timing draws with probability P.
    "rollout.branching.timing=before_tool_result",
)

EXPERIMENT = Experiment(
    name="ppo_and_arpo",
    title="PPO and ARPO against DAPO",
    arms=(
        Arm("dapo", ()),
        Arm("ppo", PPO, quick=True),
        Arm("arpo_soft", (*ARPO, "rollout.branching.advantage=soft")),
        Arm("arpo_hard", (*ARPO, "rollout.branching.advantage=hard")),
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
