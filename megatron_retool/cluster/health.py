"""What a run does about its faults, apart from restarting engines and tools: see docs/failures.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_retool.cluster.learner_group import LearnerDied
from megatron_retool.run_state import Checkpoint

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


class LearnerRecovery:
    """Builds a learner anew that lost a rank, up to ``trainer.max_learner_restarts`` times for one checkpoint."""

    def __init__(self, run: Deployment) -> None:
        self._run = run
        self._restarts = 0
        self._checkpoint: Checkpoint | None = run.checkpoint

    async def after(self, error: LearnerDied) -> None:
        """Learner and prompts as at the start, so that the loop may go on from ``run.checkpoint``.

        Raises:
            RuntimeError: it died too often, or a node is gone.
        """
        run = self._run
        limit = run.config.trainer.max_learner_restarts
        while True:
            if run.checkpoint != self._checkpoint:
                self._checkpoint, self._restarts = run.checkpoint, 0
            place = f"checkpoint {run.checkpoint.path}" if run.checkpoint is not None else "the initial weights"
            if self._restarts >= limit:
                raise RuntimeError(
                    f"the learner died {limit + 1} times since {place} (trainer.max_learner_restarts={limit}); at "
                    f"last: {error}. A rank that dies at the same place again and again mostly runs out of memory: see "
                    "that log and the kernel's (dmesg), lower learner.max_tokens_per_micro_batch; or its GPU is bad "
                    "(nvidia-smi -q -d ECC, dmesg | grep Xid): exclude the node. Starting the run again resumes it"
                ) from error
            self._restarts += 1
            run.console.print(f"[yellow]{error}[/]", highlight=False)
            run.console.print(
                f"[yellow]building the learner anew ({self._restarts} of {limit}): the run goes on from {place}[/]",
                highlight=False,
            )
            try:
                await run.restart_learner()
                return
            except LearnerDied as again:
                error = again
