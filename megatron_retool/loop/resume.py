"""What a run's checkpoint holds beside the models, and how the run continues from it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron_retool.config import Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from megatron_retool.config.differences import changed_settings
from megatron_retool.config.old_log_probs import expected_updates
from megatron_retool.errors import InputError
from megatron_retool.loop.early_stopping import EarlyStopping
from megatron_retool.loop.experience import Collected
from megatron_retool.loop.state import TrainerState
from megatron_retool.runs.checkpointer import Checkpointer, Contents
from megatron_retool.runs.checkpoints import BUFFERED_GROUPS, PAUSED_GROUPS, Checkpoint
from megatron_retool.runs.weights_checkpoints import weights_checkpoint, weights_checkpoints
from megatron_retool.trajectory import write_trajectories
from sglang_rollout.agent.paused_groups import read_paused_groups, write_paused_groups

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


_NOT_HOW_IT_TRAINS = (
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.runs_dir",
    "cluster.",
    "sft.",
    "demo.",
)
_MAX_SHOWN = 100


def announce_resume(config: Config, resume: Checkpoint, console: Console) -> bool:
    """Say which settings are no longer those of the run's config.yaml, and what that means for a run that continues.

    Returns:
        Whether the run is at its end already.
    """
    result = changed_settings(resume.path.parents[1] / "config.yaml", config)
    changed = {key: values for key, values in result.items() if not key.startswith(_NOT_HOW_IT_TRAINS)}
    length = _run_length(config.trainer, resume, changed)
    finished = length is not None and resume.step >= length

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if changed:
        say(f"settings that are not those of {resume.path.parents[1] / 'config.yaml'}:")
        for key, (before, now) in changed.items():
            say(f"  {key}: {_shown(before)}, now {_shown(now)}")
    if finished:
        effect = ", and these settings have no effect" if changed else ""
        say(f"{resume.path} is the last step already ({length} steps): nothing to train{effect}. To continue, raise "
            "trainer.total_steps; to start over, choose another trainer.experiment_name")  # fmt: skip
        return True
    stopping = EarlyStopping(config.trainer.early_stopping)
    if config.trainer.early_stopping.metric:
        stopping.load_state_dict(resume.read("trainer_state.json").get("early_stopping", {}))
    if stopping.stops:
        say(f"{stopping.reason}: {resume.path} is the last step, and there is nothing to train. To continue, raise "
            "trainer.early_stopping.patience, or empty trainer.early_stopping.metric")  # fmt: skip
        return True
    if changed:
        say(f"they hold from step {resume.step + 1} on, and the weights are those of step {resume.step}; a run under "
            "these settings from the start needs another trainer.experiment_name")  # fmt: skip
        for remark in _remarks(config, resume, changed):
            say(remark)
    return False


def announce_start(model: ModelConfig, trainer: TrainerConfig, console: Console) -> None:
    """Say what a run that does not resume makes of checkpoints with only the weights."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    start = None if model.mcore_path is None else weights_checkpoint(Path(model.mcore_path))
    if start is not None:
        say(f"begins with the weights of {start.path}: steps are counted from 0, and optimizer, learning-rate "
            "schedule, data and random state start over")  # fmt: skip
    own = weights_checkpoints(trainer.run_dir)
    if own and trainer.resume_mode == "auto":
        say(f"{own[-1].path} holds only weights, from which no run resumes: this one starts over. To have something "
            "to resume from, set trainer.save_freq")  # fmt: skip


def _run_length(trainer: TrainerConfig, resume: Checkpoint, changed: Mapping[str, tuple[Any, Any]]) -> int | None:
    """Steps of the run; None where only the prompts, which are not read yet, tell."""
    if trainer.total_steps is not None:
        return trainer.total_steps
    if any(key.startswith(("trainer.total", "data.")) for key in changed):
        return None
    return int(resume.read("trainer_state.json").get("total_steps", 0)) or None


def _remarks(config: Config, resume: Checkpoint, changed: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    schedule = config.learner.optimizer.schedule
    if schedule != "constant" and any(key.startswith("trainer.total_") for key in changed):
        yield (
            f"learner.optimizer.schedule={schedule} ends at the new last step: the learning rate continues where the "
            f"new schedule stands at step {resume.step + 1}, which is above or below where the old one was"
        )
    now = expected_updates(config.learner, config.data, config.rollout)
    then = max(1, round(_before(config, changed, "data.train_batch_size") * _before(config, changed, "rollout.train.n")
                        / _before(config, changed, "learner.mini_batch_size")))  # fmt: skip
    if schedule != "constant" and then != now:
        size = _mini_batch_size(config.data, config.rollout, then)
        yield (
            f"learner.optimizer.schedule={schedule} counts updates: a step has {now}, and had {then}. The learning "
            f"rate is now that after step {resume.step * then / now:.4g} of a run with {now} updates a step, and not "
            f"after step {resume.step}; learner.mini_batch_size={size} would keep {then}"
        )
    if any(key in ("model.path", "model.mcore_path") for key in changed):
        yield "model.path and model.mcore_path name no weights for a run that continues: its checkpoint has them"


def _before(config: Config, changed: Mapping[str, tuple[Any, Any]], key: str) -> int:
    """The setting's number before the resume."""
    present: Any = functools.reduce(getattr, key.split("."), config)
    return int(changed[key][0] if key in changed else present)


def _mini_batch_size(data: DataConfig, rollout: RolloutConfig, updates: int) -> int:
    """The learner.mini_batch_size that cuts a step into so many updates."""
    return max(1, round(data.train_batch_size * rollout.train.n / updates))


def _shown(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} [{len(text)} characters]"


def contents_after(run: Deployment, state: TrainerState, collected: Collected) -> Contents:
    """What a checkpoint after the step of ``collected`` holds beside the models."""
    trainer_state = {**state.state_dict(), "total_steps": run.total_steps, "seed": run.config.trainer.seed}
    if collected.buffered_versions:
        trainer_state["buffered_versions"] = collected.buffered_versions
    # Only these: a checkpoint that is still being written holds them into the next step.
    paused, buffered = collected.paused, collected.buffered

    def write_groups(workspace: Path) -> None:
        if paused:
            write_paused_groups(paused, workspace / PAUSED_GROUPS)
        if buffered:
            write_trajectories(buffered, workspace / BUFFERED_GROUPS)

    files = {"prompt_source.json": collected.prompt_state, "trainer_state.json": trainer_state}
    return Contents(files, write_groups)


async def restore(run: Deployment, checkpointer: Checkpointer) -> TrainerState:
    """Put models, data and paused groups where the newest checkpoint left them; the state after its step.

    Raises:
        ValueError: the checkpoint was given another step's name.
    """
    state, resume = TrainerState.first(run.config), checkpointer.newest
    if resume is not None:
        run.console.print(f"resuming from {resume.path} (step {resume.step} of {run.total_steps}){resume.note}")
        await run.gpu_phases.training()
    await checkpointer.load()
    if resume is None:
        return state
    run.prompts.load_state_dict(resume.read("prompt_source.json"))
    if run.config.rollout.partial.enable and resume.paused_groups.exists():
        paused = read_paused_groups(resume.paused_groups)
        run.rollout.restore_paused(paused, run.prompts.take_unfinished([group.group_id for group in paused]))
    state.load_state_dict(resume.read("trainer_state.json"))
    if state.step != resume.step:
        raise InputError(f"{resume.path}/trainer_state.json says step {state.step}: rename the checkpoint back")
    return state
