"""What can be said against a run before any process is started for it."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path

from conversion.files.checksums import CHECKPOINT_NAME
from conversion.files.directory import COMPANIONS, FORMAT_NAME
from conversion.files.safetensors_headers import HFCheckpointError, check_weights_are_there
from conversion.model.weight_map import WeightMap
from megatron_retool.config import ClusterConfig, Config, ConfigError, LearnerConfig, RolloutConfig, TrainerConfig
from megatron_retool.config.learner import check_operators
from megatron_retool.runs.loggers import check_loggers
from megatron_retool.runs.metrics_file import read_metrics
from run_files.parquet_files import damage_named
from run_files.steps import step_path
from sglang_rollout.engine.served_models import check_longest_text, check_served_model


def check_run(trainer: TrainerConfig, learner: LearnerConfig, cluster: ClusterConfig) -> None:
    """Check what a run needs to be installed; takes no time, for every command that runs.

    Raises:
        ConfigError: the message names the key and the cure.
    """
    check_loggers(trainer)
    if trainer.checkpoint_compression == "zstd" and importlib.util.find_spec("zstandard") is None:
        raise ConfigError(
            "trainer.checkpoint_compression=zstd needs the Python package zstandard: install it (pip install "
            "zstandard), or set it to none"
        )
    check_profiler(trainer, learner, cluster)


def check_profiler(trainer: TrainerConfig, learner: LearnerConfig, cluster: ClusterConfig) -> None:
    """Raise ConfigError where the profiler's tool is not on this machine, or has nothing to record."""
    profiler, world_size = trainer.profiler, learner.world_size
    if profiler.tool == "none":
        return
    if beyond := [rank for rank in profiler.ranks if rank >= world_size]:
        raise ConfigError(
            f"trainer.profiler.ranks names rank {beyond[0]}, and the learner's are 0 to {world_size - 1} "
            f"(learner.world_size={world_size})"
        )
    if profiler.tool == "nsys" and not cluster.gpus_per_node:
        raise ConfigError(
            "trainer.profiler.tool=nsys records CUDA, and cluster.gpus_per_node=0 gives the learner no GPU: take "
            "trainer.profiler.tool=torch"
        )
    if profiler.tool == "nsys" and shutil.which("nsys") is None:
        raise ConfigError(
            "trainer.profiler.tool=nsys needs Nsight Systems, whose program nsys is not on PATH: install it on every "
            "node (package nsight-systems-cli), or take trainer.profiler.tool=torch"
        )


def check_evaluation(run_dir: Path) -> None:
    """Raise ConfigError where a validation's directory is that of a training run, whose metrics it would replace."""
    if any(row["step"] > 0 for row in read_metrics(run_dir / "metrics.jsonl")):
        raise ConfigError(
            f"{run_dir} is a training run, whose metrics this validation would replace: choose another "
            "trainer.experiment_name"
        )


def check_model(config: Config, *, learns: bool) -> None:
    """Check the model's directory, whether the engines serve what it says and, where it ``learns``, its family and how
    learner and model divide.

    A path that is no directory is left to those who load it: ``check_model_path`` says what may be a hub id.

    Raises:
        ConfigError, UnsupportedArchitecture: the message names the directory or the key.
    """
    directory = Path(config.model.path)
    if not config.model.path or not directory.is_dir():
        return
    if not (directory / "config.json").is_file():
        cure = ""
        if (directory / FORMAT_NAME).is_file():
            cure = (
                f". It is a Megatron-Core checkpoint: give it as model.mcore_path, and as model.path the model that it "
                f"comes from, or {directory / COMPANIONS}"
            )
        raise ConfigError(f"model.path={config.model.path} is no Hugging Face model directory: no config.json{cure}")
    check_served_model(config)
    architecture = config.model.architecture() if learns else None
    try:
        check_weights_are_there(directory)
    except HFCheckpointError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    if architecture is None:
        return
    check_longest_text(config.data, config.rollout, config.model, architecture)
    for number, stage in enumerate(config.sft.stages):
        if architecture.longest_text is not None and stage.max_length > architecture.longest_text:
            raise ConfigError(
                f"sft.stages[{number}].max_length={stage.max_length}: the longrope positions of "
                f"model.path={config.model.path} are other ones in longer texts than {architecture.longest_text} "
                "tokens, which the learner does not compute: set it to that at most"
            )
    config.learner.layout(architecture)
    if config.learner.match_engine == "exact":
        check_operators(architecture)
    if config.weight_sync.method == "sharded" and any(mapping.is_stacked for mapping in WeightMap(architecture)):
        raise ConfigError(
            f"weight_sync.method=sharded sends rows and columns, and the experts of model.path={config.model.path} "
            f"({architecture.family}) are stored as one tensor: set it to distributed"
        )
    config.algorithm.distillation.teacher_architectures(architecture, config.learner, config.model.families)
    if config.learner.routing_replay != "none" and not architecture.is_moe:
        raise ConfigError(
            f"learner.routing_replay={config.learner.routing_replay} replays the choice of experts, and "
            f"model.path={config.model.path} ({architecture.family}) has none: set it to none"
        )
    if config.model.mcore_path is not None and not Path(config.model.mcore_path).is_dir():
        raise ConfigError(
            f"model.mcore_path={config.model.mcore_path} is no directory: make it with conversion/hf_to_mcore.py, or "
            "set it to null, and the weights of model.path are read"
        )
    if config.model.mcore_path is not None and CHECKPOINT_NAME.fullmatch(Path(config.model.mcore_path).name):
        raise ConfigError(
            f"model.mcore_path={config.model.mcore_path} is a run's checkpoint, whose weights lie in learner/: give "
            f"{config.model.mcore_path}/learner to begin a new run from them, or resume with trainer.resume_from_path"
        )
    if config.model.mcore_path is not None and not (Path(config.model.mcore_path) / FORMAT_NAME).is_file():
        raise ConfigError(
            f"model.mcore_path={config.model.mcore_path} is no Megatron-Core checkpoint (no {FORMAT_NAME}): make "
            "it with conversion/hf_to_mcore.py, or set it to null, and the weights of model.path are read"
        )


