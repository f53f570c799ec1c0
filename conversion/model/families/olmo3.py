"""OLMo 3: OLMo 2 with windows in some of the layers, whose positions are never stretched."""

from __future__ import annotations

from typing import Any

from conversion.model.attention_config import windows_by_layer
from conversion.model.config_reader import ConfigReader
from conversion.model.families import olmo2
from conversion.model.family import Family

FULL_EVERY = 4
"""Without layer_types every fourth layer sees the whole past."""


def read(config: ConfigReader) -> dict[str, Any]:
    """The fields of ``Architecture`` that config.json gives.

    Raises:
        UnsupportedArchitecture: a key asks for what the family does not have here.
    """
    config = config.with_defaults(rope_theta=500000.0)
    fields = olmo2.read(config)
    return {"local_rope_theta": fields["rope_theta"], **fields, **windows_by_layer(config, FULL_EVERY)}


# SGLang serves it with OLMo 2's class.
FAMILY = Family("olmo3", rules=olmo2.FAMILY.rules, read=read)
