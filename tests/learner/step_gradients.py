"""A look at the gradients of a learner's update, before its step uses and clears them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from megatron_retool.learner.learner import Learner


def gradients_at_next_step(learner: Learner) -> dict[str, Tensor]:
    """Gradients by Hugging Face name, which the learner's next update puts there; none where it trains adapters."""
    from megatron_retool.learner.weights import gradients_by_hf_name

    step, found = learner._step, dict[str, Tensor]()

    def step_after_a_look() -> Any:
        if not learner.config.learner.lora.rank:
            found.update(gradients_by_hf_name(learner.model_chunks, learner.architecture))
        return step()

    learner._step = step_after_a_look
    return found
