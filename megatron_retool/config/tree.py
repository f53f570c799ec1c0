"""The whole configuration, and the rules between settings of different sections.

Rules within a section stand beside it, in its ``check`` method; ``validate`` calls them all.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.config.algorithm import AlgorithmConfig
from megatron_retool.config.base import ConfigError
from megatron_retool.config.cluster import ClusterConfig
from megatron_retool.config.data import DataConfig
from megatron_retool.config.demo import DemoConfig
from megatron_retool.config.learner import LearnerConfig
from megatron_retool.config.model import ModelConfig
from megatron_retool.config.readers import unread_settings
from megatron_retool.config.reward import RewardConfig
from megatron_retool.config.rollout import RolloutConfig
from megatron_retool.config.sft import SFTConfig
from megatron_retool.config.tinker import TinkerConfig
from megatron_retool.config.tools import ToolsConfig
from megatron_retool.config.trainer import TrainerConfig
from megatron_retool.config.weight_sync import WeightSyncConfig
from megatron_retool.registry import Need


@dataclass(frozen=True)
class Config:
    """All settings of a run, a section each."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    tinker: TinkerConfig = field(default_factory=TinkerConfig)
    demo: DemoConfig = field(default_factory=DemoConfig)

    @property
    def trains_draft(self) -> bool:
        """Engines draft with the layers for multi-token prediction that the learner trains, and get them in syncs."""
        speculative, sync = self.rollout.engine.speculative, self.weight_sync
        return (
            self.learner.mtp.train
            and speculative.algorithm == "EAGLE"
            and speculative.draft_model_path == self.model.path
            and self.rollout.engine.quantization is None
            and sync.round_to is None
            and sync.method in ("tensor", "distributed")
        )


def made_deterministic(config: Config) -> Config:
    """``config``, where trainer.deterministic asks for it with a seed for the engines and without addresses in results.

    A seed that is set stays.
    """
    if not config.trainer.deterministic:
        return config
    rollout, tools = config.rollout, config.tools
    if rollout.engine.random_seed is None:
        engine = dataclasses.replace(rollout.engine, random_seed=config.trainer.seed)
        rollout = dataclasses.replace(rollout, engine=engine)
    interpreter = dataclasses.replace(tools.code_interpreter, hide_addresses=True)
    return dataclasses.replace(config, rollout=rollout, tools=dataclasses.replace(tools, code_interpreter=interpreter))


def validate(config: Config) -> None:
    """Check choices and ranges, every section's own rules, and the rules between sections that need no model.

    Raises:
        ConfigError: naming the key or keys and what would satisfy the rule.
    """
    check_values(config)
    for item in dataclasses.fields(config):
        section = getattr(config, item.name)
        if hasattr(section, "check"):
            section.check()
    learner, algorithm, rollout = config.learner, config.algorithm, config.rollout
    for index, stage in enumerate(config.sft.stages):
        learner.check_optimizer(f"sft.stages[{index}].optimizer", stage.optimizer)
    if rollout.train.n < 2 and Need.GROUPS in algorithm.needs:
        raise ConfigError(
            f"{algorithm.needs[Need.GROUPS]} compares answers of a group: rollout.train.n must be at least 2"
        )
    if algorithm.keeps_reference and not algorithm.distillation.paths:
        learner.lora.check_reference()
    _check_teachers(config.algorithm, config.learner, config.rollout)
    responses = config.data.train_batch_size * rollout.train.n
    if responses % learner.mini_batch_size:
        raise ConfigError(
            f"data.train_batch_size x rollout.train.n = {responses} responses are not divisible by "
            f"learner.mini_batch_size={learner.mini_batch_size}"
        )
    if config.weight_sync.round_to is not None and rollout.engine.quantization is not None:
        raise ConfigError(
            f"weight_sync.round_to={config.weight_sync.round_to} imitates a quantised engine, and "
            f"rollout.engine.quantization={rollout.engine.quantization} is one: set one of them to null"
        )
    _check_engines(config.rollout, config.learner, config.weight_sync)
    _check_readers(config)
    if learner.routing_replay == "old_log_probs" and algorithm.rollout_correction.bypass_old_log_probs:
        raise ConfigError(
            "learner.routing_replay=old_log_probs records experts while old log-probs are computed, which "
            "algorithm.rollout_correction.bypass_old_log_probs leaves out: set routing_replay=rollout or none, or "
            "bypass_old_log_probs=false"
        )
    if config.trainer.deterministic and (
        by_timing := _what_timing_decides(config.trainer, rollout, algorithm, learner.lora.sends_adapter)
    ):
        raise ConfigError(
            f"trainer.deterministic=true: with {by_timing[0]} {by_timing[1]} depends on how long things take; change "
            "one of the two"
        )
    if rollout.staleness and config.cluster.placement == "colocated" and config.cluster.gpus_per_node:
        raise ConfigError(
            "rollout.staleness > 0 generates while the learner trains, which cluster.placement=colocated cannot: "
            "choose disaggregated, or staleness 0"
        )
    if config.trainer.mode == "async":
        _check_async(config.rollout, config.algorithm, config.cluster)
    for number, stage in enumerate(config.sft.stages):
        if stage.loss == "top_k" and learner.mtp.train:
            raise ConfigError(
                f"sft.stages[{number}].loss=top_k does not go with learner.mtp.train=true, whose layers learn the "
                "tokens that were written: set that to false"
            )
    if config.weight_sync.delta:
        _check_delta(config.weight_sync, config.rollout, config.learner)
    if config.weight_sync.method == "sharded":
        _check_sharded(config.weight_sync, config.rollout, config.learner)
    if learner.match_engine == "exact":
        _check_exact(config.learner, config.rollout, config.weight_sync)


