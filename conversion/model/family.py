"""Model families: what a family declares, and how it is found.

    FAMILY = Family("llama", rules=decoder_rules(*ATTENTION, *SWIGLU), read=unbiased_decoder)

A file in ``families/`` with a ``FAMILY`` is a built-in. Anybody's own is named as ``package.module:FAMILY`` or
``path/to/file.py:FAMILY`` in model.families, and by --family of the conversion commands. An ``Architecture`` carries
that name with it, so that worker processes and other hosts find the family too.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture
from conversion.model.hf_config import decoder
from conversion.model.rules import EMBEDDING_NAME, OUTPUT_NAME, SIZES, Rules
from megatron_retool.errors import InputError
from megatron_retool.registry import ExtensionError, load_object

KEY = "model.families"
LANGUAGE_MODEL = (
    'python -c "from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer; '
    "import json; a, b = 'DIR', 'DIR-text'; w = AutoModelForImageTextToText.from_pretrained(a, dtype='auto'); "
    "t = w.config.text_config.to_dict(); "
    "k = t.pop('model_type').replace('_vl_text', '').replace('_vl_moe_text', '_moe'); "
    "t['rope_parameters'] = {n: v for n, v in t['rope_parameters'].items() if k[:6] == 'qwen3_5' or n[:5] != 'mrope'}; "
    "t |= {'tie_word_embeddings': w.config.tie_word_embeddings, 'architectures': None}; "
    "m = AutoModelForCausalLM.from_config(AutoConfig.for_model(k, **t), dtype=w.dtype); "
    "m.model.load_state_dict(w.model.language_model.state_dict()); m.lm_head.load_state_dict(w.lm_head.state_dict()); "
    "s = json.load(open(a + '/config.json'))['text_config']; "
    "m.config.full_attention_interval = s.get('full_attention_interval', 4); "
    'm.save_pretrained(b); AutoTokenizer.from_pretrained(a).save_pretrained(b)"'
)
"""Saves the language model of a model with a tower for images, with the model_type, the names and the keys that a model
of language alone has, and the key of Qwen3.5's config.json that transformers leaves out and SGLang reads."""


