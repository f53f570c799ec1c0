"""Reading the configuration: files that extend one another, then ``dotted.key=value`` overrides."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_retool.config.base import ConfigError
from megatron_retool.config.tree import Config, check_choices, validate


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, apply ``dotted.key=value`` overrides, check every key and type, validate, freeze.

    Raises:
        ConfigError: the file is missing or no mapping, a key is unknown, a value has the wrong type, or
            ``validate`` finds a contradiction.
    """
    layers = [] if path is None else _read_file(Path(path), ())
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form dotted.key=value")
        try:
            layer = OmegaConf.from_dotlist([override])
        except Exception as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
        _anchor_files(layer, Path.cwd())
        layers.append((f"override {override!r}", layer))

    tree = OmegaConf.structured(Config)
    _unlock(tree)
    for source, layer in layers:
        _reject_unknown_keys(OmegaConf.to_container(layer), Config, source)
        _wrap_single_names(layer, Config)
        try:
            tree = OmegaConf.merge(tree, layer)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or "?"
            raise ConfigError(f"{source}: {key}: {str(error).splitlines()[0]}") from error
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    validate(config)
    return config


def _read_file(path: Path, extended_by: tuple[Path, ...]) -> list[tuple[str, DictConfig]]:
    """The file's settings with its path, after those of the files that it extends."""
    origin = f", which {extended_by[-1]} extends," if extended_by else ""
    if not path.is_file():
        raise ConfigError(f"config file {path}{origin} does not exist")
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {path} must hold a mapping at its top level")
    _anchor_files(loaded, path.parent)
    base = loaded.pop("extends", None)
    if base is None:
        return [(str(path), loaded)]
    if not isinstance(base, str):
        raise ConfigError(f"config file {path}: extends must name one file, not {base!r}")
    chain = (*extended_by, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise ConfigError(f"config file {path}: extends: {base} leads back to itself")
    return [*_read_file(path.parent / base, chain), (str(path), loaded)]


_FILE_AND_OBJECT = re.compile(r"(?P<file>[^:{}$]+\.py):[A-Za-z_][\w.]*")


def _anchor_files(node: Any, directory: Path) -> None:
    """Make targets of the form file.py:object absolute: beside the file that names them, else below the working
    directory. So they mean the same in every process of the run, and in the configuration that it leaves behind."""
    for key in range(len(node)) if isinstance(node, ListConfig) else list(node):
        value = node._get_node(key)
        if OmegaConf.is_config(value):
            if not value._is_none() and not value._is_missing() and not value._is_interpolation():
                _anchor_files(value, directory)
            continue
        text = value._value()
        match = _FILE_AND_OBJECT.fullmatch(text) if isinstance(text, str) else None
        if match is not None and not Path(match["file"]).is_absolute():
            places = [base / match["file"] for base in (directory, Path.cwd())]
            found = next((place for place in places if place.is_file()), None)
            if found is not None:
                node[key] = f"{found.resolve()}{text[match.end('file') :]}"


def with_settings(section: Any, settings: Mapping[str, Any], key: str) -> Any:
    """A copy of ``section``, one of the tree's dataclasses, with ``settings`` in it.

    Args:
        key: dotted key of ``settings``, for messages.

    Raises:
        ConfigError: a name is unknown or a value has the wrong type.
    """
    known = [item.name for item in dataclasses.fields(section)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{key}.{name} is unknown; the settings are {', '.join(known)}")
    tree = OmegaConf.structured(section)
    _unlock(tree)
    try:
        found = OmegaConf.to_object(OmegaConf.merge(tree, dict(settings)))
    except OmegaConfBaseException as error:
        name = getattr(error, "full_key", None) or "?"
        raise ConfigError(f"{key}.{name}: {str(error).splitlines()[0]}") from error
    check_choices(found, f"{key}.")
    return found


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved tree as YAML that ``load_config`` reads back."""
    OmegaConf.save(OmegaConf.structured(config), path)


def _unlock(node: Any) -> None:
    # OmegaConf marks nodes of frozen dataclasses read-only, which would refuse the YAML file as well.
    OmegaConf.set_readonly(node, False)
    for key in range(len(node)) if isinstance(node, ListConfig) else node:
        child = node._get_node(key)
        if OmegaConf.is_config(child) and not child._is_none():
            _unlock(child)


def _reject_unknown_keys(node: Any, schema: type, source: str, prefix: str = "") -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {prefix.rstrip('.')} must be a mapping")
    known = {item.name for item in dataclasses.fields(schema)}
    for key, value in node.items():
        dotted = f"{prefix}{key}"
        if key not in known:
            nearest = difflib.get_close_matches(dotted, _dotted_keys(Config), n=1, cutoff=0.0)
            raise ConfigError(f"{source}: unknown key {dotted!r}; the nearest known key is {nearest[0]!r}")
        inner = _dataclass_of(schema, key)
        if inner is None or value is None or isinstance(value, str):  # a string may be an interpolation
            continue
        if isinstance(value, list):
            for index, element in enumerate(value):
                _reject_unknown_keys(element, inner, source, f"{dotted}[{index}].")
        else:
            _reject_unknown_keys(value, inner, source, f"{dotted}.")


def _wrap_single_names(node: DictConfig, schema: type) -> None:
    """Make a list of a text that stands where a list of texts is expected, as in data.train_files=a.parquet."""
    hints = typing.get_type_hints(schema)
    for key in list(node):
        inner, value = _dataclass_of(schema, key), node._get_node(key)
        if not isinstance(value, Node) or value._is_none() or value._is_missing() or value._is_interpolation():
            continue
        if isinstance(value, DictConfig):
            if inner is not None:
                _wrap_single_names(value, inner)
        elif hints[key] == list[str] and isinstance(value._value(), str):
            node[key] = [value._value()]


def _dataclass_of(schema: type, name: str) -> type | None:
    """The dataclass that field ``name`` holds (itself or as a list's element), if any."""
    hint = typing.get_type_hints(schema)[name]
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _dotted_keys(schema: type, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for item in dataclasses.fields(schema):
        inner = _dataclass_of(schema, item.name)
        keys.append(prefix + item.name)
        if inner is not None:
            keys.extend(_dotted_keys(inner, f"{prefix}{item.name}."))
    return keys
