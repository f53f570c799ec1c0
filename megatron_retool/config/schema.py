"""The keys of the typed tree and what their types admit: what a file or an override says is fitted to them."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from megatron_retool.config.base import ConfigError
from megatron_retool.config.nearest import nearest_key
from megatron_retool.config.verl_keys import explain

_REMOVED = {
    "tools.code_interpreter.share_results": (
        "every call runs its own snippet, since reading code cannot show that it prints the same again; remove the key"
    ),
}
"""Keys that there once were, and what to do about them."""
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def fitted(given: Any, schema: type, *, root: type, source: str = "", prefix: str = "") -> dict[str, Any]:
    """What ``given`` says of ``schema``, one of the tree's dataclasses, with every value of its key's type.

    One value is taken for a list of one. Texts with ``${`` in them are left as they are: they stand for other settings.

    Args:
        root: the whole tree's dataclass, among whose keys the nearest to an unknown one is looked for.
        source: the file or override that it comes from, for messages.
        prefix: what stands before the keys of ``given``, with a dot at its end.

    Raises:
        ConfigError: a key is unknown, or a value has another type; the message names the key, the value and the type.
    """
    where = f"{source}: " if source else ""
    if not isinstance(given, Mapping):
        section = f"{prefix.removesuffix('.')}={_shown(given)}"
        raise ConfigError(f"{where}{section} must be a mapping, for it is a section of settings")
    hints = type_hints(schema)
    fitting = {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        if name not in hints:
            whole = key
            while isinstance(value, Mapping) and value:
                inner, value = next(iter(value.items()))
                whole = f"{whole}.{inner}"
            if whole in _REMOVED:
                raise ConfigError(f"{where}{whole} is no longer a setting: {_REMOVED[whole]}")
            if (translated := explain(key, given[name])) is not None:
                whole_file = "; `megatron-retool config from-verl FILE` translates a whole file"
                raise ConfigError(f"{where}unknown key: {translated}{whole_file * isinstance(given[name], Mapping)}")
            raise ConfigError(f"{where}unknown key {whole!r}{_suggestion(key, root)}")
        fitting[name] = _value(value, hints[name], root, source, key)
    return fitting


def _value(given: Any, hint: Any, root: type, source: str, key: str) -> Any:
    if hint is Any or (isinstance(given, str) and "${" in given):
        return given
    kind, optional = _without_none(hint)
    if given is None and optional:
        return None
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return fitted(given, kind, root=root, source=source, prefix=f"{key}.")
    container, arguments = typing.get_origin(kind), typing.get_args(kind)
    if container is list and given is not None and not isinstance(given, Mapping):
        elements = given if isinstance(given, list) else [given]
        return [_value(each, arguments[0], root, source, f"{key}[{index}]") for index, each in enumerate(elements)]
    if container is dict and isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return dict(given)
    if container is None and not isinstance(given, (Mapping, list)) and given is not None:
        try:
            return _SCALARS[kind](given)
        except (ValueError, OverflowError):
            pass
    where = f"{source}: " if source else ""
    raise ConfigError(f"{where}{key}={_shown(given)} must be {expected(hint)}")


def expected(hint: Any) -> str:
    """A type in words, such as "a whole number, or null"."""
    kind, optional = _without_none(hint)
    if typing.get_origin(kind) is list:
        element = typing.get_args(kind)[0]
        words = "a list" if element is Any else f"a list, each element {expected(element)}"
    elif typing.get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        words = "a mapping"
    else:
        words = _WORDS[kind]
    return f"{words}, or null" if optional else words


def dotted_keys(schema: type, prefix: str = "") -> list[str]:
    """Every key of ``schema`` and of the sections below it; of the elements of a list of sections without an index."""
    keys: list[str] = []
    for name, hint in type_hints(schema).items():
        keys.append(prefix + name)
        inner = section_of(hint)
        if inner is not None:
            keys.extend(dotted_keys(inner, f"{prefix}{name}."))
    return keys


def section_of(hint: Any) -> type | None:
    """The dataclass that a field of type ``hint`` holds, itself or as the elements of a list; None for any other."""
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


@functools.cache
def type_hints(schema: type) -> dict[str, Any]:
    """Name -> type of the fields of a dataclass, in their order."""
    hints = typing.get_type_hints(schema)
    return {item.name: hints[item.name] for item in dataclasses.fields(schema)}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """``int | None`` -> (int, True); any other type -> (itself, False)."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    (kind,) = (each for each in typing.get_args(hint) if each is not types.NoneType)
    return kind, True


def _suggestion(key: str, root: type) -> str:
    key = re.sub(r"\[\d+\]", "", key)
    known = dotted_keys(root)
    near = nearest_key(key, known)
    if near is not None:
        return f"; the nearest known key is {near!r}"
    section = key.rpartition(".")[0]
    names = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == section]
    return f"; the {f'keys of {section}' if section else 'sections'} are {', '.join(names)}" if names else ""


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _truth(given: Any) -> bool:
    try:
        return _TRUTH[str(given).lower()]
    except KeyError:
        raise ValueError from None


def _whole_number(given: Any) -> int:
    if isinstance(given, (bool, float)):
        raise ValueError
    return int(given)


def _text(given: Any) -> str:
    # str() would make a plain text of one that knows where it comes from (hidden_values.py).
    return given if isinstance(given, str) else str(given)


def _number(given: Any) -> float:
    if isinstance(given, bool):
        raise ValueError
    return float(given)


_SCALARS: dict[Any, Callable[[Any], Any]] = {bool: _truth, int: _whole_number, float: _number, str: _text}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