@dataclass(frozen=True)
class Family:
    """Decoders that share a table of weights and a way to read config.json.

    Attributes:
        model_type: of config.json, as transformers has it.
        rules: the table; see ``rules``.
        read: config.json -> the fields of ``Architecture`` that it decides. Raises UnsupportedArchitecture for what the
            learner does not compute.
        engine_classes: name in config.json's ``architectures`` -> SGLang's class as "module:class". Engines on CPU
            start faster with it; SGLang finds classes that it knows without.
        aliases: other values of model_type, of models whose computation and tensors are the family's. transformers
            knows them by code from the hub, which nothing here runs.
        block_fp8: the form of block-FP8 weights that SGLang's class of the family takes, see ``block_fp8.FORMS``.
        predictors: the table of a layer for multi-token prediction, where the learner can train one, see
            ``rules.predictor_rules``.
        predictor_copies: Megatron-Core's name -> Hugging Face's, with ``{behind}``, of what a checkpoint has once more
            for each of these layers.
        predictor_hidden_first: such a layer projects the hidden state before the embedding, not behind it.
        unannounced_predictors: how many of these layers a model has whose config.json does not count them.
        within: model_type of models with a tower for images, whose language model is of the family.
    """

    model_type: str
    rules: Rules
    read: Callable[[ConfigReader], Mapping[str, Any]] = decoder
    engine_classes: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    block_fp8: Literal["fp8", "compressed-tensors"] = "fp8"
    within: tuple[str, ...] = ()
    predictors: Rules = ()
    predictor_copies: Mapping[str, str] = field(default_factory=dict)
    predictor_hidden_first: bool = False
    unannounced_predictors: int = 0

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every value of model_type that means the family."""
        return (self.model_type, *self.aliases)

    def __post_init__(self) -> None:
        names = {rule.mcore for rule in self.rules}
        if missing := {EMBEDDING_NAME, OUTPUT_NAME} - names:
            raise InputError(f"family {self.model_type!r}: rules lack {', '.join(sorted(missing))}: use decoder_rules")
        sizes = {
            size
            for rule in (*self.rules, *self.predictors)
            for shape in (*rule.shapes, rule.sections)
            for size in shape
        }
        if unknown := sizes - set(SIZES):
            raise InputError(
                f"family {self.model_type!r}: {', '.join(sorted(unknown))} in rules is not one of {', '.join(SIZES)}"
            )


@functools.cache
def built_in_families() -> Mapping[str, Family]:
    """The families of ``families/`` by model_type."""
    place = "conversion.model.families"
    package = importlib.import_module(place)
    modules = [importlib.import_module(f"{place}.{result.name}") for result in pkgutil.iter_modules(package.__path__)]
    return MappingProxyType({module.FAMILY.model_type: module.FAMILY for module in modules})


def load_family(target: str) -> Family:
    """The family that ``package.module:FAMILY`` or ``path/to/file.py:FAMILY`` names.

    Raises:
        ExtensionError: it cannot be imported, or is no ``Family``.
    """
    result = load_object(KEY, target, known=tuple(built_in_families()))
    if not isinstance(result, Family):
        kind = result.__name__ if isinstance(result, type) else type(result).__name__
        raise ExtensionError(
            f"{KEY}={target}: it is a {kind}, not a conversion.model.family.Family: write "
            'FAMILY = Family("<model_type>", rules=decoder_rules(…), read=…)'
        )
    return result


def load_families(targets: Sequence[str]) -> dict[str, tuple[str, Family]]:
    """model_type, or alias, -> (target, family) of every one of model.families.

    Raises:
        ExtensionError: as ``load_family``, or two of them have one model_type.
    """
    loaded: dict[str, tuple[str, Family]] = {}
    for target in targets:
        family = load_family(target)
        for name in family.model_types:
            if name in loaded:
                raise ExtensionError(
                    f"{KEY}: {loaded[name][0]} and {target} both declare model_type={name!r}: name one of them"
                )
            loaded[name] = (target, family)
    return loaded


def find_family(model_type: str, added: Sequence[str] = ()) -> tuple[str | None, Family]:
    """The family of a model: among ``added`` (values of model.families) first, then among the built-in ones.

    Returns:
        The target that declares it (None: built-in, and with a file's path absolute), and the family.

    Raises:
        UnsupportedArchitecture: none of them has this model_type.
        ExtensionError: as ``load_families``.
    """
    own = load_families(added)
    known = {name: family for family in built_in_families().values() for name in family.model_types}
    if model_type in own:
        target, family = own[model_type]
        return _absolute(target), family
    if inner := " or ".join(name for name, family in built_in_families().items() if model_type in family.within):
        raise UnsupportedArchitecture(
            f"model_type={model_type!r} has a tower for images, which is not trained, around its language model "
            f"({inner}): save only the latter, with this directory in DIR's place: {LANGUAGE_MODEL}"
        )
    if model_type not in known:
        raise UnsupportedArchitecture(
            f"model_type={model_type!r} is not one of {', '.join((*own, *known))}; declare it in a file of your own "
            f"(docs/extending.md) and name that in {KEY}, or with --family for a conversion"
        )
    return None, known[model_type]


def known_to_transformers(hf_config: Mapping[str, Any], added: Sequence[str] = ()) -> dict[str, Any]:
    """config.json with the family's model_type in place of an alias; of a model of no family as it is.

    Raises:
        ExtensionError: as ``load_families``.
    """
    try:
        return {**hf_config, "model_type": find_family(hf_config.get("model_type", ""), added)[1].model_type}
    except UnsupportedArchitecture:
        return dict(hf_config)


def engine_class(architecture: str, added: Sequence[str] = ()) -> str | None:
    """SGLang's "module:class" for a name in config.json's ``architectures``, where a family declares it.

    Raises:
        ExtensionError: as ``load_families``.
    """
    for family in (*(family for _, family in load_families(added).values()), *built_in_families().values()):
        if architecture in family.engine_classes:
            return family.engine_classes[architecture]
    return None


def _absolute(target: str) -> str:
    place, _, attribute = target.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else target
