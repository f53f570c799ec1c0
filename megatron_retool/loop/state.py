"""What the loop remembers from step to step; trainer_state.json in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_retool.algorithms.dynamic_sampling import samples_for_prompt
from megatron_retool.algorithms.kl import KLController
from megatron_retool.algorithms.refill import KeepRate
from megatron_retool.algorithms.stage_schedule import is_multiple
from megatron_retool.config import Config
from megatron_retool.loop.early_stopping import EarlyStopping
from megatron_retool.loop.validation_schedule import Validation, validation_after


class Prompt(Protocol):
    """A prompt, as far as the number of its responses depends on it."""

    @property
    def uid(self) -> str:
        """Names the data's row."""

    @property
    def group_id(self) -> int:
        """Names the group of this draw."""


@dataclass
class TrainerState:
    """
    Attributes:
        step: the step under way, or the last completed one.
        kl: coefficient of the KL in the reward, where it is adapted.
        accuracies: mean accuracies of each prompt's latest groups by the prompt's uid, oldest first; kept for
            only adaptive sampling.
        keep_rate: how many groups carried a signal, up to the step that was trained last.
        early_stopping: the validations so far, as far as they decide on the end of the run.
    """

    config: Config
    step: int
    kl: KLController
    accuracies: dict[str, list[float]] = field(default_factory=dict)
    keep_rate: KeepRate = field(default_factory=KeepRate)
    early_stopping: EarlyStopping = field(init=False)

    def __post_init__(self) -> None:
        self.early_stopping = EarlyStopping(self.config.trainer.early_stopping)

    @classmethod
    def first(cls, config: Config) -> TrainerState:
        """The state before step 1."""
        algorithm = config.algorithm
        return cls(
            config, 0, KLController(algorithm.kl_in_reward, algorithm.adaptive_kl_target, algorithm.adaptive_kl_horizon)
        )

    @property
    def kl_in_reward(self) -> float:
        """Coefficient of the KL in the reward in the present step: adapted, or as scheduled."""
        return self.kl.coefficient if self.kl.target is not None else self.config.algorithm.scheduled_kl(self.step)

    def validation_due(self, *, last: bool) -> Validation | None:
        """The validation that follows the present step."""
        return validation_after(self.config.trainer, self.step, last=last)

    def save_due(self) -> bool:
        """Does a checkpoint follow the present step (the last one's apart)?"""
        return is_multiple(self.step, self.config.trainer.save_freq)

    def save_weights_due(self) -> bool:
        """Does a checkpoint of only the weights follow the present step?"""
        return is_multiple(self.step, self.config.trainer.save_weights_freq)

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
        return {
            "step": self.step,
            "kl_coefficient": self.kl.coefficient,
            "accuracies": self.accuracies,
            "keep_rate": self.keep_rate.state_dict(),
            "early_stopping": self.early_stopping.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. A constant KL coefficient is the configuration's, an adaptive one the state's."""
        self.step = int(state["step"])
        self.accuracies = {uid: [float(value) for value in values] for uid, values in state["accuracies"].items()}
        self.keep_rate = KeepRate.from_state(state.get("keep_rate", {}))
        self.early_stopping.load_state_dict(state.get("early_stopping", {}))
        if self.kl.target is not None:
            self.kl = KLController(float(state["kl_coefficient"]), self.kl.target, self.kl.horizon)
