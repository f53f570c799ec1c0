"""Which side is off, by how much and where: statistics of log-probs and hidden states against a referee's.

Of a sampled token, e = engine - referee and l = learner - referee are the errors of the two log-probs, and the mismatch
is d = learner - engine = l - e. As sum d^2 = sum d l - sum d e, the engine's share of the squared mismatch is
- sum d e / sum d^2, and the learner's is what is left of 1. In a mixture of experts with r = forced - own, what the
engine's choice of experts does to the referee, the share of routing in the engine's squared error is
sum e r / sum e^2 in the same way.

A side is beyond its number format where its mean |error| is above ``SLACK`` times that of a yardstick: transformers
with the same weights in the number format of that side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.algorithms.probability_bins import PROBABILITY_BIN_EDGES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SLACK = 4.0
"""Two implementations in one number format differ only in the order of their sums: by less than this factor."""
LOG_PROB_FLOOR = 2e-6
"""Mean error of a log-prob that float32 arithmetic explains."""
HIDDEN_FLOOR = 2e-6
"""The same of the relative difference of hidden states."""
OTHER_EXPERTS_FLOOR = 0.01
"""Share of tokens for which rounding may choose other experts where the yardstick's does not."""
DECIDED = 0.75
"""Share of the squared mismatch from which on only one side is named."""


@dataclass(frozen=True)
class Judged:
    """Sampled tokens, end to end; every array has one entry for each.

    Attributes:
        engine, learner, referee: float64 log-probs.
        turns: assistant turn, from 0.
        positions: place in the response.
        responses: int64, row of ``names``.
        names: (group_id, index) of each response.
        engine_format, learner_format: float64, of the yardsticks; None where there is none.
    """

    engine: FloatArray
    learner: FloatArray
    referee: FloatArray
    turns: IntArray
    positions: IntArray
    responses: IntArray
    names: Sequence[tuple[int, int]]
    engine_format: FloatArray | None = None
    learner_format: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.referee)


@dataclass(frozen=True)
class Routing:
    """What a mixture of experts chose for the input tokens that predict the judged ones.

    Attributes:
        own, forced: float64 [n], the referee's log-probs with its own choice, and with the engine's.
        own_experts, engine_experts: int64 [n, layers, k].
        known: bool [n], where the engine's choice was recorded.
        learner_experts: int64 [n, layers, k] of the learner that was run again; None: it was not.
    """

    own: FloatArray
    forced: FloatArray
    own_experts: IntArray
    engine_experts: IntArray
    known: npt.NDArray[np.bool_]
    learner_experts: IntArray | None = None


def split_rows(judged: Judged) -> list[dict[str, Any]]:
    """A row for each category of each split (all, probability, turn, position) that has tokens: see ``figures``."""
    rows = []
    for split, categories, name in _splits(judged):
        for category in np.unique(categories):
            chosen = np.flatnonzero(categories == category)
            rows.append({"split": split, "category": name(int(category)), **figures(judged, chosen)})
    return rows


def _splits(judged: Judged) -> Iterator[tuple[str, IntArray, Callable[[int], str]]]:
    edges = (0.0, *PROBABILITY_BIN_EDGES, 1.0)
    yield "all", np.zeros(len(judged), np.int64), lambda _: "all"
    bins = np.digitize(np.exp(judged.referee), PROBABILITY_BIN_EDGES)
    yield "probability", bins, lambda i: f"{edges[i]:g}–{edges[i + 1]:g}"
    yield "turn", judged.turns, str
    # 0 … 15, then each as long as all before it.
    octaves = np.ceil(np.log2(np.maximum(judged.positions + 1, 16) / 16)).astype(np.int64)
    yield "position", octaves, lambda i: f"{0 if i == 0 else 8 * 2**i}–{16 * 2**i - 1}"


def response_rows(judged: Judged, limit: int = 10) -> list[dict[str, Any]]:
    """The responses that the two sides are furthest off in, worst first: see ``figures``.

    Each has group_id and index, and in worst_position the place in the response of the token that is worst.
    """
    off = np.maximum(np.abs(judged.engine - judged.referee), np.abs(judged.learner - judged.referee))
    rows = []
    for number, (group_id, index) in enumerate(judged.names):
        chosen = np.flatnonzero(judged.responses == number)
        if len(chosen):
            worst = int(judged.positions[chosen[off[chosen].argmax()]])
            rows.append({"group_id": group_id, "index": index, **figures(judged, chosen), "worst_position": worst})
    rows.sort(key=lambda row: (-row["engine"]["mean_abs"] - row["learner"]["mean_abs"], row["group_id"], row["index"]))
    return rows[:limit]


def figures(judged: Judged, chosen: IntArray) -> dict[str, Any]:
    """Of the chosen tokens: how many, mean |d|, what is off for each side, the engine's share and the side.

    engine and learner are each {mean_abs, mean, max_abs, format_mean_abs (null: no yardstick), beyond_format}. side:
    engine, learner, both, or neither where the two agree.
    """
    engine = judged.engine[chosen] - judged.referee[chosen]
    learner = judged.learner[chosen] - judged.referee[chosen]
    share, side = attribute(engine, learner)
    return {
        "tokens": len(chosen),
        "mismatch_mean_abs": float(np.abs(learner - engine).mean()),
        "engine": _side(engine, judged.engine_format, judged.referee, chosen),
        "learner": _side(learner, judged.learner_format, judged.referee, chosen),
        "engine_share": share,
        "side": side,
    }


