"""What a step has to do: how many responses, how long they are, how often they call tools and how long those take.

The distribution of response lengths decides the step time more than the mean does, so it is fitted to the two figures
that every run logs: response_length/mean and response_length/clip_ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from megatron_retool.config import Config, ConfigError

FloatArray = npt.NDArray[np.float64]

_NORMAL = NormalDist()
MAX_SIGMA = 5.0
"""Of ln X: beyond it half of all responses would be a few tokens long."""


@dataclass(frozen=True)
class LengthDistribution:
    """Response lengths min(X, limit) with ln X ~ N(mu, sigma^2): a long tail, and an atom at the limit.

    Attributes:
        limit: data.max_response_length, tokens.
        correlation: share of the variance of ln X that the responses of one prompt have in common. Hard prompts have
            long answers; the share is an assumption (no published run states it).
    """

    mu: float
    sigma: float
    limit: int
    correlation: float = 0.5

    @classmethod
    def fit(cls, mean: float, clip_ratio: float, limit: int, correlation: float = 0.5) -> LengthDistribution:
        """The distribution with this mean of the clipped lengths and this share of responses at the limit.

        P(X >= limit) = clip_ratio fixes mu = ln limit - z sigma with z = Phi^-1(1 - clip_ratio);
        E min(X, limit) = exp(mu + sigma^2/2) Phi(z - sigma) + limit clip_ratio then falls in sigma, and bisection
        finds the one that gives ``mean``.

        Raises:
            ConfigError: no such distribution exists (the mean is not below the limit, or the clipped responses alone
                come close to it).
        """
        if not 0 < clip_ratio < 0.5:
            raise ConfigError(f"a clip ratio of {clip_ratio:g} is not between 0 and 0.5: change --clip-ratio")
        if not clip_ratio * limit < mean < limit:
            raise ConfigError(
                f"a mean response of {mean:g} tokens with {clip_ratio:.2%} of all at the limit of {limit} is "
                "impossible: change --response-mean or --clip-ratio"
            )
        z = _NORMAL.inv_cdf(1 - clip_ratio)
        low, high = 1e-6, z
        low, high = 1e-6, MAX_SIGMA
        if _clipped_mean(math.log(limit) - z * high, high, limit) > mean:
            raise ConfigError(
                f"no log-normal tail has {clip_ratio:.2%} of all responses at the limit of {limit} and a mean of only "
                f"{mean:g} tokens: change --response-mean or --clip-ratio"
            )
        for _ in range(100):
            sigma = (low + high) / 2
            if _clipped_mean(math.log(limit) - z * sigma, sigma, limit) > mean:
                low = sigma
            else:
                high = sigma
        return cls(math.log(limit) - z * sigma, sigma, limit, correlation)

    @cached_property
    def mean(self) -> float:
        """Mean length in tokens, with the limit applied."""
        return _clipped_mean(self.mu, self.sigma, self.limit)

    @cached_property
    def mean_square(self) -> float:
        """E min(X, limit)^2, which attention's share of the FLOPs depends on."""
        z = (math.log(self.limit) - self.mu) / self.sigma
        inside = math.exp(2 * self.mu + 2 * self.sigma**2) * _NORMAL.cdf(z - 2 * self.sigma)
        return inside + self.limit**2 * (1 - _NORMAL.cdf(z))

    @property
    def clip_ratio(self) -> float:
        """Share of responses that reach the limit."""
        return 1 - _NORMAL.cdf((math.log(self.limit) - self.mu) / self.sigma)

    def quantiles(self, count: int) -> FloatArray:
        """float64 [count], ascending: the expected batch, one length for each of ``count`` slices of probability."""
        return self._clip(np.exp(self.mu + self.sigma * _normal_quantiles(count)))

    def sample(self, rng: np.random.Generator, groups: int, size: int) -> FloatArray:
        """float64 [groups, size] lengths, correlated within a group."""
        return self._clip(np.exp(self.mu + self.sigma * self._normal(rng, groups, size)))

    def _normal(self, rng: np.random.Generator, groups: int, size: int) -> FloatArray:
        shared = rng.standard_normal((groups, 1))
        own = rng.standard_normal((groups, size))
        return math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * own

    def expected(self, rng: np.random.Generator, groups: int, size: int) -> FloatArray:
        """float64 [groups, size]: the lengths of ``quantiles``, dealt to groups that are as alike as a ``sample``'s."""
        lengths = self.quantiles(groups * size)
        if self.correlation == 0:
            return rng.permutation(lengths).reshape(groups, size)
        dealt = np.empty_like(lengths)
        dealt[np.argsort(self._normal(rng, groups, size), axis=None)] = lengths
        return dealt.reshape(groups, size)

    def _clip(self, lengths: FloatArray) -> FloatArray:
        return np.clip(np.rint(lengths), 1, self.limit)


@lru_cache(maxsize=64)
def _normal_quantiles(count: int) -> FloatArray:
    return np.array([_NORMAL.inv_cdf((index + 0.5) / count) for index in range(count)])


