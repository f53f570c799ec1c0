"""What every section of the configuration is made with."""

from __future__ import annotations

from collections.abc import Collection

from megatron_retool.errors import InputError
from megatron_retool.fields import at_least_one, choice, fraction, not_negative, number, positive
from megatron_retool.registry import ExtensionError, load_object

__all__ = ["ConfigError", "check_named", "choice", "at_least_one", "fraction", "not_negative", "number", "positive"]


class ConfigError(InputError):
    """A setting is unknown, mistyped or inconsistent. The message names the key and says what to do."""


def check_named(key: str, target: str, known: Collection[str]) -> None:
    """Raise ConfigError where ``target`` is neither one of ``known`` nor of the form of one's own; nothing is imported.

    One's own is loaded where it is tried (``cluster.checks.check_extensions``).
    """
    if target not in known and ":" not in target:
        try:
            load_object(key, target, known=known)
        except ExtensionError as error:
            raise ConfigError(str(error)) from error
