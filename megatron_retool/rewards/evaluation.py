"""Evaluation metrics over n samples per prompt: mean@n, best@k, worst@k, maj@k and pass@k, by data source.

For k in 2, 4, 8, ..., n the statistics are of k draws of a prompt's n samples with replacement: the best, the worst, or
the most frequent answer of them.  Best and worst are exact: with the samples sorted, the i-th of n is the best of k
with probability (i^k - (i-1)^k) / n^k.  The most frequent answer is estimated from many draws, of each prompt's own.
``/mean`` averages over draws and prompts; ``/std`` is the standard deviation over draws, averaged over prompts (as verl
reports it).  pass@k is the
unbiased estimator of arXiv:2107.03374, eq. 1, which draws without replacement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from answer_equality.score import canonical_answer
from megatron_retool.rewards.base import extra_values
from megatron_retool.trajectory import Trajectory

FloatArray = npt.NDArray[np.float64]
# Draws of one chunk of prompts: prompts x draws x k numbers at a time.
_CHUNK_ELEMENTS = 8_000_000


@dataclass(frozen=True)
class EvaluationRecord:
    """One sampled response. ``prompt`` tells prompts of a data source apart; ``prediction`` None gave no answer."""

    data_source: str
    prompt: Any
    accuracy: float
    reward: float
    prediction: str | None
    num_turns: int
    extras: Mapping[str, float] = field(default_factory=dict)
    """What else the reward function returned: ``extra_values``."""

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> EvaluationRecord:
        """What a scored trajectory says."""
        info = trajectory.reward_info
        prediction = info.get("pred")
        return cls(
            data_source=str(trajectory.extra_info.get("data_source", "unknown")),
            prompt=trajectory.group_id,
            accuracy=trajectory.accuracy,
            reward=float(trajectory.reward),
            prediction=None if prediction is None else str(prediction),
            num_turns=trajectory.num_turns,
            extras=extra_values(info),
        )


def evaluation_metrics(
    records: Sequence[Trajectory | EvaluationRecord], seed: int = 0, bootstrap_draws: int = 1000
) -> dict[str, float]:
    """Metrics under verl's names; the same records in any order and the same seed give the same numbers.

    * val-core/<data_source>/acc/: mean@n, std@n, best@k/{mean,std}, worst@k/{mean,std}, maj@k/{mean,std}, pass@k
    * val-aux/<data_source>/reward/: the same without maj and pass
    * val-aux/<data_source>/<name>/{mean@n,std@n} of what else the reward function returned, over samples that have it
    * val-aux/num_turns/{mean,max,min}

    n is the largest number of samples that a prompt has.  A prompt with fewer (lost to an abort) takes part with those
    it has, except in pass@k with a larger k.  maj@k votes on the canonical form of answers, so that 1/2 and 0.5 are one
    candidate; responses without an answer do not vote, tied answers share the vote, and a draw without any vote counts
    as wrong.  maj@k is left out where no response of a data source has a prediction.

    Raises:
        ValueError: a reward or accuracy is not finite.
    """
    rows = [
        record if isinstance(record, EvaluationRecord) else EvaluationRecord.from_trajectory(record)
        for record in records
    ]
    if not rows:
        return {}
    metrics: dict[str, float] = {}
    for source in sorted({row.data_source for row in rows}):
        samples = _SamplesByPrompt([row for row in rows if row.data_source == source])
        core, auxiliary = f"val-core/{source}/acc/", f"val-aux/{source}/reward/"
        metrics |= {core + name: value for name, value in _best_and_worst(samples, samples.accuracy).items()}
        metrics |= {auxiliary + name: value for name, value in _best_and_worst(samples, samples.reward).items()}
        metrics |= {core + name: value for name, value in _majority(samples, seed, bootstrap_draws).items()}
        metrics |= {core + name: value for name, value in _pass_at_k(samples).items()}
        metrics |= {f"val-aux/{source}/{name}": value for name, value in _extras(samples).items()}
    turns = np.array([row.num_turns for row in rows])
    metrics["val-aux/num_turns/mean"] = float(turns.mean())
    metrics["val-aux/num_turns/max"] = float(turns.max())
    metrics["val-aux/num_turns/min"] = float(turns.min())
    return metrics


def pass_at_k(num_samples: npt.ArrayLike, num_correct: npt.ArrayLike, k: int) -> FloatArray:
    """Probability that at least one of k samples, drawn without replacement, is correct: 1 - C(n-c, k) / C(n, k).

    Args:
        num_samples, num_correct: int [P]; every n must be at least k.

    Returns:
        float64 [P].
    """
    n = np.asarray(num_samples, dtype=np.float64)
    c = np.asarray(num_correct, dtype=np.float64)
    if np.any(n < k):
        raise ValueError(f"pass@{k} needs at least {k} samples of every prompt")
    # The quotient of binomials as a product of k factors, none of which overflows; a factor of 0 ends it at 0.
    factors = np.maximum(n - c - np.arange(k)[:, None], 0.0) / (n - np.arange(k)[:, None])
    return np.asarray(1.0 - factors.prod(axis=0), dtype=np.float64)


def sample_sizes(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n itself; empty for n = 1."""
    sizes = []
    k = 2
    while k < n:
        sizes.append(k)
        k *= 2
    return [*sizes, n] if n > 1 else []


