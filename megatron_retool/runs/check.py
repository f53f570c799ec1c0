"""Whether what lies on the disk is what was written: every checkpoint, export, parquet file and row of metrics.

    megatron-retool check runs/<name> [more directories]

A run, a single checkpoint, a converted or exported model. Nothing is changed, except COMPLETE by ``--renew``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from conversion.files.checksums import (
    CHECKPOINT_NAME,
    COMPLETE_NAME,
    WEIGHTS_NAME,
    find_faults,
    has_checksums,
    read_marker,
    write_marker,
)
from conversion.files.dist_checkpoint import FORMAT_NAME, DistCheckpoint, DistCheckpointError
from conversion.files.hf_checkpoint import HFCheckpoint
from conversion.files.safetensors_headers import INDEX_NAME, SINGLE_FILE_NAME, HFCheckpointError
from megatron_retool.errors import InputError
from megatron_retool.runs.metrics_file import step_of_line

METRICS_NAME = "metrics.jsonl"


@dataclass
class Finding:
    """One row of the table.

    Attributes:
        what: relative to the directory that was asked for.
        remark: how it was checked, or why it could not be.
        faults: what is wrong, each with the file's name.
    """

    what: str
    files: int
    nbytes: int
    remark: str
    faults: list[str] = field(default_factory=list)


def check(target: Path, on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[Finding]:
    """Everything below ``target`` that can be checked.

    Args:
        on_bytes: told of bytes that have been read.

    Raises:
        FileNotFoundError: ``target`` is no directory.
    """
    if not target.is_dir():
        raise FileNotFoundError(f"{target} is no directory: give a run, a checkpoint or a model's directory")
    yield from _check_below(target, target, on_bytes)


def _check_below(directory: Path, target: Path, on_bytes: Callable[[int], None]) -> Iterator[Finding]:
    what = str(directory.relative_to(target)) if directory != target else directory.resolve().name
    if has_checksums(directory):
        yield _with_checksums(directory, what, on_bytes)
        return
    is_checkpoint = CHECKPOINT_NAME.fullmatch(directory.name) or WEIGHTS_NAME.fullmatch(directory.name)
    if is_checkpoint and not (directory / COMPLETE_NAME).exists():
        yield Finding(what, 0, 0, f"no {COMPLETE_NAME}: never completed, and nothing resumes from it")
        return
    files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    if any((directory / name).is_file() for name in (FORMAT_NAME, INDEX_NAME, SINGLE_FILE_NAME)):
        yield _without_checksums(directory, what)
    if (directory / METRICS_NAME).is_file():
        yield _metrics(directory / METRICS_NAME, what, directory == target)
    tables = [path for path in files if path.suffix == ".parquet"]
    if tables:
        yield _parquet(tables, "*.parquet" if directory == target else f"{what}/*.parquet", on_bytes)
    for folder in sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")):
        yield from _check_below(folder, target, on_bytes)


def _with_checksums(directory: Path, what: str, on_bytes: Callable[[int], None]) -> Finding:
    read: list[int] = []

    def note(count: int) -> None:
        read.append(count)
        on_bytes(count)

    faults = [str(fault) for fault in find_faults(directory, on_bytes=note)]
    return Finding(what, len(read), sum(read), "checksums", faults)


def _without_checksums(directory: Path, what: str) -> Finding:
    """Of an earlier version, or from the hub: at least its headers and sizes have to fit."""
    files = [path for path in directory.iterdir() if path.is_file()]
    finding = Finding(what, len(files), sum(path.stat().st_size for path in files), "headers; it has no checksums")
    try:
        if (directory / FORMAT_NAME).is_file():
            DistCheckpoint(directory).check_sizes()
        else:
            HFCheckpoint(directory)
    except (DistCheckpointError, HFCheckpointError) as error:
        finding.faults.append(str(error))
    return finding


def _metrics(path: Path, folder: str, at_top: bool) -> Finding:
    """Rows that are cut, doubled, out of order or, in a run with rollouts, missing."""
    data = path.read_bytes()
    finding = Finding(METRICS_NAME if at_top else f"{folder}/{METRICS_NAME}", 1, len(data), "rows")
    lines, last = data.split(b"\n"), None
    if lines.pop():
        finding.faults.append(f"{path}: the last row is cut off")
    every_step = (path.parent / "rollouts").is_dir()
    for number, line in enumerate(lines, start=1):
        step = step_of_line(line)
        if step is None:
            finding.faults.append(f"{path}: line {number} is no row of a step")
            continue
        if last is not None and step <= last:
            finding.faults.append(f"{path}: line {number} is of step {step} again, after step {last}")
        elif every_step and last is not None and step > last + 1:
            finding.faults.append(
                f"{path}: line {number} is of step {step}, after step {last}: rows between are missing"
            )
        last = step
    finding.remark = f"{len(lines)} rows"
    return finding


def _parquet(paths: Sequence[Path], what: str, on_bytes: Callable[[int], None]) -> Finding:
    finding = Finding(what, len(paths), sum(path.stat().st_size for path in paths), "read")
    for path in paths:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for group in range(file.num_row_groups):
                    file.read_row_group(group)
        except (pa.ArrowException, OSError) as error:
            finding.faults.append(f"{path} cannot be read: {str(error).splitlines()[0]}")
        on_bytes(path.stat().st_size)
    return finding


def renew(directory: Path) -> None:
    """Make the checksums of a checkpoint or a model's directory again, as its files are now.

    Raises:
        ValueError: it is neither, or part of a checkpoint.
    """
    above = directory.absolute().parent
    marker = f"{directory.absolute().name}/{COMPLETE_NAME}"
    if has_checksums(above) and marker in (read_marker(above) or {}):
        raise InputError(f"{directory} is a part of {above}: renew that")
    model = any((directory / name).is_file() for name in (INDEX_NAME, SINGLE_FILE_NAME))
    checkpoint = (directory / FORMAT_NAME).is_file() or CHECKPOINT_NAME.fullmatch(directory.absolute().name)
    if not model and not (checkpoint and (directory / COMPLETE_NAME).is_file()):
        raise InputError(f"{directory} is neither a complete checkpoint nor a model's directory: nothing was renewed")
    for inner in sorted(directory.glob(f"*/{COMPLETE_NAME}")):
        write_marker(inner.parent)
    write_marker(directory)


def show(directory: Path, console: Console) -> int:
    """Print what was found in ``directory``; 0 where all is sound, 1 where there are faults."""
    columns = (TextColumn("checking {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(str(directory)), total=_bytes_below(directory))
        findings = list(check(directory, lambda count: progress.advance(task, count)))
    if not findings:
        console.print(f"{directory} holds nothing to check", style="bold red", markup=False, highlight=False)
        return 1
    table = Table(title=escape(str(directory)))
    table.add_column("what", overflow="fold")
    table.add_column("files", justify="right")
    table.add_column("MiB", justify="right")
    table.add_column("checked by", overflow="fold")
    table.add_column("result")
    for finding in findings:
        wrong = len(finding.faults)
        result = f"[bold red]{wrong} fault{'s' * (wrong > 1)}[/]" if wrong else "[green]sound[/]"
        if not wrong and finding.files == 0:
            result = "[yellow]incomplete[/]"
        size = f"{finding.nbytes / 2**20:.1f}"
        table.add_row(escape(finding.what), str(finding.files), size, escape(finding.remark), result)
    console.print(table)
    faults = [fault for finding in findings for fault in finding.faults]
    for fault in faults:
        console.print(fault, style="red", markup=False, highlight=False, soft_wrap=True)
    return 1 if faults else 0


def _bytes_below(directory: Path) -> int:
    paths = (Path(place) / name for place, _, names in os.walk(directory) for name in names)
    return sum(path.stat().st_size for path in paths if path.exists())
