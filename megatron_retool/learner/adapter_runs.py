"""What a caller that trains by itself asks of a learner: runs by name, each as if it had the learner to itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_retool.config.accumulation import check_runs
from megatron_retool.learner import run_files
from megatron_retool.learner.adapter_slot import AdapterSlot
from megatron_retool.learner.learner import Learner
from megatron_retool.target_sequences import OptimizerStep, TargetSequence, TokenLoss, TokenOutputs


class AdapterRuns(AdapterSlot):
    """The runs of one learner. Every rank makes the same calls.

    Args:
        learner: with adapters; what it has trained before is no run and is lost.

    Raises:
        ConfigError: a setting does not go with several runs.
    """

    def __init__(self, learner: Learner) -> None:
        check_runs(learner.config.learner, learner.architecture, learner.role)
        super().__init__(learner)

    def accumulate(
        self, run: str, sequences: Sequence[TargetSequence], loss: TokenLoss, *, forward_only: bool = False
    ) -> TokenOutputs:
        """``Learner.accumulate`` of a run.

        Raises:
            RequestRefused: there is no such run, or as ``Learner.accumulate``.
        """
        self.activate(run)
        return self.learner.accumulate(sequences, loss, forward_only=forward_only)

    def apply(self, run: str, step: OptimizerStep) -> dict[str, float]:
        """``Learner.apply`` of a run.

        Raises:
            RequestRefused: there is no such run, or as ``Learner.apply``.
        """
        self.activate(run)
        return self.learner.apply(step)

    def save_run(self, run: str, directory: str | Path, *, with_optimizer: bool) -> None:
        """Write what ``load_run`` continues from, in any layout; see ``run_files.save_run``.

        Raises:
            RequestRefused: there is no such run.
            SaveError: writing failed, on any rank.
        """
        run_files.save_run(self, run, directory, with_optimizer=with_optimizer)

    def load_run(self, run: str, directory: str | Path, *, with_optimizer: bool) -> None:
        """Give a run what ``save_run`` wrote, or an adapter that peft did; see ``run_files.load_run``.

        Raises:
            RequestRefused: there is no such run, or the files are not of it; the run is as it was.
        """
        run_files.load_run(self, run, directory, with_optimizer=with_optimizer)

    def write_adapter(self, run: str, directory: str | Path) -> None:
        """Write only a run's factors, as peft's files.

        Raises:
            RequestRefused: there is no such run.
            SaveError: writing failed, on any rank.
        """
        run_files.write_adapter(self, run, directory)
