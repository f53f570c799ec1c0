"""Several training runs of adapters on one base model, which take turns in the one set of adapters of the graph.

A run's state is its factors, gradients, optimizer moments and number of steps.  That of the run whose turn it is lies
in the learner; that of the others in host memory.  A change of turn copies both, only values: no tensor of the learner
is ever replaced, and no two runs share one.

A run may have a smaller rank than the learner's adapters.  The rows of A and the columns of B beyond it are zero and
stay zero: A's rows get their gradient through B's columns, and the other way round.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_retool.config import LoraConfig
from megatron_retool.learner import data_parallel
from megatron_retool.learner.adapters import Adapter, adapters, initial_factors
from megatron_retool.learner.checkpoint.state import begin_moments
from megatron_retool.learner.learner import Learner
from megatron_retool.target_sequences import RequestRefused


@dataclass
class RunState:
    """One run.

    Attributes:
        settings: its rank, alpha and seed, and the learner's targets.
        kept: in host memory, where it is not its turn: factors and optimizer, in the order of ``_tensors``.
        gradients: the same of what it has accumulated.
        has_gradients: whether ``gradients`` are of use.
        steps: of optimizers that count them beside their tensors.
    """

    settings: LoraConfig
    kept: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    has_gradients: bool = False
    steps: list[int] = field(default_factory=list)


class AdapterSlot:
    """The learner's adapters as the place of one run at a time.

    Args:
        learner: with adapters; what it has trained before is no run and is lost.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.settings = learner.config.learner.lora
        begin_moments(learner.optimizer)
        self._runs: dict[str, RunState] = {}
        self._active: str | None = None

    def create_run(self, run: str, *, rank: int, alpha: float, seed: int) -> None:
        """A run with fresh factors, as ``learner.lora`` would begin with these settings, and a fresh optimizer state.

        Raises:
            RequestRefused: there is one of that name, the rank is above learner.lora.rank, or a number is out of range.
        """
        if run in self._runs:
            raise RequestRefused(f"run {run!r}: there is one already")
        if not 1 <= rank <= self.settings.rank:
            raise RequestRefused(f"rank={rank}: this learner has ranks of 1 to learner.lora.rank={self.settings.rank}")
        if not (math.isfinite(alpha) and alpha > 0):
            raise RequestRefused(f"alpha={alpha}: give a number above 0")
        if not 0 <= seed < 2**31:
            raise RequestRefused(f"seed={seed}: give a whole number of 0 to {2**31 - 1}")
        settings = replace(self.settings, rank=rank, alpha=float(alpha), seed=seed)
        self._put_away()
        self._runs[run], self._active = RunState(settings), run
        self.begin(settings, lambda adapter: initial_factors(adapter, settings))

    def delete_run(self, run: str) -> None:
        """Forget a run.

        Raises:
            RequestRefused: there is no such run.
        """
        self._state(run)
        del self._runs[run]
        if self._active == run:
            self._active = None
            self.learner.clear_gradients()

    def activate(self, run: str) -> RunState:
        """Give a run its turn.

        Raises:
            RequestRefused: there is no such run.
        """
        state = self._state(run)
        if run == self._active:
            return state
        self._put_away()
        for tensor, kept in zip(self._tensors(), state.kept, strict=True):
            tensor.copy_(kept, non_blocking=True)
        # Where communication overlaps this also forgets that the gradients of the run before are summed.
        self.learner.clear_gradients()
        if state.has_gradients:
            for tensor, kept in zip(self._gradients(), state.gradients, strict=True):
                tensor.copy_(kept, non_blocking=True)
        self.learner.has_gradients = state.has_gradients
        for group, steps in zip(self._counting_groups(), state.steps, strict=True):
            group["step"] = steps
        self._scale(state.settings)
        self._active = run
        return state

    @torch.no_grad()
    def begin(self, settings: LoraConfig, factors: Callable[[Adapter], Sequence[Tensor]]) -> None:
        """Let the run whose turn it is begin with these factors, without gradients, moments and steps.

        Args:
            settings: the run's.
            factors: every A, then every B of an adapter, this rank's parts of factors of ``settings.rank``.
        """
        self.learner.clear_gradients()
        data_parallel.finish_gathering(self.learner.model_chunks)
        for adapter in adapters(self.learner.model_chunks):
            for parameter, value in zip((*adapter.a, *adapter.b), factors(adapter), strict=True):
                parameter.copy_(padded(value, parameter.shape))
        for part in self.optimizers():
            for state in part.optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, Tensor):
                        tensor.zero_()
        self.set_steps(0)
        self.learner.optimizer.reload_model_params()
        self._scale(settings)

    @contextlib.contextmanager
    def gradients_kept(self, run: str) -> Iterator[None]:
        """Within it the gradients' buffers may hold anything; afterwards they have the gradients of this run again."""
        state = self.activate(run)
        if self.learner.has_gradients:
            state.gradients = self._on_host(self._gradients(), state.gradients)
        try:
            yield
        finally:
            if self.learner.has_gradients:
                for tensor, kept in zip(self._gradients(), state.gradients, strict=True):
                    tensor.copy_(kept, non_blocking=True)

    def _state(self, run: str) -> RunState:
        if run not in self._runs:
            raise RequestRefused(f"run {run!r}: there is no such run")
        return self._runs[run]

    def _put_away(self) -> None:
        """Copy the state of the run whose turn ends to host memory."""
        if self._active is None:
            return
        data_parallel.finish_gathering(self.learner.model_chunks)
        state = self._runs[self._active]
        state.kept = self._on_host(self._tensors(), state.kept)
        state.has_gradients = self.learner.has_gradients
        if state.has_gradients:
            state.gradients = self._on_host(self._gradients(), state.gradients)
        state.steps = [group.get("step", 0) for group in self._counting_groups()]
        self._active = None

    def _on_host(self, tensors: Iterator[Tensor], kept: list[Tensor]) -> list[Tensor]:
        """Copies of ``tensors``, in the memory of ``kept`` where there is some."""
        pinned = self.learner.device.type == "cuda"
        own = list(tensors)
        kept = kept or [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in own]
        for copy, tensor in zip(kept, own, strict=True):
            copy.copy_(tensor.detach(), non_blocking=pinned)
        return kept

    def _tensors(self) -> Iterator[Tensor]:
        """What a run has of its own but gradients: factors, the optimizer's main parameters and moments."""
        for adapter in adapters(self.learner.model_chunks):
            for parameter in (*adapter.a, *adapter.b):
                yield parameter.detach()
        for part in self.optimizers():
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter.detach()
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self.learner.model_chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def optimizers(self) -> list[Any]:
        """Megatron's, of dense layers and of experts, that have parameters on this rank."""
        parts = self.learner.optimizer.chained_optimizers
        return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]

    def set_steps(self, steps: int) -> None:
        """Let Transformer Engine's Adam have made so many; torch's counts in tensors of its state."""
        for group in self._counting_groups():
            group["step"] = steps

    def _counting_groups(self) -> list[dict[str, Any]]:
        counting = [part.optimizer for part in self.optimizers() if not isinstance(part.optimizer, torch.optim.Adam)]
        return [group for optimizer in counting for group in optimizer.param_groups]

    def _scale(self, settings: LoraConfig) -> None:
        for adapter in adapters(self.learner.model_chunks):
            adapter.scale = settings.alpha / settings.rank


def padded(part: Tensor, shape: Sequence[int]) -> Tensor:
    """A factor of a smaller rank in the shape of the learner's, with zeros behind it."""
    return torch.nn.functional.pad(part, (0, shape[1] - part.size(1), 0, shape[0] - part.size(0)))
