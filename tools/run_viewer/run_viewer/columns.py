"""The numbers of a response's tokens, and the colours that show them.

People who confuse red and green can tell the colours apart: a signed number goes from blue over nothing to orange, one
without a sign from nothing to violet, and categories take turns in Okabe and Ito's palette
(https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from run_viewer.stored_step import StoredResponse
from untrusted.errors import InputError

FloatArray = npt.NDArray[np.float64]
Colour = tuple[int, int, int]
"""Red, green, blue, 0 to 255 each."""
Scale = Literal["flag", "category", "share", "amount", "signed"]

_BLUE, _ORANGE, _VIOLET, _YELLOW = (0, 114, 178), (213, 94, 0), (122, 81, 149), (240, 228, 66)
CATEGORIES: tuple[Colour, ...] = (
    (86, 180, 233), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (0, 114, 178), (213, 94, 0),
)  # fmt: skip
HUES: dict[str, Colour] = {"flag": _YELLOW, "amount": _VIOLET, "positive": _ORANGE, "negative": _BLUE}
_LARGEST_PERCENTILE = 99.0
_REASONS = {1: "a log-prob is not finite", 2: "the veto", 3: "the mask of importance weights", 4: "overlong filtering"}
"""What values of the column rejected_by stand for; those from _FIRST_RULE on are the run's rejection rules."""
_FIRST_RULE = 5


@dataclass(frozen=True)
class ColumnKind:
    """
    Attributes:
        meaning: for a legend; what is worth looking at.
        scale: flag (0 or 1), category (whole numbers), share (0 to 1), amount (from 0 on), signed.
        learner: it needs what the learner computed (step_N.learner.parquet).
    """

    name: str
    meaning: str
    scale: Scale
    learner: bool = False


KINDS: dict[str, ColumnKind] = {
    kind.name: kind
    for kind in (
        ColumnKind("loss_mask", "tokens that the policy sampled and is trained on", "flag"),
        ColumnKind("turn", "assistant turns; tool results and template have none", "category"),
        ColumnKind("weight_version", "version of the weights that sampled the token", "category"),
        ColumnKind("surprise", "1 - probability that the engine gave the token: what it hardly expected", "share"),
        ColumnKind(
            "log_ratio",
            "log-probability of the learner (old policy) less the engine's: orange, the learner found it likelier",
            "signed",
            learner=True,
        ),
        ColumnKind("entropy", "of the learner's distribution, in nats: where it could have gone on otherwise",
                   "amount", learner=True),
        ColumnKind("advantage", "orange is encouraged, blue discouraged", "signed", learner=True),
        ColumnKind("importance_weight", "logarithm of the rollout correction's weight: blue counts less", "signed",
                   learner=True),
        ColumnKind("rejected", "tokens that the rollout correction took out of the loss", "flag", learner=True),
        ColumnKind("rejected_by", "which rule took them out, or the veto", "category", learner=True),
        ColumnKind(
            "routing_flips",
            "layers in which the learner's router would have taken other experts for the token than the engine did, "
            "whose experts were replayed",
            "amount",
            learner=True,
        ),
    )
}  # fmt: skip


def token_columns(
    response: StoredResponse, estimates: Mapping[str, npt.NDArray[np.float32]] | None
) -> dict[str, FloatArray]:
    """Values of every column of KINDS that the files have, float64 [R]; NaN where a token has none.

    Args:
        response: of R tokens.
        estimates: what the learner computed of it, each [R]; None: it did not train on it.

    Raises:
        ValueError: an estimate has another length.
    """
    sampled = response.loss_mask
    was_sampled = response.weight_versions >= 0
    columns = {
        "loss_mask": sampled.astype(np.float64),
        "turn": _where(response.turn_ids >= 0, response.turn_ids),
        "weight_version": _where(was_sampled, response.weight_versions),
        "surprise": _where(sampled, 1 - np.exp(response.rollout_log_probs.astype(np.float64))),
    }
    for name, column in (estimates or {}).items():
        if len(column) != len(response.response_ids):
            raise InputError(
                f"response {response.name}: the learner's {name} has {len(column)} entries "
                f"for {len(response.response_ids)} response tokens"
            )
    result = estimates or {}
    if "old_log_probs" in result:
        difference = result["old_log_probs"].astype(np.float64) - response.rollout_log_probs
        columns["log_ratio"] = _where(sampled, difference)
    for name, column_name in (("entropy", "entropy"), ("advantage", "advantages")):
        if column_name in result:
            columns[name] = _where(sampled, result[column_name])
    if "importance_weights" in result:
        with np.errstate(divide="ignore"):
            columns["importance_weight"] = _where(sampled, np.log(result["importance_weights"].astype(np.float64)))
    if "keep" in result:
        columns["rejected"] = (sampled & (result["keep"] == 0)).astype(np.float64)
    if "rejected_by" in result:
        columns["rejected_by"] = _where(sampled & (result["rejected_by"] > 0), result["rejected_by"])
    if "routing_flips" in result:
        # Routers see every token, a tool's too.
        columns["routing_flips"] = result["routing_flips"].astype(np.float64)
    return columns


def rejection_reasons(rules: Sequence[str]) -> dict[int, str]:
    """What the values of ``rejected_by`` stand for.

    Args:
        rules: algorithm.rollout_correction.rejection of the run.
    """
    return _REASONS | {_FIRST_RULE + place: str(rule) for place, rule in enumerate(rules)}


def _where(mask: npt.NDArray[np.bool_], values: npt.NDArray[np.generic]) -> FloatArray:
    return np.where(mask, np.asarray(values, dtype=np.float64), np.nan)


def largest_shown(kind: ColumnKind, values: FloatArray) -> float:
    """The magnitude that gets the full colour: 1 for shares, else the 99th percentile of ``values``; never 0."""
    finite = np.abs(values[np.isfinite(values)])
    if kind.scale not in ("amount", "signed") or not len(finite):
        return 1.0
    # Most differences are 0 to a few digits: the percentile would be one of those, and everything would glow.
    return float(np.percentile(finite, _LARGEST_PERCENTILE)) or float(finite.max()) or 1.0


def colour(kind: ColumnKind, value: float, largest: float) -> tuple[Colour, float] | None:
    """Colour of a value and its strength, 0 to 1; None: no colour.

    Args:
        value: infinities have the full colour of their sign; NaN has none.
        largest: see ``largest_shown``.
    """
    if np.isnan(value):
        return None
    if kind.scale == "category":
        return CATEGORIES[int(value) % len(CATEGORIES)], 1.0
    if kind.scale == "flag":
        return (HUES["flag"], 1.0) if value else None
    strength = float(min(1.0, abs(value) / largest))
    sign = "positive" if value > 0 else "negative"
    hue = HUES["amount" if kind.scale in ("share", "amount") else sign]
    return (hue, strength) if strength > 0 else None
