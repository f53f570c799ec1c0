"""From a verl file to our YAML, and what is to be said about each of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_retool.config import Config, ConfigError
from megatron_retool.config.readers import unread_settings
from megatron_retool.config.tree import default_values
from megatron_retool.config.verl_keys import VerlKey, find
from megatron_retool.from_verl.machine_rules import MACHINE_RULES
from megatron_retool.from_verl.rules import RULES, VerlValues
from megatron_retool.from_verl.shell import UNKNOWN, read_script

_FINE_TUNING = ("model.partial_pretrain", "optim.lr", "data.multiturn.enable", "data.messages_key")
"""Keys of verl's trainer for supervised fine-tuning."""


_MAY_BE_NULL = ("algorithm.rollout_correction.veto_threshold",)
"""Settings of which a rule's None is a value; of others it means our default."""


@dataclass(frozen=True)
class VerlSource:
    """A verl file as it was read.

    Attributes:
        values: verl's dotted key -> value.
        megatron: whether the file names verl's Megatron configuration; None where it names none.
        unknown: keys whose value could not be found out, with what stands there.
    """

    values: dict[str, Any]
    megatron: bool | None = None
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Translation:
    """
    Attributes:
        settings: our dotted key -> value.
        translated: verl's keys with the row that says what stands for them.
        missing: verl's keys without a counterpart, with their row.
        strange: keys that are not verl's.
        decisions: what is left to the reader.
    """

    settings: dict[str, Any]
    translated: dict[str, VerlKey]
    missing: dict[str, VerlKey]
    strange: list[str]
    decisions: list[str]

    def tree(self) -> dict[str, Any]:
        """The settings as nested mappings, sections in our own order."""
        nested: dict[str, Any] = {name: {} for name in Config.__dataclass_fields__}
        for key, value in sorted(self.settings.items(), key=lambda item: item[0].count(".")):
            *sections, name = key.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return {name: section for name, section in nested.items() if section}


def read_source(path: Path) -> VerlSource:
    """A verl YAML, or a shell script that starts verl.

    Raises:
        ConfigError: the file does not exist, cannot be read, or holds no setting of verl's RL trainer.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give a verl YAML, or a shell script that starts verl")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
    source = _read_yaml(path, text) if path.suffix in (".yaml", ".yml") else _read_shell(path, text)
    if any(key in source.values for key in _FINE_TUNING):
        raise ConfigError(
            f"{path} is for verl's supervised fine-tuning: here that is the section sft "
            "(configs/sft_qwen2.5_32b.yaml); config from-verl translates configurations of the RL trainer"
        )
    if not any(find(key) for key in [*source.values, *source.unknown]):
        raise ConfigError(f"{path} holds no setting of verl's, such as algorithm.adv_estimator")
    return source


def _read_shell(path: Path, text: str) -> VerlSource:
    try:
        script = read_script(text)
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for key, value in script.overrides.items():
        if UNKNOWN in value:
            unknown[key] = value.replace(UNKNOWN, "")
            continue
        try:
            values[key] = _container(OmegaConf.create(f"value: {value}" if value else "value: ''"))["value"]
        except Exception:  # a text that YAML takes for something else, such as a time with colons
            values[key] = value
    names = [word for word in script.options if "config-name" in word or word.endswith("_trainer.yaml")]
    return VerlSource(values, any("megatron" in name for name in names) if names else None, unknown)


def _read_yaml(path: Path, text: str) -> VerlSource:
    try:
        tree = OmegaConf.create(text)
    except Exception as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} must hold a mapping at its top level")
    defaults = str(tree.pop("defaults", ""))
    tree.pop("hydra", None)
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for key, value in _leaves(tree):
        (unknown if isinstance(value, _Unresolved) else values)[key] = value
    megatron = True if "megatron" in defaults else (False if "ppo_trainer" in defaults else None)
    return VerlSource(values, megatron, unknown)


class _Unresolved(str):
    """An interpolation that the file does not resolve by itself."""


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in node:
        if name == "_target_":
            continue
        key = prefix + str(name)
        try:
            value = node[name]
        except OmegaConfBaseException:
            raw = OmegaConf.to_container(node, resolve=False)
            assert isinstance(raw, dict)
            if raw[name] != "???":
                yield key, _Unresolved(raw[name])
            continue
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{key}.")
        elif OmegaConf.is_config(value):
            yield key, OmegaConf.to_container(value)
        else:
            yield key, value


def _container(tree: Any) -> dict[Any, Any]:
    result = OmegaConf.to_container(tree)
    assert isinstance(result, dict)
    return result


def translate(source: VerlSource, directory: Path | None = None) -> Translation:
    """Our settings for a verl file; what verl does where the file is silent is written too, where ours is another.

    Args:
        directory: of the file; relative paths in it are looked up there and above it.
    """
    values = VerlValues(source.values, source.megatron, directory)
    for key, text in source.unknown.items():
        if find(key) is not None:
            values.decide(f"{key}={text} has no value in the file: set what stands for it")
    settings: dict[str, Any] = {}
    translated: dict[str, VerlKey] = {}
    missing: dict[str, VerlKey] = {}
    strange = []
    for key, value in source.values.items():
        row = find(key)
        if row is None:
            strange.append(key)
        elif not row.ours:
            missing[key] = row
        else:
            translated[key] = row
            settings |= _converted(values, row, value)
    for rule in (*RULES, *MACHINE_RULES):
        for key, value in rule(values).items():
            if value is None and key not in _MAY_BE_NULL:
                settings.pop(key, None)
            else:
                settings[key] = value
    for key, value in source.values.items():
        for prefix in ("custom_reward_function.reward_kwargs.", "reward.custom_reward_function.reward_kwargs."):
            if key.startswith(prefix):
                settings.setdefault("reward.function_kwargs", {})[key.removeprefix(prefix)] = value
    # verl writes many settings out that its own configuration does not read either.
    for key, _ in list(unread_settings(settings, default_values())):
        del settings[key]
    if not settings.get("model.path"):
        values.decide("model.path is not in the file: set the model's directory or hub id")
    if not settings.get("data.train_files"):
        values.decide("data.train_files is not in the file: set the prompts' files")
    return Translation(settings, translated, missing, strange, values.decisions)


def _converted(values: VerlValues, row: VerlKey, value: Any) -> Mapping[str, Any]:
    """One key's own conversion; the rules have the last word."""
    if row.convert is None or value is None:
        return {}
    try:
        result = row.convert(value)
    except (TypeError, ValueError):
        values.decide(f"{row.verl}={value!r} is not understood: set {row.ours[0]}")
        return {}
    return {} if result is None or result == "null" else {row.ours[0]: result}
