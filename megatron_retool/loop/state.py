"""What the loop remembers from step to step, and how a run is taken up from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_retool.algorithms.dynamic_sampling import samples_for_prompt
from megatron_retool.algorithms.kl import KLController
from megatron_retool.algorithms.stage_schedule import is_due, parse_stages
from megatron_retool.config import Config
from megatron_retool.loop.checkpointer import Checkpointer, Contents
from megatron_retool.runs.checkpoints import PAUSED_GROUPS
from sglang_rollout.agent.paused_groups import read_paused_groups, write_paused_groups

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment
    from megatron_retool.loop.experience import Collected


class Prompt(Protocol):
    @property
    def uid(self) -> str: ...
    @property
    def group_id(self) -> int: ...


@dataclass
class TrainerState:
    """
    Attributes:
        step: the step under way, or the last completed one.
        kl: coefficient of the KL in the reward.
        accuracies: mean accuracies of each prompt's latest groups by the prompt's uid, oldest first; kept for
            adaptive sampling alone.
    """

    config: Config
    step: int
    kl: KLController
    accuracies: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def first(cls, config: Config) -> TrainerState:
        """The state before step 1."""
        algorithm = config.algorithm
        return cls(
            config, 0, KLController(algorithm.kl_in_reward, algorithm.adaptive_kl_target, algorithm.adaptive_kl_horizon)
        )

    def validation_due(self) -> bool:
        """Does a validation follow the present step (the last one's apart)?"""
        trainer = self.config.trainer
        if trainer.test_schedule:
            return is_due(parse_stages(trainer.test_schedule), self.step)
        return trainer.test_freq > 0 and self.step % trainer.test_freq == 0

    def save_due(self) -> bool:
        """Does a checkpoint follow the present step (the last one's apart)?"""
        frequency = self.config.trainer.save_freq
        return frequency > 0 and self.step % frequency == 0

    def group_sizes(self, prompts: Sequence[Prompt], step: int) -> dict[int, int]:
        """Responses to each prompt in ``step``, by group id."""
        adaptive = self.config.algorithm.adaptive_sampling
        if not adaptive.enable:
            return {prompt.group_id: self.config.rollout.train.n for prompt in prompts}
        return {
            prompt.group_id: samples_for_prompt(
                step - 1,
                self.accuracies.get(prompt.uid, ()),
                adaptive.stages,
                adaptive.easy_accuracy,
                adaptive.easy_batches,
                adaptive.easy_n,
                adaptive.hard_accuracy,
                adaptive.hard_n,
            )
            for prompt in prompts
        }

    def record_accuracy(self, uid: str, accuracy: float) -> None:
        """Remember how a group of the prompt went."""
        adaptive = self.config.algorithm.adaptive_sampling
        if adaptive.enable:
            kept = max(adaptive.easy_batches, 1)
            self.accuracies[uid] = [*self.accuracies.get(uid, ()), accuracy][-kept:]

    def state_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {"step": self.step, "kl_coefficient": self.kl.coefficient, "accuracies": self.accuracies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. A constant KL coefficient is the configuration's, an adaptive one the state's."""
        self.step = int(state["step"])
        self.accuracies = {uid: [float(value) for value in values] for uid, values in state["accuracies"].items()}
        if self.kl.target is not None:
            self.kl = KLController(float(state["kl_coefficient"]), self.kl.target, self.kl.horizon)


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
        run.console.print(f"resuming from {resume.path} (step {resume.step} of {run.total_steps})")
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
