"""Reading the configuration: files that extend one another, then ``dotted.key=value`` overrides."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_retool.config.base import ConfigError
from megatron_retool.config.hidden_values import marked, with_secrets, without_secrets
from megatron_retool.config.schema import fitted, section_of, type_hints
from megatron_retool.config.tree import Config, check_values, made_deterministic, validate


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, apply ``dotted.key=value`` overrides, check every key and type, validate, freeze.

    Raises:
        ConfigError: the file cannot be read or holds no mapping, a key is unknown, a value has the wrong type or lies
            outside its range, or ``validate`` finds a contradiction.
    """
    layers = [] if path is None else _read_file(Path(path), ())
    layers += [(_source(override), _read_override(override)) for override in overrides]
    settings: dict[str, Any] = {}
    for source, layer in layers:
        settings = _merged(settings, fitted(layer, Config, root=Config, source=source))
    config: Config = _built(Config(), settings)
    if "${" in repr(settings):
        config = _built(Config(), fitted(_resolved(dataclasses.asdict(config)), Config, root=Config))
    config = made_deterministic(config)
    validate(config)
    return config


def _merged(settings: Any, later: Any) -> Any:
    """``later`` over ``settings``: mappings key by key, everything else as a whole."""
    if not isinstance(settings, dict) or not isinstance(later, dict):
        return later
    return settings | {key: _merged(settings.get(key), value) for key, value in later.items()}


def _built(section: Any, settings: Mapping[str, Any]) -> Any:
    """``section``, a dataclass of the tree, with ``settings`` of the right types in it."""
    values, schema = {}, section.__class__
    for name, value in settings.items():
        present, inner = getattr(section, name), section_of(type_hints(schema)[name])
        if dataclasses.is_dataclass(present) and isinstance(value, Mapping):
            value = _built(present, value)
        elif inner is not None and isinstance(value, list):
            value = [_built(inner(), each) if isinstance(each, Mapping) else each for each in value]
        values[name] = value
    return dataclasses.replace(section, **values)


def _resolved(settings: Mapping[str, Any]) -> Any:
    """``settings`` with what ``${…}`` stands for; ConfigError where that is nothing."""
    try:
        return marked(OmegaConf.to_container(OmegaConf.create(dict(settings)), resolve=True), settings)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or "a setting"
        raise ConfigError(f"{key}: {_first_line(error)}") from error


