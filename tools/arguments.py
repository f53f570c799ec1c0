"""Arguments that a model writes without quotes: their tool's schema says whether they are texts, numbers or lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema

from megatron_retool.untrusted import load_json


class WrittenText(str):
    """An argument of a call in tags, where ``3`` may be the number or the text."""


def typed_arguments(arguments: Any, schema: Mapping[str, Any]) -> Any:
    """``arguments`` of a call, each ``WrittenText`` of them as the tool's ``schema`` has it.

    What the schema takes as a text stays one; else it is read as JSON. What is no JSON stays a text, which the check of
    the arguments then refuses.
    """
    if not isinstance(arguments, dict):
        return arguments
    return {
        name: _typed(name, value, schema) if isinstance(value, WrittenText) else value
        for name, value in arguments.items()
    }


def _typed(name: str, written: WrittenText, schema: Mapping[str, Any]) -> Any:
    text = str(written)
    try:
        # With the whole schema at hand, into which a property may point ($ref).
        whole = jsonschema.Draft202012Validator(schema)
        if whole.evolve(schema=(schema.get("properties") or {}).get(name, True)).is_valid(text):
            return text
    except Exception:  # a client of the gateway may send any schema: a broken one says nothing
        return text
    try:
        return load_json(text)
    except ValueError:
        return text
