"""What every section of the configuration is made with."""

from __future__ import annotations

from dataclasses import field
from typing import Any


class ConfigError(ValueError):
    """A setting is unknown, mistyped or inconsistent. The message names the key and says what to do."""


def choice(default: str, *others: str) -> Any:
    """A string field that accepts ``default`` or one of ``others``; anything else is a ConfigError."""
    return field(default=default, metadata={"choices": (default, *others)})