def attribute(engine_error: FloatArray, learner_error: FloatArray) -> tuple[float | None, str]:
    """The engine's share of the squared mismatch, and the side that is to be named for it."""
    difference = learner_error - engine_error
    if np.abs(difference).mean() <= LOG_PROB_FLOOR:
        return None, "neither"
    share = float(-(difference * engine_error).sum() / np.square(difference).sum())
    return share, "engine" if share >= DECIDED else "learner" if share <= 1 - DECIDED else "both"


def _side(error: FloatArray, yardstick: FloatArray | None, referee: FloatArray, chosen: IntArray) -> dict[str, Any]:
    mean_abs = float(np.abs(error).mean())
    expected = None if yardstick is None else float(np.abs(yardstick[chosen] - referee[chosen]).mean())
    return {
        "mean_abs": mean_abs,
        "mean": float(error.mean()),
        "max_abs": float(np.abs(error).max()),
        "format_mean_abs": expected,
        "beyond_format": mean_abs > SLACK * max(expected or 0.0, LOG_PROB_FLOOR / SLACK),
    }


def relative_differences(hidden: npt.NDArray[Any], referee: npt.NDArray[Any]) -> FloatArray:
    """[n, stages, h] twice -> |hidden - referee| / |referee|, float64 [n, stages]."""
    length = np.linalg.norm(referee.astype(np.float64), axis=-1)
    difference = np.linalg.norm(hidden.astype(np.float64) - referee, axis=-1)
    return difference / np.maximum(length, np.finfo(np.float64).tiny)


def layer_rows(
    stages: Sequence[str],
    differences: FloatArray,
    format_differences: FloatArray,
    other_experts: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None = None,
) -> list[dict[str, Any]]:
    """A row for each stage of the model: median and 95th percentile over tokens, those of the yardstick, and ``off``.

    Nearly tied experts are chosen differently in any two computations, and such a token's states jump: it is left out
    from that layer on, unless that is most of the tokens. That the learner chooses other experts in far more tokens
    than the yardstick makes a layer off too.

    Args:
        stages: names in the order of computation: the embedding, each layer, the final norm.
        differences, format_differences: [n, stages] of the learner and of the yardstick, ``relative_differences``.
        other_experts: bool [n, layers] of the two: not the referee's experts. None: not a mixture of experts.
    """
    rows, seen = [], np.zeros(len(differences), np.bool_)
    for number, stage in enumerate(stages):
        off = False
        if other_experts is not None and 0 < number <= other_experts[0].shape[1]:
            learner, yardstick = (other[:, number - 1] for other in other_experts)
            off = bool(learner.mean() > SLACK * max(yardstick.mean(), OTHER_EXPERTS_FLOOR))
            seen = seen | learner | yardstick
        compared = ~seen if 2 * seen.sum() < len(seen) else np.ones_like(seen)
        row: dict[str, Any] = {"stage": stage}
        for name, quantile in (("median", 0.5), ("p95", 0.95)):
            result = float(np.quantile(differences[compared, number], quantile))
            expected = float(np.quantile(format_differences[compared, number], quantile))
            off |= result > SLACK * max(expected, HIDDEN_FLOOR)
            row |= {name: result, f"format_{name}": expected}
        rows.append({**row, "off": bool(off)})
    return rows


def routing_statistics(engine: FloatArray, routing: Routing) -> dict[str, Any]:
    """How much of the engine's error is its choice of experts.

    Args:
        engine: float64 [n], the engine's log-probs.

    Returns:
        share_of_squared_error (null without an error); mean_abs_own and mean_abs_forced: the engine against the
        referee's own choice, and against the referee with the engine's; tokens_with_other_experts; by_layer: share of
        tokens whose experts are not the referee's; mean_abs_same_experts and mean_abs_other_experts: |e| of tokens
        with the referee's experts in all layers, and of the others; the learner's shares where it was run again.
    """
    own_error, by_routing = engine - routing.own, routing.forced - routing.own
    squares = float(np.square(own_error).sum())
    other = other_experts(routing.engine_experts, routing.own_experts) & routing.known[:, None]
    anywhere, known = other.any(-1), max(int(routing.known.sum()), 1)
    result: dict[str, Any] = {
        "tokens": int(routing.known.sum()),
        "share_of_squared_error": float((own_error * by_routing).sum()) / squares if squares > 0 else None,
        "mean_abs_own": float(np.abs(own_error).mean()),
        "mean_abs_forced": float(np.abs(engine - routing.forced).mean()),
        "tokens_with_other_experts": float(anywhere.sum()) / known,
        "by_layer": [float(share) for share in other.sum(0) / known],
        "mean_abs_same_experts": _mean_abs(own_error[routing.known & ~anywhere]),
        "mean_abs_other_experts": _mean_abs(own_error[anywhere]),
        "learner_tokens_with_other_experts": None,
        "learner_by_layer": None,
    }
    if routing.learner_experts is not None:
        learner_other = other_experts(routing.learner_experts, routing.own_experts)
        result["learner_tokens_with_other_experts"] = float(learner_other.any(-1).mean())
        result["learner_by_layer"] = [float(share) for share in learner_other.mean(0)]
    return result


def other_experts(chosen: IntArray, own: IntArray) -> npt.NDArray[np.bool_]:
    """bool [n, layers] of two choices [n, layers, k]: they do not name the same experts."""
    different: npt.NDArray[np.bool_] = (np.sort(chosen, -1) != np.sort(own, -1)).any(-1)
    return different


def _mean_abs(values: FloatArray) -> float | None:
    return float(np.abs(values).mean()) if len(values) else None