def _check_async(rollout: RolloutConfig, algorithm: AlgorithmConfig, cluster: ClusterConfig) -> None:
    """Raise ConfigError where a setting does not go with trainer.mode=async."""
    dynamic = algorithm.dynamic_sampling
    colocated = cluster.placement == "colocated" and bool(cluster.gpus_per_node)
    reasons = {
        "cluster.placement=colocated": (
            colocated,
            "engines generate while the learner trains: choose disaggregated, or trainer.mode=sync",
        ),
        f"rollout.staleness={rollout.staleness}": (
            bool(rollout.staleness),
            "it plans whole steps ahead: set it to 0, and trainer.max_age to the updates that a token may be behind",
        ),
        "rollout.partial.enable=true": (
            rollout.partial.enable,
            "responses are never stopped at the end of a step, so there is nothing to pause: set it to false",
        ),
        f"algorithm.dynamic_sampling.surplus={dynamic.surplus}": (
            dynamic.surplus == "next_step",
            "complete groups wait in the buffer in any case: leave it out",
        ),
    }
    _refuse_first("trainer.mode=async", reasons)


def _refuse_first(subject: str, reasons: Mapping[str, tuple[bool, str]], otherwise: str = "") -> None:
    """Raise ConfigError for the first setting that does not go with ``subject``.

    Args:
        reasons: by the setting as it is, whether it is refused, and why and what to do.
        otherwise: what else may be done.
    """
    for setting, (refused, why) in reasons.items():
        if refused:
            raise ConfigError(f"{setting} does not go with {subject}: {why}{otherwise}")


