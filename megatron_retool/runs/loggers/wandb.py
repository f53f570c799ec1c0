"""Weights & Biases: one run, which a resumed run continues. Without a login: offline, for `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.runs.loggers import LoggedRun, Logger


class WandbLogger(Logger):
    """
    Args:
        settings: keyword arguments of wandb.init, such as entity, tags or mode.
    """

    def __init__(self, run: LoggedRun, **settings: Any) -> None:
        super().__init__(run)
        import wandb

        self._table = wandb.Table
        if "WANDB_MODE" not in os.environ and wandb.api.api_key is None:
            # wandb would ask on the terminal, which may have no reader.
            settings = {"mode": "offline", **settings}
        self._run = wandb.init(
            **{
                "project": run.project,
                "name": run.name,
                "dir": str(run.directory),
                "id": run.run_id("wandb"),
                "resume": "allow",
                "config": dict(run.config),
                **settings,
            }
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the step's metrics."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of a validation as a table."""
        columns = list(rows[0])
        table = self._table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({"validation/samples": table}, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
