"""Dynamic sampling: which groups carry a signal, and how many responses a prompt gets.

DAPO, arXiv:2503.14476, section 3.2: a group whose responses all earned the same has zero advantage everywhere, so it
is dropped and others take its place (``refill``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_retool.algorithms.stage_schedule import parse_stages, stage_value


@dataclass(frozen=True)
class GroupFilter:
    """What a filter pass found.

    kept_groups: group ids with a signal, in the order of their first response.
    all_correct, all_wrong: dropped groups whose members all had accuracy 1, or all 0. A group may be neither (equal
        rewards between the two), and then counts only in ``all_equal``.
    all_equal: all dropped groups.
    """

    kept_groups: list[int]
    all_correct: int
    all_wrong: int
    all_equal: int

    def metrics(self) -> dict[str, float]:
        """dynamic_sampling/* of this pass."""
        return {
            "dynamic_sampling/kept_groups": float(len(self.kept_groups)),
            "dynamic_sampling/generated_groups": float(len(self.kept_groups) + self.all_equal),
            "dynamic_sampling/all_correct": float(self.all_correct),
            "dynamic_sampling/all_wrong": float(self.all_wrong),
        }


def filter_groups(
    group_ids: Sequence[int] | npt.NDArray[np.integer],
    values: Sequence[float] | npt.NDArray[np.floating],
    accuracies: Sequence[float] | npt.NDArray[np.floating],
    tolerance: float = 1e-6,
) -> GroupFilter:
    """Drop groups whose ``values`` are all equal: nothing can be learnt from comparing them.

    Args:
        group_ids: int [N], any integers; members of a group need not lie together.
        values: float [N], the reward or the accuracy of each response (``dynamic_sampling.metric``).
        accuracies: float [N] in [0, 1], only for the counts; ``values`` again where the metric is acc.
        tolerance: largest difference inside a group that still counts as equal.

    Returns:
        GroupFilter; order is kept. A group of one is always dropped, an empty batch gives an empty result.

    Raises:
        ValueError: lengths differ, or a value is not finite.
    """
    ids = np.asarray(group_ids, dtype=np.int64)
    scores = np.asarray(values, dtype=np.float64)
    correct = np.asarray(accuracies, dtype=np.float64)
    if not len(ids) == len(scores) == len(correct):
        raise ValueError(f"{len(ids)} group ids, {len(scores)} values, {len(correct)} accuracies: lengths must agree")
    if not np.all(np.isfinite(scores)):
        row = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise ValueError(f"response {row} has the value {scores[row]}: score it before filtering")
    groups, first_rows, members = np.unique(ids, return_index=True, return_inverse=True)
    highest = np.full(len(groups), -np.inf)
    lowest = np.full(len(groups), np.inf)
    np.maximum.at(highest, members, scores)
    np.minimum.at(lowest, members, scores)
    signal = highest - lowest > tolerance
    worst = np.full(len(groups), np.inf)
    best = np.full(len(groups), -np.inf)
    np.minimum.at(worst, members, correct)
    np.maximum.at(best, members, correct)
    order = np.argsort(first_rows, kind="stable")
    return GroupFilter(
        kept_groups=[int(groups[g]) for g in order if signal[g]],
        all_correct=int(np.sum(~signal & (worst >= 1.0))),
        all_wrong=int(np.sum(~signal & (best <= 0.0))),
        all_equal=int(np.sum(~signal)),
    )


def samples_for_prompt(
    step: int,
    accuracy_history: Sequence[float],
    stages: Sequence[str],
    easy_accuracy: float,
    easy_batches: int,
    easy_n: int,
    hard_accuracy: float,
    hard_n: int,
) -> int:
    """Adaptive number of responses for one prompt: by stage of training, then by how the prompt went before.

    A prompt whose last ``easy_batches`` accuracies all exceed ``easy_accuracy`` gets ``easy_n``; one whose last
    accuracy is below ``hard_accuracy`` gets at least ``hard_n``; any other the stage's number.

    Args:
        step: training step, from 0.
        accuracy_history: mean accuracies of the prompt's earlier groups, oldest first; empty if it was never seen.
        stages: "<first step> <n>" in ascending order, see ``stage_schedule``.
    """
    n = stage_value(parse_stages(stages), step)
    recent = accuracy_history[-easy_batches:]
    if easy_batches > 0 and len(recent) == easy_batches and min(recent) > easy_accuracy:
        return easy_n
    if accuracy_history and accuracy_history[-1] < hard_accuracy:
        return max(n, hard_n)
    return n
