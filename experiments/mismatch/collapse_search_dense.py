"""The collapse search with the demo's dense model: all arms but those that replay a router's choices.

`python -m experiments.mismatch.collapse_search_dense --base runs/demo --seeds 1 2 3`
"""

import sys
from dataclasses import replace

from experiments.mismatch import collapse_search
from experiments.mismatch.arms import CONFIG
from experiments.mismatch.experiment import main

EXPERIMENT = replace(
    collapse_search.EXPERIMENT,
    name="collapse_search_dense",
    title="Collapse and cure with an INT4 or INT3 engine, dense model",
    config=CONFIG,
    arms=tuple(
        arm
        for arm in collapse_search.EXPERIMENT.arms
        if not any(override.startswith("learner.routing_replay=") for override in arm.overrides)
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
