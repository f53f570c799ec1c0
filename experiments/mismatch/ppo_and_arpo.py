"""PPO with a critic, and ARPO's branching at uncertain tool results, against DAPO, on the demo with two tools.

All arms get the same reward: +1 or -1 for the answer. ARPO's own (F1, -1 for a malformed response, +0.1 where both
tools were used) is `reward.function=deep_research_hermes`.

`python -m experiments.mismatch.ppo_and_arpo`
"""

import sys

from experiments.mismatch.arms import TWO_TOOLS_CONFIG, Arm, Experiment
from experiments.mismatch.experiment import main

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
    # Half of the group's 8, as the paper's 8 of 16; alpha, beta, threshold and k are the paper's.
    "rollout.branching.initial_rollouts=4",
)

EXPERIMENT = Experiment(
    name="ppo_and_arpo",
    title="PPO and ARPO against DAPO",
    arms=(
        Arm("dapo", ()),
        Arm("ppo", PPO, quick=True),
        Arm("arpo_soft", (*ARPO, "rollout.branching.advantage=soft")),
        Arm("arpo_hard", (*ARPO, "rollout.branching.advantage=hard"), quick=True),
    ),
    config=TWO_TOOLS_CONFIG,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
