"""SwanLab. Without a login: offline, for `swanlab sync`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.runs.loggers import LoggedRun, Logger


class SwanLabLogger(Logger):
    """
    Args:
        settings: keyword arguments of swanlab.init, such as workspace or mode.
    """

    def __init__(self, run: LoggedRun, **settings: Any) -> None:
        super().__init__(run)
        import swanlab

        self._swanlab = swanlab
        if "SWANLAB_MODE" not in os.environ and "SWANLAB_API_KEY" not in os.environ:
            # SwanLab would ask on the terminal, which may have no reader.
            settings = {"mode": "offline", **settings}
        swanlab.init(
            **{
                "project": run.project,
                "experiment_name": run.name,
                "logdir": str(run.directory / "swanlab"),
                # Versions without runs that continue do not read these two, and make another run.
                "id": run.run_id("swanlab"),
                "resume": "allow",
                "config": dict(run.config),
                **settings,
            }
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the step's finite metrics."""
        self._swanlab.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of a validation as a table."""
        columns = list(rows[0])
        table = self._swanlab.echarts.Table()
        table.add(columns, [[row[name] for name in columns] for row in rows])
        self._swanlab.log({"validation/samples": table}, step=step)

    def close(self) -> None:
        """End the run."""
        self._swanlab.finish()