def check_stored_rollouts(rollout: RolloutConfig, learner: LearnerConfig, first_step: int) -> None:
    """Check that ``rollout.replay_dir`` has what the run's first step takes from it.

    Raises:
        ConfigError: it lacks the step's trajectories, or these lack the routed experts that are to be replayed.
        UnreadableFile: the file is damaged.
    """
    import pyarrow.parquet as pq

    if rollout.replay_dir is None:
        return
    key = f"rollout.replay_dir={rollout.replay_dir}"
    file = step_path(Path(rollout.replay_dir), first_step)
    if not file.is_file():
        raise ConfigError(f"{key}: the run begins with step {first_step}, whose {file.name} is not there")
    if learner.routing_replay != "rollout":
        return
    with damage_named(file), pq.ParquetFile(file) as stored:
        name = "routed_experts"
        known = name in stored.schema_arrow.names and any(
            batch.column(0).null_count == 0 for batch in stored.iter_batches(batch_size=1, columns=[name])
        )
    if not known:
        raise ConfigError(
            f"learner.routing_replay=rollout replays the engine's choice of experts, which {file} does not have: "
            f"{key} must name the rollouts of a run with learner.routing_replay=rollout; or set it to none or "
            "old_log_probs here"
        )


def check_extensions(config: Config) -> None:
    """Load what the configuration names (docs/extending.md), and try on made-up input what can be tried.

    What needs the tokenizer or the data is checked when they are there: agents, and the reward function once more on
    the first prompt.

    Raises:
        ConfigError, ExtensionError: one cannot be imported, has a wrong signature, raises, or returns what is of no
            use. The message names the key, the object and the cure.
    """
    # Their modules take longer to import than everything that is checked above.
    from megatron_retool.rewards.manager import added_to_reward, check_reward
    from megatron_retool.runs.own_metrics import check_own_metrics
    from sglang_rollout.agent.agents import BUILT_IN, check_agent
    from sglang_rollout.agent.chosen_format import check_format
    from sglang_rollout.engine.configured import check_engine
    from tools.registry import check_tools

    config.algorithm.dry_run()
    check_reward(config.reward)
    added_to_reward(config.reward, config.data.max_response_length)
    check_own_metrics(config.trainer)
    check_tools(config.tools, _without_tools_to_be_made(config))
    check_format(config.rollout)
    if config.rollout.agent != BUILT_IN:
        from sglang_rollout.gateway import shortcut

        shortcut.install()  # before the agent's module makes clients
    check_agent(config.rollout)
    check_engine(config)


def _without_tools_to_be_made(config: Config) -> RolloutConfig:
    """Its rollout, without search and read_page where their corpus is one that make-demo is going to write."""
    corpus, demo = config.tools.search.corpus, config.demo
    if not (demo.enable and corpus and Path(demo.directory) in Path(corpus).parents and not Path(corpus).exists()):
        return config.rollout
    made = [tool for tool in config.rollout.multi_turn.tools if tool not in ("search", "read_page")]
    multi_turn = dataclasses.replace(config.rollout.multi_turn, tools=made)
    return dataclasses.replace(config.rollout, multi_turn=multi_turn)
