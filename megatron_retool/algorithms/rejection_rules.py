"""The rejection rules of rollout correction, as text: ``"<unit>_<statistic> <lower> <upper>"``.

    token_ratio 0.625 1.667          drop the token   unless lower <= exp(d_t) <= upper
    token_k1 | token_k2 | token_k3   drop the token   unless its k lies in the bounds
    sequence_ratio 0.5 2.0           drop the response unless exp(sum d) does
    geometric_ratio 0.999 1.001      drop the response unless exp(mean d) does
    sequence_sum_k3 | sequence_mean_k3 | sequence_max_k3 (and k1, k2)
                                     drop the response unless the sum, mean or maximum over its tokens does
    token my_rules.py:function 0 2 | sequence package.module:function 0 2 window=32
                                     drop the token or the response unless the function's number for it does

d_t = log pi_train - log pi_rollout of a sampled token; k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d.  Bounds are inclusive;
``-inf`` and ``inf`` switch one off.  A function of one's own is called with (log_ratio, sequence_ids, num_sequences):
d_t of the sampled tokens, float [n], and the response of each, int64 [n].  It gives a number for each token or each
response.  Words ``key=value`` behind the bounds are its keyword arguments; a path with spaces is quoted.  This module
imports nothing but the standard library, so that a configuration can be checked without torch.
"""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_retool.errors import InputError

NOT_FINITE, VETO, WEIGHT_MASK, OVERLONG, FIRST_RULE = 1, 2, 3, 4, 5
"""Why a token gives no loss (``CorrectionResult.rejected_by``): a log-prob is not finite, the veto, the mask of
importance weights, overlong filtering, or the first of the rules, which the others follow."""

_TOKEN_STATISTICS = ("ratio", "k1", "k2", "k3")
RULE_NAMES = (
    *(f"token_{statistic}" for statistic in _TOKEN_STATISTICS),
    "sequence_ratio",
    "geometric_ratio",
    *(f"sequence_{reduction}_{k}" for reduction in ("sum", "mean", "max") for k in ("k1", "k2", "k3")),
)


class RejectionRule(NamedTuple):
    """One rule, parsed. ``unit`` is what it drops: "token" or "sequence" (a whole response)."""

    name: str
    unit: str
    reduction: str
    """token rules: "none". Response rules: "sum", "mean" or "max" over sampled tokens."""
    quantity: str
    """"ratio" (the exponential is taken after the reduction), "k1", "k2", "k3", or "own": what ``name`` names."""
    lower: float
    upper: float
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """Of a function of one's own."""


def parse_rejection_rule(text: str) -> RejectionRule:
    """Parse one rule.

    Raises:
        ValueError: saying which part is wrong and what would be right.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"rejection rule {text!r}: {error}") from None
    if len(words) > 1 and ":" in words[1]:
        return _own_rule(text, words)
    if len(words) != 3:
        raise InputError(
            f"rejection rule {text!r} has {len(words)} words instead of three, as in 'geometric_ratio 0.999 1.001'"
        )
    name = words[0]
    if name not in RULE_NAMES:
        nearest = difflib.get_close_matches(name, RULE_NAMES, n=1, cutoff=0.0)[0]
        raise InputError(
            f"rejection rule {text!r}: unknown name {name!r}, the nearest is {nearest!r}; "
            f"known: {', '.join(RULE_NAMES)}"
        )
    lower, upper = _bounds(text, words[1], words[2])
    if name.endswith("_ratio") and upper <= 0:
        raise InputError(f"rejection rule {text!r}: ratios are positive, this rule would drop everything")
    unit, *middle, quantity = name.split("_")
    if unit == "token":
        return RejectionRule(name, "token", "none", quantity, lower, upper)
    if unit == "geometric":
        return RejectionRule(name, "sequence", "mean", quantity, lower, upper)
    return RejectionRule(name, "sequence", middle[0] if middle else "sum", quantity, lower, upper)


def _own_rule(text: str, words: list[str]) -> RejectionRule:
    unit, name, *rest = words
    if unit not in ("token", "sequence"):
        raise InputError(f"rejection rule {text!r}: begin it with what it drops, token or sequence, not {unit!r}")
    if len(rest) < 2:
        raise InputError(f"rejection rule {text!r} lacks its bounds, as in 'sequence my_rules.py:function 0 2'")
    lower, upper = _bounds(text, rest[0], rest[1])
    kwargs: dict[str, Any] = {}
    for word in rest[2:]:
        key, separator, value = word.partition("=")
        if not separator or not key.isidentifier():
            raise InputError(f"rejection rule {text!r}: {word!r} is no keyword argument: write key=value")
        kwargs[key] = _value(value)
    return RejectionRule(name, unit, "none", "own", lower, upper, kwargs)


def _bounds(text: str, low: str, high: str) -> tuple[float, float]:
    try:
        lower, upper = float(low), float(high)
    except ValueError:
        raise InputError(f"rejection rule {text!r}: the bounds {low!r} and {high!r} must be numbers") from None
    if math.isnan(lower) or math.isnan(upper) or lower > upper:
        raise InputError(f"rejection rule {text!r}: the lower bound must not exceed the upper one")
    return lower, upper


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_rejection_rules(texts: Iterable[str]) -> list[RejectionRule]:
    """Parse all rules of ``algorithm.rollout_correction.rejection``; ValueError as ``parse_rejection_rule``."""
    return [parse_rejection_rule(text) for text in texts]
