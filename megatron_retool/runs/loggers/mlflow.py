"""MLflow: MLFLOW_TRACKING_URI's server, else a database beside the runs, for `mlflow ui --backend-store-uri sqlite:///…`.

Its names have no @: mean@4 is mean_at_4 there, as verl writes it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.runs.loggers import LoggedRun, Logger

_BATCH = 1000
"""Metrics that MLflow takes in one request."""
_PARAMETER_LENGTH = 6000


class MlflowLogger(Logger):
    """
    Args:
        tracking_uri: None: MLFLOW_TRACKING_URI, else sqlite:///<runs>/mlflow.db.
    """

    def __init__(self, run: LoggedRun, *, tracking_uri: str | None = None) -> None:
        super().__init__(run)
        from mlflow.tracking import MlflowClient

        runs = run.directory.resolve().parent
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._samples: list[str] = []
        self._id = run.run_id("mlflow", lambda: self._new_run(None if "://" not in uri else uri, str(runs)))
        self._client.set_terminated(self._id, "RUNNING")

    def _new_run(self, uri: str | None, runs: str) -> str:
        run = self.run
        result = self._client.get_experiment_by_name(run.project)
        local = uri is not None and uri.startswith("sqlite:")
        experiment = (
            result.experiment_id
            if result is not None
            else self._client.create_experiment(run.project, f"file://{runs}/mlflow_files" if local else None)
        )
        made = self._client.create_run(experiment, run_name=run.name)
        for section, settings in run.config.items():
            self._client.log_param(made.info.run_id, section, json.dumps(settings)[:_PARAMETER_LENGTH])
        return str(made.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the step's finite metrics."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [
            Metric(name.replace("@", "_at_"), value, now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(rows), _BATCH):
            self._client.log_batch(self._id, rows[start : start + _BATCH])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of a validation as a table."""
        columns = list(rows[0])
        name = f"validation/step_{step:06d}.json"
        self._client.log_dict(
            self._id, {"columns": columns, "data": [[row[each] for each in columns] for row in rows]}, name
        )
        self._samples.append(name)
        # What MLflow's page looks for where it shows tables.
        tag = [{"path": path, "type": "table"} for path in self._samples]
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", json.dumps(tag))

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)
