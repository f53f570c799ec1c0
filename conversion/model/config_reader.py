"""Reading ``config.json``: typed look-ups, and the errors of one that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_retool.errors import InputError
from untrusted import clipped

PREDICTORS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Keys of config.json that count layers for multi-token prediction (DeepSeek's, MiniMax's and Qwen3.5's). A count alone
does not say that their tensors are there."""


class UnsupportedArchitecture(InputError):
    """config.json is malformed, or describes a model that no family here covers. The message names the key."""


class MalformedConfig(UnsupportedArchitecture):
    """config.json is no JSON object, or a value has a type that no model has there: nothing can load it."""


def _refused(value: Any) -> type[UnsupportedArchitecture]:
    is_size = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    return UnsupportedArchitecture if is_size else MalformedConfig


class ConfigReader:
    """Typed look-ups in ``mapping`` whose errors name the key. null counts as absent.

    Args:
        place: of the mapping in config.json, which keys are named behind, such as "rope_scaling.".
    """

    def __init__(self, mapping: Mapping[str, Any], place: str = "") -> None:
        self.mapping = mapping
        self._place = place

    def _value(self, key: str, default: Any) -> Any:
        value = self.mapping.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedArchitecture(f"{self._place}{key} is missing")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Raises UnsupportedArchitecture where the value is no text, or absent without a default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is no text")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Raises UnsupportedArchitecture where the value is neither true nor false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is neither true nor false")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Raises UnsupportedArchitecture where the value is no integer from ``least`` to the most that a model has, or
        absent without a default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise _refused(value)(f"{self._place}{key}={shown(value)} is not {kind}")
        if value > (most := _MOST.get(key, MOST)):
            raise UnsupportedArchitecture(f"{self._place}{key}={shown(value)}: no more than {most} is read")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises UnsupportedArchitecture where the value is no positive number that float32 holds, or absent without a
        default."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= LARGEST:
            raise _refused(value)(f"{self._place}{key}={shown(value)} is not a positive number")
        return float(value)

    def items(self, key: str) -> list[Any]:
        """A list; empty where it is absent. Raises UnsupportedArchitecture where the value is none."""
        value = self._value(key, [])
        if not isinstance(value, list):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is no list")
        return value

    def inner(self, key: str) -> ConfigReader:
        """Of a mapping within; empty where it is absent. Raises UnsupportedArchitecture where the value is none."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise MalformedConfig(f"{self._place}{key}={shown(value)} is no mapping")
        return ConfigReader(value, f"{self._place}{key}.")

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.mapping.get(key) is not None

    def with_defaults(self, **values: Any) -> ConfigReader:
        """The same with values for keys that are absent."""
        absent = {key: value for key, value in values.items() if not self.has(key)}
        return ConfigReader({**self.mapping, **absent}, self._place)

    def refuse(self, *keys: str) -> None:
        """Raises UnsupportedArchitecture where one of ``keys`` is set: the learner does not compute what it asks."""
        for key in keys:
            if self.mapping.get(key):
                raise UnsupportedArchitecture(
                    f"{self._place}{key}={shown(self.mapping[key])} is not supported for {self.text('model_type')}"
                )

    def require(self, **expected: Any) -> None:
        """Raises UnsupportedArchitecture where a key has a value that the learner does not compute."""
        for key, value in expected.items():
            if self.mapping.get(key) not in (None, value):
                raise UnsupportedArchitecture(
                    f"{self._place}{key}={shown(self.mapping[key])} is not supported for {self.text('model_type')}: "
                    f"only {shown(value)} is"
                )


MOST = 2**31 - 1
_MOST = {"num_hidden_layers": 4096, "num_experts": 65536, "num_local_experts": 65536, "n_routed_experts": 65536}
"""Of what is counted out, one by one; ``MOST`` of everything else."""
LARGEST = 3e38
_SHOWN = 80


def shown(value: Any) -> str:
    """A value as config.json has it, without its middle where it is long."""
    return clipped(json.dumps(value, default=str), _SHOWN)


DECLARATIONS = ("quantization_config", "compression_config")
"""Keys of config.json that declare quantised weights; the second is compressed-tensors' earlier name."""
MAKE_FULL_PRECISION = (
    "start from the full-precision weights, which conversion/hf_to_mcore.py and mcore_to_hf.py make of block FP8, "
    "MXFP4 and what compressed-tensors and ModelOpt write"
)
"""What to do with quantised weights that only conversions read."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of attention that layer_types names."""