def _read_file(path: Path, extended_by: tuple[Path, ...]) -> list[tuple[str, dict[str, Any]]]:
    """The file's settings with its path, after those of the files that it extends."""
    origin = f", which {extended_by[-1]} extends," if extended_by else ""
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name longer than any file's
        raise ConfigError(f"config file {path}{origin} cannot be read: {error.strerror}") from error
    if is_directory:
        raise ConfigError(f"config file {path}{origin} is a directory: name a YAML file")
    if not is_file:
        raise ConfigError(f"config file {path}{origin} does not exist")
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError(
            f"config file {path}{origin} has {path.stat().st_size / 2**20:.0f} MiB, and settings have at most "
            f"{_MOST_BYTES // 2**20}: is it a YAML file of settings?"
        )
    try:
        loaded = OmegaConf.load(path)
    except PermissionError:
        raise ConfigError(f"config file {path}{origin} may not be read: change its permissions") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {path} is not text in UTF-8 (byte {error.start}): is it a YAML file? Save it as UTF-8"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
        loaded = None  # a number or text
    except Exception as error:
        raise ConfigError(f"config file {path} is not valid YAML: {_yaml_problem(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {path} must hold a mapping at its top level")
    settings = _anchored(OmegaConf.to_container(loaded), path.parent)
    base = settings.pop("extends", None)
    if base is None:
        return [(str(path), settings)]
    if not isinstance(base, str):
        raise ConfigError(f"config file {path}: extends must name one file, not {base!r}")
    chain = (*extended_by, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise ConfigError(f"config file {path}: extends: {base} leads back to itself")
    return [*_read_file(path.parent / base, chain), (str(path), settings)]


_MOST_BYTES = 4 * 2**20
_DOTTED_KEY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def _read_override(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    source = _source(override)
    if not equals:
        hint = f": did you mean --config {override}?" if override.endswith((".yaml", ".yml")) else ""
        raise ConfigError(f"{source} is not of the form dotted.key=value{hint}")
    if "[" in key:
        raise ConfigError(f"{source}: a list is replaced as a whole: {key.partition('[')[0]}=[…]")
    if not _DOTTED_KEY.fullmatch(key):
        raise ConfigError(f"{source}: {key!r} is no key; write it as dotted.key=value, without spaces")
    try:
        layer: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except Exception as error:
        raise ConfigError(f"{source}: the value is not valid YAML: {_yaml_problem(error)}") from error
    if not value and _is_text(key):
        _put(layer, key, "")
    anchored: dict[str, Any] = _anchored(layer, Path.cwd())
    return anchored


def _source(override: str) -> str:
    return f"override {override if len(override) <= 200 else override[:199] + '…'!r}"


def _is_text(key: str) -> bool:
    """Whether ``key=`` without a value means empty text, and not null."""
    schema: Any = Config
    for name in key.split("."):
        section = section_of(schema)
        schema = None if section is None else type_hints(section).get(name)
    return schema is str


def _put(layer: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        layer = layer[section]
    layer[name] = value


def _yaml_problem(error: Exception) -> str:
    """What a YAML parser says, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem is not None:
        mark = error.problem_mark
        return error.problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


_FILE_AND_OBJECT = re.compile(r"(?P<file>[^:{}$]+\.py):[A-Za-z_][\w.]*")
_RULE = re.compile(r"(?P<unit>token|sequence)\s+(?P<target>[^\s:]+\.py:[A-Za-z_][\w.]*)(?P<rest>\s.*)")
"""A rejection rule with a statistic of one's own (algorithms/rejection_rules.py)."""


def _anchored(node: Any, directory: Path) -> Any:
    """``node`` with targets of the form file.py:object made absolute: beside the file that names them, else below the
    working directory. So they mean the same in every process of the run, and in the configuration that it leaves
    behind."""
    if isinstance(node, dict):
        # Keys too: trainer.logger_kwargs is by the logger's name.
        return {_anchored(key, directory): _anchored(value, directory) for key, value in node.items()}
    if isinstance(node, list):
        return [_anchored(value, directory) for value in node]
    if isinstance(node, str) and (rule := _RULE.fullmatch(node)):
        return f"{rule['unit']} {shlex.quote(_anchored(rule['target'], directory))}{rule['rest']}"
    match = _FILE_AND_OBJECT.fullmatch(node) if isinstance(node, str) else None
    if match is not None and not Path(match["file"]).is_absolute():
        places = [base / match["file"] for base in (directory, Path.cwd())]
        result = next((place for place in places if place.is_file()), None)
        if result is not None:
            return f"{result.resolve()}{node[match.end('file') :]}"
    return node


def with_settings(section: Any, settings: Mapping[str, Any], key: str) -> Any:
    """A copy of ``section``, one of the tree's dataclasses, with ``settings`` in it.

    Args:
        key: dotted key of ``settings``, for messages.

    Raises:
        ConfigError: a name is unknown, or a value has the wrong type or lies outside its range.
    """
    known = [item.name for item in dataclasses.fields(section)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{key}.{name} is unknown; the settings are {', '.join(known)}")
    result = _built(section, fitted(settings, type(section), root=Config, prefix=f"{key}."))
    check_values(result, f"{key}.")
    return result


def save_config(config: Config, path: str | Path, secrets: bool = False) -> None:
    """Write the resolved tree as YAML that ``load_config`` reads back.

    Args:
        secrets: with what hidden_values.py leaves out; the file can then be read by its owner only.
    """
    plain = dataclasses.asdict(config)
    if secrets:
        Path(path).touch(mode=0o600)
        Path(path).chmod(0o600)
    OmegaConf.save(OmegaConf.create(with_secrets(plain) if secrets else without_secrets(plain)), path)
