"""What rollout counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RolloutStatistics:
    """Counts since the manager was made, under the names they have as metrics (rollout/…).

    Requests and tokens are those of training streams: validation may run at the same time.
    """

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    engine_failures: int = 0
    engines_lost: int = 0
    resumed_trajectories: int = 0
    paused_trajectories: int = 0
    dropped_trajectories: int = 0
    forked_trajectories: int = 0
    failed_trajectories: int = 0
    """Ended by an error of the agent."""
