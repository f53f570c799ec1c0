"""Where a run's metrics go besides the console and metrics.jsonl: one small protocol, and the services that follow it.

    class MyLogger(Logger):
        def __init__(self, run: LoggedRun, *, url: str) -> None: ...   # keyword arguments: trainer.logger_kwargs
        def log(self, step, metrics): ...

``trainer.loggers`` names built-in ones, ``package.module:Class`` or ``path/to/file.py:Class``. What a logger raises
while a run is under way is counted and printed, and ends nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_retool.config import ConfigError, TrainerConfig
from megatron_retool.registry import Extension, ExtensionError, Registry
from run_files.atomic_files import write_text

OWN = ("console", "jsonl")
"""Loggers that ``runs.logger`` itself is."""

PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny sqlalchemy alembic"),
    "swanlab": ("swanlab", "swanlab"),
    "trackio": ("trackio", "trackio"),
}
"""Logger -> (module that it needs, what pip installs for it)."""


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is made with.

    Attributes:
        directory: of the run; files of loggers belong there.
        project, name: trainer.project_name, trainer.experiment_name.
        first_step: the run continues from here; rows of this step and later are logged once more.
        config: the whole configuration, as JSON types.
    """

    directory: Path
    project: str = "megatron-retool"
    name: str = "experiment"
    first_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    def run_id(self, logger: str, make: Callable[[], str] = lambda: uuid.uuid4().hex[:16]) -> str:
        """The id under which the service knows this run: that of the run's folder, else a new one, kept there.

        Args:
            logger: its name, such as wandb.
            make: makes the id where there is none.
        """
        path = self.directory / "logger_runs.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if logger not in known:
            known[logger] = make()
            write_text(path, json.dumps(known, indent=1))
        return str(known[logger])


_CALLED: Mapping[str, tuple[str, ...]] = {"log": ("step", "metrics"), "log_samples": ("step", "rows"), "close": ()}
"""What a run calls of a logger, with the arguments by position."""


class Logger:
    """Takes what a run has to say. What is not defined does nothing."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    @property
    def path(self) -> Path:
        """What it writes, for messages about what cannot be written."""
        return self.run.directory / type(self).__name__ / "log"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. Values may be nan or infinite."""

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show validation samples as a table; each row has the same names, and texts or numbers."""

    def close(self) -> None:
        """Write what waits. The run has ended."""


loggers: Registry[Callable[[LoggedRun], Logger]] = Registry(
    "trainer.loggers",
    takes=("run",),
    built_in={
        "csv": "megatron_retool.runs.loggers.csv_file:CsvLogger",
        "tensorboard": "megatron_retool.runs.loggers.tensorboard:TensorBoardLogger",
        "wandb": "megatron_retool.runs.loggers.wandb:WandbLogger",
        "mlflow": "megatron_retool.runs.loggers.mlflow:MlflowLogger",
        "swanlab": "megatron_retool.runs.loggers.swanlab:SwanLabLogger",
        "trackio": "megatron_retool.runs.loggers.trackio:TrackioLogger",
    },
    kwargs_key="trainer.logger_kwargs",
)


def check_loggers(config: TrainerConfig) -> None:
    """Raise ConfigError where one of ``trainer.loggers`` cannot be used; nothing is made or connected."""
    for name in config.logger_kwargs:
        if name not in config.loggers:
            raise ConfigError(f"trainer.logger_kwargs.{name}: {name} is none of trainer.loggers={config.loggers}")
    bind_loggers(config.loggers, config.logger_kwargs)


def bind_loggers(
    names: Sequence[str], kwargs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Extension[Callable[[LoggedRun], Logger]]]:
    """The loggers of ``names`` but console and jsonl, each to be called with a LoggedRun.

    Raises:
        ConfigError: one is unknown, its package is not installed, or it does not take its settings.
    """
    bound = {}
    for name in names:
        if name in OWN:
            continue
        module, packages = PACKAGES.get(name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            raise ConfigError(f"trainer.loggers names {name}, which is not installed: pip install {packages}")
        if name not in loggers.names and ":" not in name:
            known = ", ".join((*OWN, *loggers.names))
            raise ConfigError(
                f"trainer.loggers: unknown logger {name!r}; known are {known}, and one's own as package.module:Class "
                "or path/to/file.py:Class"
            )
        try:
            bound[name] = loggers.bind(name, kwargs.get(name))
        except ExtensionError as error:
            raise ConfigError(str(error)) from error
        if isinstance(bound[name].object, type):
            check_methods(bound[name].label, bound[name].object)
    return bound


def check_methods(label: str, logger: Any) -> None:
    """Raise ConfigError if ``logger``, a class or an instance of one, lacks what a run calls.

    Args:
        label: names the setting in the message.
    """
    cure = "derive it from megatron_retool.runs.loggers.Logger (docs/extending.md#my-logger)"
    lacking = [name for name in ("path", *_CALLED) if not hasattr(logger, name)]
    if lacking:
        raise ConfigError(f"{label}: the logger has no {', '.join(lacking)}: {cure}")
    for name, arguments in _CALLED.items():
        method = getattr(logger, name)
        given = [None, *arguments] if isinstance(logger, type) else arguments
        try:
            inspect.signature(method).bind(*given)
        except (TypeError, ValueError) as error:
            takes = ", ".join(("self", *arguments))
            raise ConfigError(f"{label}: the method {name} must take ({takes}): {error}") from error
