"""The settings of runs, by dotted key: what config.yaml says, flat, and in what runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"


def flat_settings(tree: Any) -> dict[str, Any]:
    """Leaves of a configuration by dotted key; an empty section is a leaf."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    add("", tree)
    return flat


def differing_settings(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Value of each run by dotted key, of the keys whose values are not all equal. A run's own name is left out."""
    keys = dict.fromkeys(key for run in settings for key in run)
    rows = {key: [run.get(key, ABSENT) for run in settings] for key in keys if key != "trainer.experiment_name"}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}
