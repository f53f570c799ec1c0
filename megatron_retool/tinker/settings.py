"""The configuration of a server of the Tinker protocol: what follows from its few settings, and what does not go."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_retool.config import Config, ConfigError, LearnerConfig, ModelConfig, TinkerConfig, validate
from megatron_retool.config.accumulation import check_runs
from megatron_retool.data.tokenizer import TOKENIZER_FILES
from megatron_retool.tinker.served_model import ServedModel

RANK = 32
"""Of runs, where learner.lora.rank is not set: that of Tinker's clients."""


def server_config(config: Config, directory: Path) -> Config:
    """``config`` with adapters in learner and engines, and ``directory`` as the run's.

    Args:
        config: model.path is a Hugging Face directory.

    Raises:
        ConfigError: settings do not go with a server of runs.
    """
    # Only trajectories of one group share a prefix; a run's recipe, which may name its model here, often says so.
    learner, engine = dataclasses.replace(config.learner, share_prefixes=False), config.rollout.engine
    if config.cluster.placement == "colocated" and config.cluster.gpus_per_node:
        raise ConfigError(
            "cluster.placement=colocated lets learner and engines take turns on the GPUs, and the server needs both at "
            "any time: set it to disaggregated"
        )
    if engine.backend != "sglang":
        raise ConfigError(f"rollout.engine.backend={engine.backend} loads no adapters: set it to sglang")
    if learner.lora.path is not None:
        raise ConfigError(
            f"learner.lora.path={learner.lora.path}: every run begins with an adapter of its own: set it to null"
        )
    lora = learner.lora if learner.lora.rank else dataclasses.replace(learner.lora, rank=RANK)
    targets = [each for each in lora.targets if each != "experts"]
    architecture = config.model.architecture()
    if "experts" in lora.targets and architecture.is_moe:
        raise ConfigError(
            "learner.lora.targets names experts, whose adapters the engines do not load: set it to [attention, mlp]"
        )
    # Snapshots are sent as they are saved, and never by a weight sync.
    lora = dataclasses.replace(lora, targets=targets, sync="merged")
    adapters = dataclasses.replace(engine.adapters, max_rank=max(lora.rank, engine.adapters.max_rank), targets=targets)
    engine = dataclasses.replace(engine, adapters=adapters)
    place = directory.absolute()
    config = dataclasses.replace(
        config,
        learner=dataclasses.replace(learner, lora=lora),
        rollout=dataclasses.replace(config.rollout, engine=engine),
        trainer=dataclasses.replace(config.trainer, runs_dir=str(place.parent), experiment_name=place.name),
    )
    validate(config)
    check_runs(config.learner, architecture.with_predictors() if config.learner.mtp.train else architecture)
    return config


def served_model(
    model: ModelConfig, learner: LearnerConfig, tinker: TinkerConfig, name: str, context: int, *, on_this_machine: bool
) -> ServedModel:
    """What clients may ask of the model of a ``server_config``.

    Args:
        name: of the model's directory.
        context: tokens of a prompt with its sample.
        on_this_machine: clients see this machine's directories.
    """
    path = Path(model.path)
    architecture = model.architecture()
    names = tuple(dict.fromkeys((*tinker.names, name)))
    tokenizer = Path(model.tokenizer_path or path)
    return ServedModel(
        names=names,
        tokenizer=str(tokenizer.absolute()) if on_this_machine else names[0],
        vocabulary=architecture.vocab_size,
        context=context,
        longest_sequence=context,
        most_rank=learner.lora.rank,
        adapts_attention="attention" in learner.lora.targets,
        adapts_mlp="mlp" in learner.lora.targets,
        finds_texts=finds_texts(model),
    )


def finds_texts(model: ModelConfig) -> bool:
    """Whether engines can have the tokenizer, with which they find texts in what they sample."""
    return any((Path(model.path) / name).is_file() for name in TOKENIZER_FILES)
