"""TensorBoard: event files in the run's tensorboard/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_retool.monitor.event_file import EventFile
from megatron_retool.monitor.loggers import LoggedRun, Logger


class TensorBoardLogger(Logger):
    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._file = EventFile(run.directory / "tensorboard", run.first_step)

    @property
    def path(self) -> Path:
        return self._file.path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.add_scalars(step, metrics)

    def close(self) -> None:
        self._file.close()
