"""Where metrics go: metrics.jsonl (always the record), the console, and the services of ``runs.loggers``.

One call, ``MetricLogger.log(step, metrics)``, writes one JSON object per step. A resumed run appends; rows of steps
that the run is about to repeat are dropped first, so that the file has one row per step. Rows that the disk has no room
for are written once it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from megatron_retool.config import Config
from megatron_retool.config.hidden_values import without_secrets
from megatron_retool.runs.append_file import AppendFile
from megatron_retool.runs.loggers import LoggedRun, Logger, bind_loggers, check_methods
from megatron_retool.runs.metrics_file import drop_rows_from
from megatron_retool.runs.write_errors import WriteErrors
from run_files.phases import VALIDATION_PREFIXES, Phase

CONSOLE_COLUMNS = {
    "critic/score/mean": "score",
    "rollout/acc/mean": "acc",
    "num_turns/mean": "turns",
    "tool/success_rate": "tool ok",
    "response_length/mean": "length",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad",
    "rollout_corr/log_prob_abs_diff": "|Δ logp|",
    "rollout_corr/masked_fraction": "masked",
    Phase.GENERATION.metric: "gen s",
    Phase.STEP.metric: "step s",
}
"""Metric -> heading in the step table."""

VALIDATION_WORDS = {
    "num_turns/mean": "turns",
    "tool/use_rate": "tool use",
    "tool/success_rate": "tool ok",
}
"""Metric without its first word -> word in the line about a validation, after the accuracies of all prompts."""

_OF_VALIDATIONS = (*VALIDATION_PREFIXES, "early_stopping/")
_COLUMN_WIDTH = 8
_HEADER_EVERY = 20


class MetricLogger:
    """Writes every step's metrics to the chosen places.

    Args:
        run_dir: runs/<experiment_name>; metrics.jsonl, tensorboard/ and what other loggers keep are made in it.
        loggers: console, jsonl, names of ``runs.loggers``, or own classes.
        first_step: rows of metrics.jsonl from this step on are removed (the run repeats those steps after a resume).
        console: where the step table is printed.
        config: of the whole run, for the loggers that show it.
        write_errors: counts what cannot be written; monitor/write_errors is logged once that is not 0.
        project: trainer.project_name.
        logger_kwargs: logger -> keyword arguments.

    Raises:
        ConfigError: a logger is unknown or its package is not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        loggers: list[str],
        *,
        first_step: int = 0,
        console: Console | None = None,
        config: Mapping[str, Any] | None = None,
        write_errors: WriteErrors | None = None,
        project: str = "megatron-retool",
        logger_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        bound = bind_loggers(loggers, logger_kwargs or {})
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.console = console or Console()
        self._write_errors = write_errors or WriteErrors(self.console)
        self._print = "console" in loggers
        self._rows_printed = 0
        self._jsonl: AppendFile | None = None
        if "jsonl" in loggers:
            path = self.run_dir / "metrics.jsonl"
            for problem in drop_rows_from(path, first_step):
                self.console.print(problem, style="yellow", markup=False, highlight=False)
            self._jsonl = AppendFile(path)
        run = LoggedRun(self.run_dir, project, self.run_dir.name, first_step, dict(config or {}))
        self._loggers: dict[str, Logger] = {}
        for name, make in bound.items():
            with self._tolerated(name):
                made = make(run)
                check_methods(make.label, made)  # a function may return anything
                self._loggers[name] = made

    @classmethod
    def of_run(
        cls,
        config: Config,
        console: Console,
        *,
        first_step: int = 0,
        write_errors: WriteErrors | None = None,
    ) -> MetricLogger:
        """The loggers that ``config`` asks for."""
        trainer = config.trainer
        return cls(
            config.trainer.run_dir,
            trainer.loggers,
            first_step=first_step,
            console=console,
            config=without_secrets(dataclasses.asdict(config)),
            write_errors=write_errors,
            project=trainer.project_name,
            logger_kwargs=trainer.logger_kwargs,
        )

    @contextlib.contextmanager
    def _tolerated(self, name: str) -> Iterator[None]:
        """What a logger raises is counted and printed as an error of a file is: it only describes the run."""
        logger = self._loggers.get(name)
        with self._write_errors.tolerated(logger.path if logger is not None else self.run_dir / name):
            try:
                yield
            except OSError:
                raise
            except Exception as error:
                raise OSError(f"{type(error).__name__}: {error}") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. Values that are not finite are kept as null in the file, so that it stays valid JSON."""
        values = {name: float(value) for name, value in metrics.items()}
        if self._write_errors.count:
            values["monitor/write_errors"] = float(self._write_errors.count)
        if self._jsonl is not None:
            row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}}
            with self._write_errors.tolerated(self._jsonl.path):
                self._jsonl.append(json.dumps(row).encode() + b"\n")
        for name, logger in self._loggers.items():
            with self._tolerated(name):
                logger.log(step, values)
        if self._print:
            self._print_row(step, values)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show validation samples in the loggers that have tables; each row has the same names."""
        if rows:
            for name, logger in self._loggers.items():
                with self._tolerated(name):
                    logger.log_samples(step, rows)

    def _print_row(self, step: int, values: dict[str, float]) -> None:
        own = {name: value for name, value in values.items() if not name.startswith(_OF_VALIDATIONS)}
        shown = {name: heading for name, heading in CONSOLE_COLUMNS.items() if name in own}
        if shown:
            if self._rows_printed % _HEADER_EVERY == 0:
                header = f"{'step':>6}" + "".join(f"{heading:>{_COLUMN_WIDTH + 1}}" for heading in shown.values())
                self.console.print(header, style="bold", soft_wrap=True, highlight=False)
            row = f"{step:>6}" + "".join(f"{_short(own[name]):>{_COLUMN_WIDTH + 1}}" for name in shown)
            self.console.print(row, soft_wrap=True, highlight=False)
            self._rows_printed += 1
        elif own:
            parts = (f"{name.split('/', 1)[-1]} {value:.4g}" for name, value in own.items())
            self.console.print(f"step {step:>5}  " + "  ".join(parts), soft_wrap=True, highlight=False)
        for kind, prefixes in (("validation", ("val-core/", "val-aux/")), ("quick validation", ("val-quick/",) * 2)):
            if validated := validation_line(values, *prefixes):
                self.console.print(f"step {step:>5}  {kind}: {validated}", soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Close metrics.jsonl and every logger; a logger that fails is reported and the others are closed."""
        if self._jsonl is not None:
            self._jsonl.close()
        for name, logger in self._loggers.items():
            with self._tolerated(name):
                logger.close()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def validation_line(values: Mapping[str, float], core: str = "val-core/", auxiliary: str = "val-aux/") -> str:
    """mean@n of all prompts, best, majority and worst of n, and how the model behaved; empty without a validation.

    Args:
        core, auxiliary: what the names of its metrics begin with.
    """
    prefix = f"{core}all/acc/"
    means = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(f"{prefix}mean@")}
    parts = []
    for name, mean in means.items():
        count = name.removeprefix("mean@")
        parts.append(f"{name} {mean:.3f}")
        parts += [
            f"{kind}@{count} {values[key]:.3f}"
            for kind in ("best", "maj", "worst")
            if (key := f"{prefix}{kind}@{count}/mean") in values
        ]
    behaviour = {f"{auxiliary}{name}": word for name, word in VALIDATION_WORDS.items()}
    parts += [f"{word} {values[name]:.3g}" for name, word in behaviour.items() if name in values]
    return "  ".join(parts) if means else ""


def _short(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
