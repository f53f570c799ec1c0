"""Means that know what they are over, so that the means of several updates make that of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Mean(float):
    """A mean, as the number that it is.

    Attributes:
        over: how many items it is the mean of: tokens, or responses.
    """

    over: float

    def __new__(cls, value: float, over: float) -> Mean:
        """A number that knows how many items it is the mean of."""
        mean = super().__new__(cls, value)
        mean.over = over
        return mean

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return float(self), self.over


def mean_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several updates as those of the step, name by name, from the updates that have the name.

    Where any of them is a ``Mean``, each counts as often as it has items, and a plain number, of which nothing was
    counted, not at all: this is the mean over the items of all updates. Other numbers (a gradient's norm, a learning
    rate) belong to the update, and each update counts once.
    """
    result = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        weights = [value.over if isinstance(value, Mean) else 0.0 for value in values]
        if not any(weights):
            weights = [1.0] * len(values)
        counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
        result[name] = sum(value * weight for value, weight in counted) / sum(weights)
    return result