def _check_teachers(algorithm: AlgorithmConfig, learner: LearnerConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError where teachers would score another distribution than the one that is sampled."""
    if len(algorithm.distillation.paths) > 1 and learner.share_prefixes:
        raise ConfigError(
            "learner.share_prefixes=true does not go with several teachers in the learner, which read their rows "
            "apart: set it to false"
        )
    train = rollout.train
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    for name, value in whole.items() if algorithm.distillation.teachers else ():
        if getattr(train, name) != value:
            raise ConfigError(
                f"algorithm.distillation.teachers score at temperature 1 over the whole vocabulary, and "
                f"rollout.train.{name}={getattr(train, name)} samples from another distribution: set it to {value}"
            )


def _check_readers(config: Config) -> None:
    """Raise ConfigError where a setting is given that nothing reads."""
    values = {key: value for key, _, value in walk(config)}
    for key, words in unread_settings(values, default_values()):
        raise ConfigError(
            f"{key}={_as_yaml(values[key])}: nothing reads it in this configuration; it is read with {words}: set "
            "that, or leave it out"
        )


@functools.cache
def default_values() -> Mapping[str, Any]:
    """Every setting's default by its dotted key."""
    return {key: value for key, _, value in walk(Config())}


def _check_engines(rollout: RolloutConfig, learner: LearnerConfig, sync: WeightSyncConfig) -> None:
    """What engines' settings say of weight sync, placement and replay."""
    engine = rollout.engine
    speculative = engine.speculative
    if learner.lora.sends_adapter:
        _check_adapter_sync(rollout, sync)
    if sync.verify and (engine.expert_parallel_size or 1) * engine.attention_data_parallel_size > 1:
        raise ConfigError(
            "weight_sync.verify=true knows how engines split matrices over all their GPUs, and not how they lay them "
            "out with rollout.engine.expert_parallel_size or attention_data_parallel_size above 1: set it to false"
        )
    if speculative.algorithm is None:
        return
    said = f"rollout.engine.speculative.algorithm={speculative.algorithm}"
    if learner.routing_replay == "rollout":
        raise ConfigError(
            f"{said} does not go with learner.routing_replay=rollout: which of the guessed tokens' experts stay is not "
            "known to be right. Set routing_replay to old_log_probs or none"
        )
    if speculative.draft_model_path is not None and sync.method == "disk":
        raise ConfigError(
            f"{said} needs weight_sync.method=tensor or distributed: from files SGLang loads the policy's weights into "
            "the draft model too"
        )
    if speculative.draft_model_path is not None and sync.verify:
        raise ConfigError(f"{said} with a draft model needs weight_sync.verify=false: its weights are hashed too")


def _check_adapter_sync(rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> None:
    """Raise ConfigError where engines cannot compute adapters beside their model."""
    engine = rollout.engine
    for key, value, plain, why in (
        ("rollout.engine.backend", engine.backend, "sglang", "only SGLang's servers load adapters"),
        ("rollout.engine.quantization", engine.quantization, None, "syncs bring the weights that are quantised"),
        ("weight_sync.round_to", weight_sync.round_to, None, "syncs bring the weights that are rounded"),
        (
            "rollout.engine.attention_data_parallel_size",
            engine.attention_data_parallel_size,
            1,
            "SGLang then lets no adapter be unloaded while it runs",
        ),
    ):
        if value != plain:
            raise ConfigError(
                f"learner.lora.sync=adapter does not go with {key}={value}: {why}. Set it to {_as_yaml(plain)}, or "
                "learner.lora.sync=merged"
            )
    if engine.speculative.algorithm == "STANDALONE":
        raise ConfigError(
            "learner.lora.sync=adapter does not go with rollout.engine.speculative.algorithm=STANDALONE: SGLang has "
            "adapters beside NGRAM, EAGLE and EAGLE3 only. Use one of these, or learner.lora.sync=merged"
        )


def _check_exact(learner: LearnerConfig, rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> None:
    """Raise ConfigError where engine and learner cannot compute the same numbers."""
    engine = rollout.engine
    one = {
        "learner.tensor_model_parallel_size": learner.tensor_model_parallel_size,
        "learner.context_parallel_size": learner.context_parallel_size,
        "learner.expert_model_parallel_size": learner.expert_model_parallel_size,
        "rollout.engine.tensor_parallel_size": engine.tensor_parallel_size,
    }
    reasons = {
        f"{key}={size}": (size > 1, "sums over ranks have another order: set it to 1") for key, size in one.items()
    }
    reasons |= {
        f"rollout.engine.dtype={engine.dtype}": (
            engine.dtype not in ("auto", learner.dtype),
            f"both compute in one format: set it to {learner.dtype}, which learner.dtype is",
        ),
        f"learner.dtype={learner.dtype}": (learner.dtype == "float16", "take float32 or bfloat16"),
        f"rollout.engine.backend={engine.backend}": (engine.backend != "sglang", "set it to sglang"),
        f"rollout.engine.device={engine.device}": (
            {engine.device, learner.device} == {"cpu", "cuda"},
            f"both compute on one kind of device: set it to {learner.device}, which learner.device is",
        ),
        f"rollout.engine.quantization={engine.quantization}": (engine.quantization is not None, "set it to null"),
        f"rollout.engine.speculative.algorithm={engine.speculative.algorithm}": (
            engine.speculative.algorithm is not None,
            "guesses are checked in passes of their own: set it to null",
        ),
        f"weight_sync.round_to={weight_sync.round_to}": (
            weight_sync.round_to is not None,
            "engines would have other weights: set it to null",
        ),
        f"learner.fp8.recipe={learner.fp8.recipe}": (
            learner.fp8.recipe is not None,
            "products are computed in learner.dtype: set it to null",
        ),
        f"learner.lora.rank={learner.lora.rank}": (bool(learner.lora.rank), "adapters are missing: set it to 0"),
        "learner.mtp.train=true": (learner.mtp.train, "layers for multi-token prediction are missing: set it to false"),
    }
    _refuse_first("learner.match_engine=exact", reasons, ", or set that to none")


def _check_delta(sync: WeightSyncConfig, rollout: RolloutConfig, learner: LearnerConfig) -> None:
    """Raise ConfigError where only changes cannot be sent."""
    engine = rollout.engine
    reasons = {
        "weight_sync.method=disk": (sync.method == "disk", "engines read whole checkpoints: take another method"),
        f"rollout.engine.backend={engine.backend}": (
            engine.backend != "sglang",
            "only SGLang's servers take changes: set it to sglang",
        ),
        f"rollout.engine.quantization={engine.quantization}": (
            engine.quantization is not None,
            "such engines make other numbers of what they get: set it to null",
        ),
        f"rollout.engine.expert_parallel_size={engine.expert_parallel_size}": (
            (engine.expert_parallel_size or 1) > 1,
            "checksums of experts under it are not known: set it to 1",
        ),
        "learner.lora.sync=adapter": (learner.lora.sends_adapter, "adapters are small already"),
    }
    _refuse_first("weight_sync.delta=true", reasons, ", or set delta to false")


def _check_sharded(sync: WeightSyncConfig, rollout: RolloutConfig, learner: LearnerConfig) -> None:
    """Raise ConfigError where weights cannot come in parts."""
    engine = rollout.engine
    reasons = {
        f"rollout.engine.backend={engine.backend}": (
            engine.backend != "sglang",
            "only SGLang's servers take parts: set it to sglang",
        ),
        f"rollout.engine.quantization={engine.quantization}": (
            engine.quantization is not None,
            "a scale may belong to rows of several parts: set it to null",
        ),
        f"weight_sync.round_to={sync.round_to}": (
            sync.round_to is not None,
            "a scale may belong to rows of several parts: set it to null",
        ),
        "weight_sync.verify=true": (
            sync.verify,
            "no rank has the whole tensors, whose checksums the engines say: set it to false",
        ),
        "weight_sync.delta=true": (sync.delta, "its checksums are those of whole tensors: set it to false"),
        "learner.lora.sync=adapter": (learner.lora.sends_adapter, "adapters are small already"),
    }
    _refuse_first("weight_sync.method=sharded", reasons, ", or take another method")


def _what_timing_decides(
    trainer: TrainerConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig, sends_adapter: bool
) -> tuple[str, str] | None:
    """A setting, and what of a run is not decided by its seed because of it."""
    if rollout.replay_dir is not None:
        return None
    if trainer.mode == "async":
        return "trainer.mode=async", "which groups a step takes"
    if rollout.staleness:
        return "rollout.staleness", "which weights sample a token"
    if rollout.partial.enable:
        return "rollout.partial.enable=true", "which responses a step waits for"
    if algorithm.dynamic_sampling.surplus == "next_step":
        return "algorithm.dynamic_sampling.surplus=next_step", "which weights sample a group"
    if rollout.branching.enable:
        return "rollout.branching.enable=true", "which of a group's trajectories fork first"
    if sends_adapter:
        return "learner.lora.sync=adapter", "which requests share a forward pass, and so their last bits,"
    if rollout.engine.backend == "transformers":
        return "rollout.engine.backend=transformers", "which requests share a forward pass, and so their last bits,"
    return None


def check_values(node: Any, prefix: str = "") -> None:
    """Raise ConfigError where a setting below ``node`` is none of its choices, or a number outside its range."""
    for key, item, value in walk(node, prefix):
        choices, allowed = item.metadata.get("choices"), item.metadata.get("range")
        if choices is not None and value not in choices:
            raise ConfigError(f"{key}={_as_yaml(value)} must be one of {', '.join(map(_as_yaml, choices))}")
        numbers = value if isinstance(value, list) else [value]
        if allowed is not None and not all(number is None or number in allowed for number in numbers):
            raise ConfigError(f"{key}={_as_yaml(value)} must be {allowed}")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (broken := _UNPRINTABLE.search(text)):
                raise ConfigError(f"{key}={text!r} holds the control character {broken[0]!r}: remove it")


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that no path, name or prompt holds; new lines and tabs are none."""


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """(dotted key, field, value) of every setting below ``node``."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        yield prefix + item.name, item, value
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{prefix}{item.name}.")
        elif isinstance(value, list):
            for index, element in enumerate(value):
                if dataclasses.is_dataclass(element):
                    yield from walk(element, f"{prefix}{item.name}[{index}].")
