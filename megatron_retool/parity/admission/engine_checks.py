"""Checks against SGLang: its class takes a model's weights, and its engine computes their log-probs.

One process does so for all models. The engine is one on a CPU, in float32. What no CPU serves, and what a run would be
refused for, is not computed; where SGLang's class knows no window, texts end within it, as a run's have to.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission import comparison
from megatron_retool.parity.admission.outcome import AdmissionVerdict, Check, judged
from sglang_rollout.engine.served_models import WHOLE_PAST, unserved, unserved_on_cpu
from sglang_rollout.engine.weight_sync.engine_classes import Load, Loaded, load_into_engine_classes

KIND, PARAMETERS, LOG_PROBS = "engine", "every parameter of SGLang's class", "log-probs of SGLang's engine"
_WEIGHTS = "model.safetensors"
_STRETCHED = {
    "type": "yarn",
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}


def engine_checks(models: Sequence[tuple[Path, Architecture]], directory: Path, *, wanted: bool) -> list[list[Check]]:
    """Both checks of each model.

    Args:
        models: what transformers saved, with ``comparison.write_reference``'s file beside it, and what it was made of.
        directory: for models as SGLang reads them; it is made here.
        wanted: otherwise neither check applies.
    """
    if not wanted or importlib.util.find_spec("sglang") is None:
        reason = "SGLang is not installed" if wanted else "not asked for"
        return [[_inapplicable(name, reason) for name in (PARAMETERS, LOG_PROBS)] for _ in models]
    directory.mkdir()
    loads, refused = [], []
    for number, (source, architecture) in enumerate(models):
        served = _class_names(source)
        by_class = unserved(architecture, served)
        by_engine = by_class or unserved_on_cpu(architecture, served)
        refused.append((by_class, by_engine))
        if not by_class:
            place = published(source, architecture, served, directory / str(number))
            longest = architecture.sliding_window if WHOLE_PAST.intersection(served) else None
            sequences = [] if by_engine else comparison.engine_sequences(longest)
            loads.append(Load(str(number), str(place), str(place / _WEIGHTS), sequences=sequences))
    try:
        result = load_into_engine_classes(loads, directory) if loads else {}
    except (RuntimeError, OSError) as error:
        result = {load.name: Loaded(str(error), failed=str(error)) for load in loads}
    return [
        [
            _inapplicable(PARAMETERS, by_class) if by_class else _taken(result[str(number)]),
            _inapplicable(LOG_PROBS, by_engine) if by_engine else _computed(result[str(number)], models[number][0]),
        ]
        for number, (by_class, by_engine) in enumerate(refused)
    ]


def _class_names(directory: Path) -> list[str]:
    return json.loads((directory / "config.json").read_text()).get("architectures") or []


def published(source: Path, architecture: Architecture, served: list[str], place: Path) -> Path:
    """The model with a config.json in the form that it came in: transformers 5 leaves keys out that SGLang reads.

    On a CPU SGLang makes the positions of DeepSeek's classes only where they are stretched. The log-probs of these
    classes are not computed there, and weights know no positions, so a model without stretched ones gets some.
    """
    place.mkdir()
    config = {**architecture.hf_config, "architectures": served}
    of_deepseek = architecture.family.startswith("deepseek") or architecture.indexer is not None
    if of_deepseek and architecture.rope_scaling is None:
        config |= {"rope_parameters": None, "rope_theta": architecture.rope_theta, "rope_scaling": _STRETCHED}
    (place / "config.json").write_text(json.dumps(config))
    (place / _WEIGHTS).symlink_to((source / _WEIGHTS).resolve())
    return place


def _inapplicable(name: str, reason: str) -> Check:
    return Check(KIND, name, AdmissionVerdict.NOT_APPLICABLE, reason)


def _taken(loaded: Loaded) -> Check:
    return Check(KIND, PARAMETERS, AdmissionVerdict.FAIL if loaded.wrong else AdmissionVerdict.PASS, loaded.wrong)


def _computed(loaded: Loaded, source: Path) -> Check:
    if loaded.failed:
        return Check(KIND, LOG_PROBS, AdmissionVerdict.FAIL, loaded.failed)
    figures = comparison.compare_engine(loaded.log_probs, source)
    return judged(KIND, LOG_PROBS, figures, comparison.too_far(figures))
