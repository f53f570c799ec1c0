"""Numbers as JSON has them."""

from __future__ import annotations

from typing import Any

import numpy as np


def number_for_json(value: Any) -> float | int | str | None:
    """None for NaN and what is no number; infinities as text, which JSON has no numbers for."""
    if not isinstance(value, int | float | np.number):
        return None
    number = float(value)
    if np.isnan(number):
        return None
    if np.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def column_for_json(column: Any) -> list[Any]:
    """What ``number_for_json`` makes of each."""
    numbers = np.asarray(column, np.float64)
    values = numbers.astype(object)
    values[np.isnan(numbers)] = None
    values[np.isposinf(numbers)], values[np.isneginf(numbers)] = "Infinity", "-Infinity"
    result: list[Any] = values.tolist()
    return result


def values_for_json(value: Any) -> Any:
    """``value``, of dictionaries, lists and numbers, with what ``number_for_json`` makes of each float in it."""
    if isinstance(value, float):
        return number_for_json(value)
    if isinstance(value, dict):
        return {key: values_for_json(each) for key, each in value.items()}
    return [values_for_json(each) for each in value] if isinstance(value, list) else value
