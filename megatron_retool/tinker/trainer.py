"""Who learns for the server: runs of adapters on one base model. ``cluster.LearnerGroup`` is one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megatron_retool.target_sequences import OptimizerStep, TargetSequence, TokenLoss, TokenOutputs


class Trainer(Protocol):
    """Runs by name. The server makes one call at a time.

    Every method raises RequestRefused where the caller asked for what cannot be done; nothing has changed then.
    """

    async def create_run(self, run: str, *, rank: int, alpha: float, seed: int) -> None:
        """A run with fresh factors and optimizer state."""
        ...

    async def delete_run(self, run: str) -> None:
        """Forget a run."""

    async def accumulate(
        self, run: str, sequences: list[TargetSequence], loss: TokenLoss, *, forward_only: bool = False
    ) -> TokenOutputs:
        """Add the gradient of the summed loss to what is gathered; ``forward_only`` leaves that alone."""
        ...

    async def apply(self, run: str, step: OptimizerStep) -> dict[str, float]:
        """One optimizer step with what was gathered, which is empty afterwards. Returns grad_norm and lr."""
        ...

    async def save_run(self, run: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a run's adapters, and its optimizer state where asked."""

    async def load_run(self, run: str, directory: Path, *, with_optimizer: bool) -> None:
        """What ``save_run`` wrote, into a run that exists and has the same rank."""
        ...

    async def write_adapter(self, run: str, directory: Path) -> None:
        """The factors as PEFT's files."""
        ...
