"""The phases of a run, named once: for timers, watchdog and metrics (timing_s/<phase>), planner and report."""

from __future__ import annotations

from enum import StrEnum

TIMING_PREFIX = "timing_s/"
VALIDATION_PREFIXES = ("val-core/", "val-aux/", "val-quick/")
"""Of the metrics that only validations have."""


class Phase(StrEnum):
    """A phase of a step, between steps, or of the start. Members compare equal to their names in metrics."""

    STEP = "step"
    """All of a step up to the weight sync, which the following phases are parts of."""
    GENERATION = "gen"
    REWARD = "reward"
    PHASE_SWITCH = "phase_switch"
    """Colocated: engines release their memory, and learner and critic come back from host memory."""
    OLD_LOG_PROB = "old_log_prob"
    REFERENCE = "ref"
    VALUES = "values"
    ADVANTAGE = "adv"
    UPDATE_ACTOR = "update_actor"
    UPDATE_CRITIC = "update_critic"
    WEIGHT_SYNC = "weight_sync"
    """Colocated: also learner and critic leaving for host memory, before the next generation."""

    VALIDATION = "testing"
    QUICK_VALIDATION = "testing_quick"
    SAVE_CHECKPOINT = "save_checkpoint"
    RESTORE = "restore"

    START = "start"
    START_ENGINES = "start_engines"
    START_LEARNER = "start_learner"
    START_ENGINE_AGAIN = "start_engine_again"
    ENGINES_LEAVE = "engines_leave"

    @property
    def metric(self) -> str:
        """The phase's seconds in a row of metrics."""
        return TIMING_PREFIX + self.value
