"""Trackio: a database in TRACKIO_DIR, else in the run's trackio/; `TRACKIO_DIR=… trackio show` opens it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.runs.loggers import LoggedRun, Logger


class TrackioLogger(Logger):
    """
    Args:
        settings: keyword arguments of trackio.init, such as space_id.
    """

    def __init__(self, run: LoggedRun, **settings: Any) -> None:
        super().__init__(run)
        # Read when trackio is imported.
        os.environ.setdefault("TRACKIO_DIR", str((run.directory / "trackio").resolve()))
        import trackio

        self._trackio = trackio
        trackio.init(
            **{
                "project": run.project,
                "name": run.run_id("trackio", lambda: run.name),
                "resume": "allow",
                "embed": False,
                "config": dict(run.config),
                **settings,
            }
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the step's metrics."""
        self._trackio.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of a validation as a table."""
        import pandas

        table = self._trackio.Table(dataframe=pandas.DataFrame(list(rows)))
        self._trackio.log({"validation/samples": table}, step=step)

    def close(self) -> None:
        """End the run."""
        self._trackio.finish()
