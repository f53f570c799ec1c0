"""Which settings of a run's config.yaml the present configuration changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_retool.config.hidden_values import without_secrets
from megatron_retool.config.tree import Config, walk


def changed_settings(path: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in the file, value now), in the order of the configuration.

    A setting that the file does not have, because it is younger than the file, had its default. A file that cannot be
    read changes nothing.
    """
    try:
        stored = OmegaConf.load(path)
        written = OmegaConf.to_container(stored) if isinstance(stored, DictConfig) else {}
    except Exception:  # it only serves a remark: whatever is wrong with it, the run does not depend on it
        return {}
    if not written:
        return {}
    defaults, changed = _plain(Config()), {}
    for key, now in _plain(config).items():
        before = _value_at(written, key, defaults[key])
        if before != now:
            changed[key] = (before, now)
    return changed


def _plain(config: Config) -> dict[str, Any]:
    """Every setting that holds no further ones, by its dotted key, as YAML types."""
    result = {}
    for key, _, value in walk(config):
        if not dataclasses.is_dataclass(value) and "[" not in key:
            elements = value if isinstance(value, list) else []
            plain = [dataclasses.asdict(e) if hasattr(e, "__dataclass_fields__") else e for e in elements] or value
            result[key] = without_secrets(plain)
    return result


def _value_at(node: Any, key: str, default: Any) -> Any:
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node
