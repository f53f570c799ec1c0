"""The reward function and what shapes its scores."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.config.base import ConfigError, at_least_one, check_named, not_negative, number, positive

LENGTH_PENALTIES = ("none", "soft_punish", "piecewise")


@dataclass(frozen=True)
class OverlongConfig:
    """What long responses lose."""

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
class JudgeConfig:
    """A chat model as the reward."""

    url: str = ""
    """The base of an OpenAI-compatible API, such as http://localhost:30000/v1 or https://api.openai.com/v1."""
    model: str = ""
    """The judge, as that API names it."""
    prompt: str = ""
    """File with the text that the judge is sent. In it {prompt}, {response} (tool results included), {answer} (the last
    turn) and {ground_truth} stand for the response's own."""
    api_key: str | None = None
    """Sent as a bearer token; take it from the environment: ${oc.env:JUDGE_API_KEY}."""
    verdict: str = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the verdict, in its last match: a number from lowest to highest, or yes,
    no, true, false, correct or incorrect."""
    lowest: float = number(0.0)
    """The worst verdict; its reward is -1."""
    highest: float = number(1.0)
    """The best verdict; its reward is 1. A response is correct (acc) from the middle on."""
    votes: int = at_least_one(1, maximum=64)
    """Replies for each response; their mean counts. Their spread is the metric reward/judge_disagreement."""
    grader: str = "none"
    """Another reward function (math, by_data_source, own) whose verdict is compared with the judge's: the metric
    reward/judge_against_grader is the share of responses that the two judge differently. none: none."""
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024})
    """Further fields of each request."""
    max_characters: int = at_least_one(60_000)
    """Longest prompt, response or answer that the judge is sent; the middle of a longer one is left out."""
    max_concurrent: int = at_least_one(32, maximum=4096)
    """Requests at a time."""
    requests_per_minute: int | None = at_least_one(None)
    """At most so many requests a minute, retries not counted; null: no limit."""
    retries: int = not_negative(6)
    """After the first attempt, for no connection, time-outs, too many requests and the server's own faults."""
    timeout_seconds: float = positive(120.0)
    """For one attempt."""
    cache: str | None = None
    """File (SQLite) that keeps the judge's replies over runs; null: a run asks the same only once."""
    prompt_price: float = not_negative(0.0)
    """Cost of a million prompt tokens, in a currency of your choice, for the metric reward/judge/cost."""
    completion_price: float = not_negative(0.0)
    """Cost of a million tokens that the judge writes."""


@dataclass(frozen=True)
class RewardConfig:
    """The reward function and what shapes its scores."""

    function: str = "math"
    """"math", "by_data_source" (the grader that verl takes for a row's data_source), "deep_research" (ARPO's tags),
    "deep_research_hermes", "reasoning_gym", "judge" (a chat model, see reward.judge), or path/to/file.py:function or
    package.module:function."""
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
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """reward.function=judge: who judges, how it is asked, and what its verdict is worth."""

    def check(self) -> None:
        """Raise ConfigError where ``overlong.mode`` names no penalty, or ``judge`` lacks or contradicts something."""
        check_named("reward.overlong.mode", self.overlong.mode, LENGTH_PENALTIES)
        if self.function == "judge":
            self._check_judge()

    def _check_judge(self) -> None:
        judge = self.judge
        for name in ("url", "model", "prompt"):
            if not getattr(judge, name):
                raise ConfigError(f"reward.judge.{name} is empty, which reward.function=judge needs: set it")
        if not judge.url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.judge.url={judge.url}: expected http://… or https://…")
        if judge.lowest >= judge.highest:
            raise ConfigError(f"reward.judge.lowest={judge.lowest} must lie below reward.judge.highest={judge.highest}")
        if judge.grader == "judge":
            raise ConfigError("reward.judge.grader=judge would ask the judge about itself: name another function")
        try:
            groups = re.compile(judge.verdict).groups
        except re.error as error:
            raise ConfigError(f"reward.judge.verdict={judge.verdict!r} is no regular expression: {error}") from None
        if groups < 1:
            raise ConfigError(f"reward.judge.verdict={judge.verdict!r} has no group: put the verdict in (…)")