def _clipped_mean(mu: float, sigma: float, limit: int) -> float:
    z = (math.log(limit) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + limit * (1 - _NORMAL.cdf(z))


@dataclass(frozen=True)
class ToolLatency:
    """Seconds that a sandbox worker is busy with one call: log-normal, cut at the sandbox's own time limit."""

    median: float = 0.3
    mean: float = 0.5
    limit: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.mean:
            raise ConfigError(f"tool latency: the median {self.median} s must lie between 0 and the mean {self.mean} s")

    def sample(self, rng: np.random.Generator, count: int) -> FloatArray:
        """float64 [count] seconds."""
        sigma = math.sqrt(2 * math.log(self.mean / self.median))
        return np.minimum(self.median * np.exp(sigma * rng.standard_normal(count)), self.limit)


@dataclass(frozen=True)
class Workload:
    """One step's rollout.

    Attributes:
        groups: prompts trained on in a step.
        group_size: responses to each.
        mini_batch_size: responses in one optimizer step.
        prompt_tokens: mean length of a prompt, template included.
        lengths: of responses, tool results included.
        tool_calls: mean calls of a response.
        tool_result_tokens: mean tokens of a tool result; the policy samples the rest of the response.
        sandbox_workers: calls that run at one time.
        kept_groups: share of groups that dynamic sampling keeps; the others are generated again.
    """

    groups: int
    group_size: int
    mini_batch_size: int
    prompt_tokens: float
    lengths: LengthDistribution
    tool_calls: float = 2.9
    tool_result_tokens: float = 100.0
    tool_latency: ToolLatency = ToolLatency()
    sandbox_workers: int = 128
    kept_groups: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.kept_groups <= 1:
            raise ConfigError(
                f"the share of kept groups is {self.kept_groups}, which is not in (0, 1]: change --kept-groups"
            )

    @property
    def responses(self) -> int:
        """Responses trained on in a step."""
        return self.groups * self.group_size

    @property
    def mean_length(self) -> float:
        """Prompt and response."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def trained_tokens(self) -> float:
        """Prompt and response tokens that the learner sees in a step: perf/total_num_tokens."""
        return self.responses * self.mean_length

    @property
    def expected_context(self) -> float:
        """Mean context of a response that is being generated at a random moment.

        Long responses are in flight for longer, so the length is size-biased: E[L^2] / (2 E[L]) on top of the prompt.
        """
        return self.prompt_tokens + self.lengths.mean_square / (2 * self.lengths.mean)

    def total_lengths(self, count: int) -> FloatArray:
        """float64 [count]: the expected lengths of prompt and response together, ascending."""
        return self.lengths.quantiles(count) + self.prompt_tokens

    def scaled(self, factor: float) -> Workload:
        """The same mix with ``factor`` times the prompts and mini-batches of ``factor`` times the size."""
        return replace(
            self,
            groups=max(1, round(self.groups * factor)),
            mini_batch_size=max(1, round(self.mini_batch_size * factor)),
        )


REFERENCE_MEAN = 2707 / 16384
"""Mean response of tests/planning/published_run.py as a share of its limit: the default for an unmeasured run."""
REFERENCE_CLIP_RATIO = 0.0085
REFERENCE_PROMPT_TOKENS = 332.0
REFERENCE_TOOL_CALLS = 2.91


def workload_of(
    config: Config,
    *,
    response_mean: float | None = None,
    clip_ratio: float | None = None,
    prompt_tokens: float | None = None,
    tool_calls: float | None = None,
    tool_seconds: float | None = None,
    kept_groups: float | None = None,
) -> Workload:
    """The workload of a configuration; what is not given is taken from the published run, scaled to the limits.

    Raises:
        ConfigError: the figures contradict one another or the limits.
    """
    limit = config.data.max_response_length
    turns = config.rollout.multi_turn
    sandbox = config.tools.code_interpreter
    mean_seconds = 0.5 if tool_seconds is None else tool_seconds
    calls = min(REFERENCE_TOOL_CALLS, turns.max_tool_calls) if tool_calls is None else tool_calls
    mean = REFERENCE_MEAN * limit if response_mean is None else response_mean
    # A call costs some tokens to write; what the results leave is sampled.
    result_tokens = min(100.0, float(turns.max_tool_response_tokens), 0.25 * mean / max(calls, 1.0))
    return Workload(
        groups=config.data.train_batch_size,
        group_size=config.rollout.train.n,
        mini_batch_size=config.learner.mini_batch_size,
        prompt_tokens=min(REFERENCE_PROMPT_TOKENS, 0.6 * config.data.max_prompt_length)
        if prompt_tokens is None
        else prompt_tokens,
        lengths=LengthDistribution.fit(mean, REFERENCE_CLIP_RATIO if clip_ratio is None else clip_ratio, limit),
        tool_calls=calls,
        tool_result_tokens=result_tokens,
        tool_latency=ToolLatency(0.6 * mean_seconds, mean_seconds, sandbox.run_timeout_seconds),
        sandbox_workers=sandbox.workers * (len(sandbox.urls) or config.cluster.nodes),
        kept_groups=1.0 if kept_groups is None else kept_groups,
    )
