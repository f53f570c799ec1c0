"""TensorBoard: event files in the run's tensorboard/; samples of validations are tables under Text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_retool.runs.loggers import LoggedRun, Logger


class TensorBoardLogger(Logger):
    """Event files in the run's tensorboard/, written without TensorBoard's own packages."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        # TensorBoard's modules take longer to import than the whole check of a configuration.
        from megatron_retool.runs.event_file import EventFile

        self._file = EventFile(run.directory / "tensorboard", run.first_step)

    @property
    def path(self) -> Path:
        """The event file that is written."""
        return self._file.path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step's metrics as scalars."""
        self._file.add_scalars(step, metrics)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write samples of a validation as a table."""
        names = list(rows[0])
        cells = [[_literally(row[name]) for name in names] for row in rows]
        self._file.add_table(step, "validation/samples", [[f"**{name}**" for name in names], *cells])

    def close(self) -> None:
        """Close the event file."""
        self._file.close()


def _literally(value: Any) -> str:
    """Markdown that shows text as it is, with its line breaks: an indented block, which has no marks of its own."""
    if not isinstance(value, str):
        return f"{value:g}"
    return "\n".join(f"    {line}" for line in value.splitlines())
