"""Which models an admission examines, and what their config.json refuses: nothing here loads torch for that."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.family import find_family, known_to_transformers
from conversion.model.low_precision import full_precision, quantization_of
from megatron_retool.errors import InputError
from megatron_retool.parity.admission.layouts import FEW, NAMED
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.planning.models import MODELS, model_of_each_family

_WHOLE = ("qwen3", "qwen3_moe")
"""Families that stand for the dense ones and those of experts: in every named layout, where a few do for the rest."""


class NotAdmissible(InputError):
    """No family covers the model. The message names the part that is missing."""


@dataclass(frozen=True)
class Request:
    """A model to examine.

    Attributes:
        name: what to call it.
        hf_config: config.json.
        source: its directory, where there is one: for the tokenizer.
        families: of model.families.
        layers: that the shrunk model has. Rounding errors grow with them: with gated delta nets, eight lose digits that
            are compared.
        names: of the layouts; None: all of these, and every product.
    """

    name: str
    hf_config: Mapping[str, Any]
    source: Path | None = None
    families: tuple[str, ...] = ()
    layers: int = 4
    names: tuple[str, ...] | None = FEW


def one_of_each_family() -> list[Request]:
    """A published model of every built-in family."""
    result = []
    for family, name in model_of_each_family().items():
        # Eight layers: virtual pipelines have a use for them.
        more: dict[str, Any] = {"layers": 8, "names": NAMED} if family in _WHOLE else {}
        result.append(Request(name, MODELS[name], **more))
    return result


def read_config(model: str) -> tuple[Mapping[str, Any], Path | None]:
    """config.json of a directory, of a file, or of a published model that ``planning.models`` knows; and the directory.

    Raises:
        NotAdmissible: there is none, or it is no JSON object.
    """
    path = Path(model)
    if model.lower() in MODELS:
        return MODELS[model.lower()], None
    file = path / "config.json" if path.is_dir() else path
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotAdmissible(
            f"{model}: no directory with a config.json, no such file, and no published model that is known here"
        ) from None
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise NotAdmissible(f"{file} is not valid JSON: {error}") from None
    if not isinstance(result, dict):
        raise NotAdmissible(f"{file} holds a {type(result).__name__}, where a mapping with model_type, … is expected")
    directory = path if path.is_dir() else path.parent
    try:
        quantization_of(directory, result)
    except UnsupportedArchitecture as error:
        raise NotAdmissible(str(error)) from None
    return result, directory


def shrunk_config(request: Request) -> dict[str, Any]:
    """config.json of the model that is computed with."""
    return known_to_transformers(shrunk(full_precision(request.hf_config), request.layers), request.families)


def architecture_of(request: Request) -> Architecture:
    """Of the shrunk model.

    Raises:
        NotAdmissible: naming the missing part.
    """
    try:
        Architecture.from_hf_config(full_precision(request.hf_config), request.families)
        return Architecture.from_hf_config(shrunk_config(request), request.families)
    except UnsupportedArchitecture as error:
        raise NotAdmissible(f"{request.name}: {error}{_advice(request)}") from None


def _advice(request: Request) -> str:
    """What the model has that no family of ours has, as a sentence to append; empty where its family refuses a key."""
    with contextlib.suppress(UnsupportedArchitecture):
        find_family(str(request.hf_config.get("model_type")), request.families)
        return ""
    from megatron_retool.parity.admission.missing_parts import known_parts, missing_parts

    names = _tensor_names(request)
    missing = missing_parts(request.hf_config, names)
    if missing:
        return f". Missing parts: {'; '.join(missing)}"
    if not names:
        return ". transformers builds no model of this config.json, so its parts are not known: see docs/extending.md"
    parts = ", ".join(f"*{part}" for part in known_parts(names))
    return f". Every part that its tensors show is there ({parts}): declare the family, see docs/extending.md"


def _tensor_names(request: Request) -> list[str]:
    from megatron_retool.parity.admission.tiny_model import without_memory
    from megatron_retool.parity.stored_tensors import stored_weights

    try:
        return list(stored_weights(without_memory(shrunk_config(request))))
    except Exception:  # transformers has not this model type either, or builds it from other keys
        return []
