"""Two or more runs side by side: the settings in which they differ, and what each came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_retool.reports.summary import Summary, summarise
from megatron_retool.runs.metrics_file import require_rows
from megatron_retool.runs.stored_settings import stored_settings
from run_files.settings import ABSENT, differing_settings


def compare_runs(run_dirs: Sequence[Path], console: Console) -> None:
    """Print the settings that differ and the figures of runs.

    Raises:
        FileNotFoundError: a directory is no run: it has no config.yaml or no rows in metrics.jsonl.
        ValueError: as ``stored_settings``.
    """
    names = _names(run_dirs)
    settings = [{key: str(value) for key, value in stored_settings(run_dir).items()} for run_dir in run_dirs]
    for run_dir in run_dirs:
        require_rows(run_dir, "there is nothing to compare")
    console.print(_table("settings that differ", "setting", names, differing_settings(settings)))
    console.print(_table("figures", "figure", names, figures([summarise(run_dir) for run_dir in run_dirs])))


def figures(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """The last validation and the training figures of each run, by name."""
    last = [list(summary.validations.items())[-1:] for summary in summaries]
    rows: dict[str, list[str]] = {}
    if any(last):
        rows["last validation"] = [result[0][0].split(",")[0] if result else ABSENT for result in last]
    for name in dict.fromkeys(key for result in last for _, values in result for key in values):
        rows[name] = [f"{result[0][1][name]:.3f}" if result and name in result[0][1] else ABSENT for result in last]
    for name in dict.fromkeys(key for summary in summaries for key in summary.training):
        rows[name] = [summary.training.get(name, ABSENT) for summary in summaries]
    return rows


def _names(run_dirs: Sequence[Path]) -> list[str]:
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]


def _table(title: str, heading: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in (heading, *names):
        table.add_column(name, overflow="fold")
    for key, values in rows.items():
        table.add_row(key, *values)
    return table
