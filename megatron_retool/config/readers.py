"""Settings that are read in some configurations only, and what reads them.

A setting that is given where nothing reads it is a mistake of its author, who takes it to do something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_retool.algorithms.settings import BUILT_IN, READ_BY
from megatron_retool.config.reward import JudgeConfig


@dataclass(frozen=True)
class _Reader:
    """``keys``, below ``section``, are read where ``reads`` says so of the settings' values by dotted key.

    Attributes:
        words: the setting to change, as it stands in the message.
    """

    section: str
    keys: tuple[str, ...]
    reads: Callable[[Callable[[str], Any]], bool]
    words: str


def _one_of(key: str, *values: object) -> Callable[[Callable[[str], Any]], bool]:
    return lambda value: value(key) in values


def _built_ins() -> Iterator[_Reader]:
    for name, readers in READ_BY.items():
        setting = f"algorithm.{name}"
        for key, targets in readers.items():

            def reads(value: Callable[[str], Any], setting: str = setting, targets: tuple[str, ...] = targets) -> bool:
                # What one's own function reads is known only where it is imported.
                return value(setting) in targets or value(setting) not in BUILT_IN[setting.rpartition(".")[2]]

            yield _Reader("algorithm", (key,), reads, f"{setting}={' or '.join(targets)}")


def _length_penalty(mode: str) -> Callable[[Callable[[str], Any]], bool]:
    """Whether reward.overlong.mode is ``mode``, or a function of one's own, which may take the same settings."""
    return lambda value: value("reward.overlong.mode") == mode or ":" in value("reward.overlong.mode")


READERS: tuple[_Reader, ...] = (
    *_built_ins(),
    _Reader(
        "algorithm.adaptive_sampling",
        ("stages", "easy_accuracy", "easy_batches", "easy_n", "hard_accuracy", "hard_n"),
        _one_of("algorithm.adaptive_sampling.enable", True),
        "algorithm.adaptive_sampling.enable=true",
    ),
    _Reader(
        "algorithm",
        ("adaptive_kl_horizon",),
        lambda value: value("algorithm.adaptive_kl_target") is not None,
        "algorithm.adaptive_kl_target",
    ),
    _Reader(
        "weight_sync",
        ("check_every",),
        _one_of("weight_sync.check_log_probs", True),
        "weight_sync.check_log_probs=true",
    ),
    _Reader("weight_sync", ("delta_whole_every",), _one_of("weight_sync.delta", True), "weight_sync.delta=true"),
    _Reader("trainer", ("max_age",), _one_of("trainer.mode", "async"), "trainer.mode=async"),
    _Reader(
        "algorithm.distillation",
        ("divergence_weight", "top_k"),
        lambda value: value("algorithm.distillation.divergence") != "none",
        "algorithm.distillation.divergence",
    ),
    _Reader(
        "algorithm.distillation",
        ("beta",),
        _one_of("algorithm.distillation.divergence", "jensen_shannon"),
        "algorithm.distillation.divergence=jensen_shannon",
    ),
    _Reader(
        "reward.overlong",
        ("penalty", "buffer_length"),
        _length_penalty("soft_punish"),
        "reward.overlong.mode=soft_punish",
    ),
    _Reader("reward.overlong", ("pieces",), _length_penalty("piecewise"), "reward.overlong.mode=piecewise"),
    _Reader(
        "reward.overlong", ("kwargs",), _length_penalty(""), "a reward.overlong.mode of one's own (FILE.py:FUNCTION)"
    ),
    _Reader(
        "reward.judge",
        tuple(field.name for field in dataclasses.fields(JudgeConfig)),
        _one_of("reward.function", "judge"),
        "reward.function=judge",
    ),
    _Reader(
        "algorithm.rollout_correction",
        ("mode_kwargs",),
        lambda value: ":" in value("algorithm.rollout_correction.mode"),
        "an algorithm.rollout_correction.mode of one's own (FILE.py:FUNCTION)",
    ),
    _Reader(
        "trainer",
        ("resume_from_path",),
        _one_of("trainer.resume_mode", "resume_path"),
        "trainer.resume_mode=resume_path",
    ),
    _Reader(
        "learner.lora",
        ("alpha", "targets", "seed", "path", "sync"),
        lambda value: bool(value("learner.lora.rank")),
        "learner.lora.rank above 0",
    ),
    _Reader(
        "rollout.engine.adapters",
        ("targets", "per_batch", "backend"),
        lambda value: bool(value("rollout.engine.adapters.max_rank")) or value("learner.lora.sync") == "adapter",
        "rollout.engine.adapters.max_rank above 0",
    ),
    _Reader("trainer", ("best_metric",), lambda value: bool(value("trainer.keep_best")), "trainer.keep_best above 0"),
)


def unread_settings(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that differ from their default and are not read, each with the setting that would read them.

    Args:
        values: by dotted key; a key that is not there has its default.
        defaults: of every key.
    """

    def value(key: str) -> Any:
        return values.get(key, defaults[key])

    for reader in READERS:
        if reader.reads(value):
            continue
        for name in reader.keys:
            key = f"{reader.section}.{name}"
            if value(key) != defaults[key]:
                yield key, reader.words
