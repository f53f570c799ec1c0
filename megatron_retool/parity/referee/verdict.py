"""The referee's figures in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_retool.parity.referee.attribution import LOG_PROB_FLOOR

FEWEST_TOKENS = 10
"""Of a category that is named."""


def verdict(
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]] | None,
    routing: Mapping[str, Any] | None,
    *,
    replayed: bool = False,
) -> list[str]:
    """Sentences, the most important first.

    Args:
        rows: of ``attribution.split_rows``.
        layers: of ``attribution.layer_rows``; None: the learner was not run again.
        routing: of ``attribution.routing_statistics``; None: not a mixture of experts, or nothing recorded.
        replayed: the learner took the engine's experts, and so did the referee that ``rows`` are of.
    """
    (total,) = [row for row in rows if row["split"] == "all"]
    return [*_sides(total), *_places(total, rows), *_layers(layers), *_routing(routing, replayed)]


def _sides(total: Mapping[str, Any]) -> Iterator[str]:
    engine, learner = total["engine"], total["learner"]
    off = f"engine is off by {engine['mean_abs']:.1e} on average, learner by {learner['mean_abs']:.1e}"
    if total["side"] == "neither":
        if engine["beyond_format"] or learner["beyond_format"]:
            yield (
                f"{off}: they agree with one another and not with the referee, which points at its weights or at the "
                "settings of sampling"
            )
        else:
            yield f"{off}: they agree with the referee and with one another to rounding"
    elif total["side"] == "both":
        yield f"{off}: the mismatch comes from both, {_percent(total['engine_share'])} of its square from the engine"
    else:
        share = total["engine_share"] if total["side"] == "engine" else 1 - total["engine_share"]
        yield f"{off}: the mismatch is the {total['side']}'s ({_percent(share)} of its square)"
    for name, side in (("engine", engine), ("learner", learner)):
        expected = side["format_mean_abs"]
        if expected is None:
            continue
        if not side["beyond_format"]:
            yield f"the {name} is no further off than its number format, in which transformers is off by {expected:.1e}"
        else:
            times = f" ({side['mean_abs'] / expected:.0f} times less)" if expected > 0 else ""
            yield (
                f"the {name} is further off than its number format explains: transformers in it is off by "
                f"{expected:.1e}{times}"
            )


def _places(total: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the side that is named is furthest off."""
    if total["side"] not in ("engine", "learner"):
        return
    side = total["side"]
    worst = []
    for split in ("probability", "turn", "position"):
        candidates = [row for row in rows if row["split"] == split and row["tokens"] >= FEWEST_TOKENS]
        if len(candidates) > 1:
            row = max(candidates, key=lambda row: row[side]["mean_abs"])
            worst.append(f"{split} {row['category']} ({row[side]['mean_abs']:.1e}, {row['tokens']} tokens)")
    if worst:
        yield f"the {side} is furthest off at {', '.join(worst)}"


def _layers(layers: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    if layers is None:
        return
    first = next((row for row in layers if row["off"]), None)
    if first is None:
        yield "first layer in which the learner leaves the referee: none above rounding"
        return
    yield (
        f"first layer in which the learner leaves the referee: {first['stage']} (relative difference "
        f"{first['median']:.1e}, 95th percentile {first['p95']:.1e}; by its number format "
        f"{first['format_median']:.1e} and {first['format_p95']:.1e})"
    )


def _routing(routing: Mapping[str, Any] | None, replayed: bool) -> Iterator[str]:
    if routing is None:
        return
    others = f"{_percent(routing['tokens_with_other_experts'])} of tokens chose other experts in ≥ 1 layer"
    share = routing["share_of_squared_error"]
    if share is None or routing["mean_abs_own"] <= LOG_PROB_FLOOR:
        yield others
    elif replayed:
        yield (
            f"the learner replays the engine's experts, without which {_percent(share)} of the engine's squared error "
            f"would be routing: {others}"
        )
    else:
        yield f"{_percent(share)} of the engine's squared error is routing: {others}"


def _percent(share: float) -> str:
    text = f"{100 * share:.1f}"
    return f"{text.removesuffix('.0')} %"
