"""The reward function and what shapes its scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_retool.config.base import at_least_one, check_named, not_negative, number, positive

LENGTH_PENALTIES = ("none", "soft_punish", "piecewise")


@dataclass(frozen=True)
class OverlongConfig:
    mode: str = "none"
    """What long responses lose: none: nothing, soft_punish: DAPO's linear penalty within buffer_length of the limit,
    piecewise: that of pieces, or what a function of one's own says: path/to/file.py:function or
    package.module:function."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a function of one's own."""
    buffer_length: int = at_least_one(4096)
    """soft_punish: tokens below data.max_response_length from which on the penalty grows."""
    penalty: float = not_negative(1.0)
    """soft_punish: what a response at the limit loses."""
    pieces: list[str] = field(default_factory=lambda: ["8000 0.01", "12000 0.05"])
    """piecewise: "<from tokens> <penalty per further 1000 tokens>" in ascending order."""
    filter: bool = False
    """Overlong filtering: truncated responses give no loss."""


@dataclass(frozen=True)
class RewardConfig:
    function: str = "math"
    """"math", "by_data_source" (the grader that verl takes for a row's data_source), "deep_research" (ARPO's tags),
    "deep_research_hermes", "reasoning_gym", or path/to/file.py:function or package.module:function."""
    function_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call (verl's reward_kwargs)."""
    processes: int = at_least_one(2, maximum=4096)
    """Processes that score in parallel; the function runs in them where it is not built in."""
    timeout_seconds: float = positive(30.0)
    """For one response; then the process is killed and replaced."""
    memory_limit_mb: int = at_least_one(4096)
    """Address space of each reward process."""
    failure_score: float = number(-1.0)
    """Score of a response whose function timed out, raised, ran out of memory or returned no number."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """What is taken off the score of long responses."""

    def check(self) -> None:
        """Raise ConfigError where ``overlong.mode`` names no penalty."""
        check_named("reward.overlong.mode", self.overlong.mode, LENGTH_PENALTIES)