class _SamplesByPrompt:
    """A data source's samples as [prompts, n] matrices, each row filled from the left."""

    def __init__(self, rows: Sequence[EvaluationRecord]) -> None:
        for row in rows:
            if not (np.isfinite(row.accuracy) and np.isfinite(row.reward)):
                raise ValueError(
                    f"{row.data_source}, prompt {row.prompt}: accuracy {row.accuracy} and reward {row.reward} must be "
                    "finite: score all responses first"
                )
        answers = [None if row.prediction is None else canonical_answer(row.prediction) for row in rows]
        # Sorting makes the result independent of the order in which responses finished.
        order = sorted(
            range(len(rows)),
            key=lambda i: (str(rows[i].prompt), rows[i].accuracy, rows[i].reward, answers[i] or ""),
        )
        prompts: dict[Any, list[int]] = {}
        for i in order:
            prompts.setdefault(rows[i].prompt, []).append(i)
        self.keys = [str(prompt) for prompt in prompts]
        self.counts = np.array([len(members) for members in prompts.values()])
        self.num_samples = int(self.counts.max())
        self.extras = [[rows[i].extras for i in members] for members in prompts.values()]
        shape = (len(prompts), self.num_samples)
        self.accuracy, self.reward = np.zeros(shape), np.zeros(shape)
        self.answers = np.full(shape, -1, dtype=np.int64)
        for place, members in enumerate(prompts.values()):
            candidates: dict[str, int] = {}
            for column, i in enumerate(members):
                self.accuracy[place, column] = rows[i].accuracy
                self.reward[place, column] = rows[i].reward
                answer = answers[i]
                if answer is not None:
                    self.answers[place, column] = candidates.setdefault(answer, len(candidates))

    def chunks(self, num_draws: int, width: int) -> list[slice]:
        size = max(1, _CHUNK_ELEMENTS // max(num_draws * width, 1))
        return [slice(start, start + size) for start in range(0, len(self.counts), size)]


def _best_and_worst(samples: _SamplesByPrompt, values: FloatArray) -> dict[str, float]:
    n = samples.num_samples
    present = np.arange(n) < samples.counts[:, None]
    means = np.where(present, values, 0.0).sum(1) / samples.counts
    metrics = {f"mean@{n}": float(means.mean())}
    if n > 1:
        deviations = np.where(present, values - means[:, None], 0.0)
        metrics[f"std@{n}"] = float(np.sqrt((deviations**2).sum(1) / samples.counts).mean())
    for k in sample_sizes(n):
        for name, sign in (("best", 1.0), ("worst", -1.0)):
            expected, spread = _of_extremes(sign * values, samples.counts, k)
            metrics[f"{name}@{k}/mean"] = float(sign * expected.mean())
            metrics[f"{name}@{k}/std"] = float(spread.mean())
    return metrics


def _of_extremes(values: FloatArray, counts: npt.NDArray[np.int64], k: int) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation [P] of the largest of k draws, with replacement, of each row's first ``counts``.

    Args:
        values: float64 [P, n], each row filled from the left.
    """
    place = np.arange(1, values.shape[1] + 1)
    # What is absent sorts behind everything and is never drawn.
    ordered = np.sort(np.where(place <= counts[:, None], values, np.inf), axis=1)
    ordered = np.where(place <= counts[:, None], ordered, 0.0)
    reached = np.minimum(place / counts[:, None], 1.0) ** k
    probability = np.diff(reached, axis=1, prepend=0.0)
    mean = (probability * ordered).sum(axis=1)
    variance = (probability * (ordered - mean[:, None]) ** 2).sum(axis=1)
    return mean, np.sqrt(variance)


def _drawn(values: FloatArray, counts: npt.NDArray[np.int64], draws: FloatArray) -> FloatArray:
    """values [P, n] at ``draws`` [P, B, k], uniform numbers that become an index below each prompt's count."""
    index = (draws * counts[:, None, None]).astype(np.int64)
    return np.take_along_axis(values[:, None, :], index, axis=2)


def _majority(samples: _SamplesByPrompt, seed: int, num_draws: int) -> dict[str, float]:
    if samples.num_samples < 2 or samples.answers.max() < 0:
        return {}
    candidates = np.arange(samples.answers.max() + 1)
    votes = samples.answers[:, :, None] == candidates
    support = votes.sum(1)
    accuracy = (votes * samples.accuracy[:, :, None]).sum(1) / np.maximum(support, 1)
    metrics: dict[str, float] = {}
    for k in sample_sizes(samples.num_samples):
        parts = []
        for chunk in samples.chunks(num_draws, k + len(candidates)):
            draws = np.stack([_draws_of(key, seed, num_draws, k) for key in samples.keys[chunk]])
            drawn = _drawn(samples.answers[chunk].astype(np.float64), samples.counts[chunk], draws).astype(int)
            prompts = len(drawn)
            # One histogram for all draws of all prompts; candidate 0 of the extended range collects "no answer".
            width = len(candidates) + 1
            cells = np.arange(prompts * num_draws)[:, None] * width + drawn.reshape(-1, k) + 1
            histogram = np.bincount(cells.ravel(), minlength=prompts * num_draws * width)
            tally = histogram.reshape(prompts, num_draws, width)[:, :, 1:]
            most = tally.max(axis=2, keepdims=True)
            winners = (tally == most) & (most > 0)
            share = winners / np.maximum(winners.sum(axis=2, keepdims=True), 1)
            parts.append((share * accuracy[chunk][:, None, :]).sum(axis=2))
        metrics |= _bootstrap_summary(f"maj@{k}", np.concatenate(parts))
    return metrics


def _draws_of(prompt: str, seed: int, num_draws: int, k: int) -> FloatArray:
    """Uniform numbers [B, k] of a prompt's own: errors of prompts that share their draws do not average out."""
    own = int.from_bytes(hashlib.sha256(f"{seed} {k} {prompt}".encode()).digest()[:8], "big")
    return np.random.default_rng(own).random((num_draws, k))


def _bootstrap_summary(name: str, statistics: FloatArray) -> dict[str, float]:
    """Mean and std of a statistic [P, B] over draws, averaged over prompts."""
    return {f"{name}/mean": float(statistics.mean()), f"{name}/std": float(statistics.std(axis=1).mean())}


def _extras(samples: _SamplesByPrompt) -> dict[str, float]:
    """Mean and std over a prompt's samples, averaged over prompts."""
    metrics: dict[str, float] = {}
    for name in sorted({name for prompt in samples.extras for extras in prompt for name in extras}):
        # Sorted: a sum of floats depends on its order, and samples of equal reward come in any.
        values = [sorted(extras[name] for extras in prompt if name in extras) for prompt in samples.extras]
        n = samples.num_samples
        metrics[f"{name}/mean@{n}"] = float(np.mean([np.mean(row) for row in values if row]))
        if n > 1:
            metrics[f"{name}/std@{n}"] = float(np.mean([np.std(row) for row in values if row]))
    return metrics


def _pass_at_k(samples: _SamplesByPrompt) -> dict[str, float]:
    correct = ((samples.accuracy >= 1.0) & (np.arange(samples.num_samples) < samples.counts[:, None])).sum(1)
    metrics = {}
    for k in [1, *sample_sizes(samples.num_samples)]:
        enough = samples.counts >= k
        metrics[f"pass@{k}"] = float(pass_at_k(samples.counts[enough], correct[enough], k).mean())
    return metrics
