"""What every section of the configuration is made with."""

from __future__ import annotations

from megatron_retool.fields import at_least_one, choice, fraction, not_negative, number, positive
from megatron_retool.untrusted import BriefError

__all__ = ["ConfigError", "choice", "at_least_one", "fraction", "not_negative", "number", "positive"]


class ConfigError(BriefError):
    """A setting is unknown, mistyped or inconsistent. The message names the key and says what to do."""
