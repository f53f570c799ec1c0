"""Arguments that a model writes without quotes: their tool's schema says whether they are texts, numbers or lists."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

import jsonschema

from untrusted import load_json

MOST_CHARACTERS = 100_000
"""Longest text that is read in Python's notation."""
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class WrittenText(str):
    """An argument of a call in tags, where ``3`` may be the number or the text."""


def typed_arguments(arguments: Any, schema: Mapping[str, Any]) -> Any:
    """``arguments`` of a call, each ``WrittenText`` of them as the tool's ``schema`` has it.

    What the schema takes as a text stays one. Anything else is read as JSON, or as Python's notation (True, None),
    which some templates write. ``3.0`` is 3 if the schema takes integers only. A text that is neither stays a text,
    which the check of the arguments then refuses.
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
        validator = whole.evolve(schema=(schema.get("properties") or {}).get(name, True))
        if validator.is_valid(text):
            return text
    except Exception:  # a client of the gateway may send any schema: a broken one says nothing
        return text
    stripped = text.strip()
    try:
        value = _WORDS[stripped.lower()] if stripped.lower() in _WORDS else load_json(text)
    except ValueError:
        try:
            value = _python_value(stripped)
        except ValueError:
            return text
    try:
        if isinstance(value, float) and value.is_integer() and not validator.is_valid(value + 0.5):
            value = int(value)
    except Exception:
        return value
    return value


def _python_value(written: str) -> Any:
    """A list or mapping in Python's own notation.

    Raises:
        ValueError: it is none, or holds what JSON cannot.
    """
    if len(written) > MOST_CHARACTERS or not written.startswith(("[", "{", "(")):
        raise ValueError("no list or mapping")
    try:
        return load_json(json.dumps(ast.literal_eval(written), allow_nan=False))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("no list or mapping") from error
