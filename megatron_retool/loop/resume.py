"""What a run's checkpoint holds beside the models, and how the run goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_retool.loop.checkpointer import Checkpointer, Contents
from megatron_retool.loop.experience import Collected
from megatron_retool.loop.state import TrainerState
from megatron_retool.runs.checkpoints import PAUSED_GROUPS
from sglang_rollout.agent.paused_groups import read_paused_groups, write_paused_groups

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


def contents_after(run: Deployment, state: TrainerState, collected: Collected) -> Contents:
    """What a checkpoint after the step of ``collected`` holds beside the models."""
    trainer_state = {**state.state_dict(), "total_steps": run.total_steps, "seed": run.config.trainer.seed}

    def write_paused(workspace: Path) -> None:
        if collected.paused:
            write_paused_groups(collected.paused, workspace / PAUSED_GROUPS)

    files = {"prompt_source.json": collected.prompt_state, "trainer_state.json": trainer_state}
    return Contents(files, write_paused)


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
        raise ValueError(f"{resume.path}/trainer_state.json says step {state.step}: rename the checkpoint back")
    return state
