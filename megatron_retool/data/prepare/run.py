"""Reads a data set, keeps what can be used once each, and writes it beside a manifest of what became of every row."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from megatron_retool.data.files import DataError
from megatron_retool.data.prepare.batches import RowFile
from megatron_retool.data.prepare.datasets import DataSet, PreparedFile, digest_of
from megatron_retool.data.prepare.layouts import Layout, Place, RowDropped
from megatron_retool.data.prepare.source import DataSetSource, SourceFile, describe_files, sha256_of
from megatron_retool.runs.progress import progress_line
from run_files.atomic_files import atomic_write, write_text
from run_files.parquet_files import write_row_groups
from untrusted import load_json

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised when what is written from the same source changes."""
REPEATED = "repeats an earlier row"
CONFLICTING = "repeats an earlier row, with another answer"
_EXAMPLES = 3
_GROUP_ROWS = 1024
_COUNTED = ("level", "subject", "contest", "tool_calls")


@dataclass
class RowCounts:
    """What became of the rows of one output."""

    read: int = 0
    written: int = 0
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Reason -> {"rows": how many, "first": the first few, as "file, row N"}."""
    by: dict[str, Counter[str]] = field(default_factory=dict)
    """Field of extra_info -> its values -> rows written."""

    def drop(self, reason: str, place: Place) -> None:
        """Count a dropped row by its reason, and remember the first places."""
        entry = self.dropped.setdefault(reason, {"rows": 0, "first": []})
        entry["rows"] += 1
        if len(entry["first"]) < _EXAMPLES:
            entry["first"].append(f"{place.file}, row {place.row}")

    def keep(self, row: dict[str, Any]) -> None:
        """Count a written row."""
        self.written += 1
        for name in _COUNTED:
            value = row["extra_info"].get(name)
            if value is not None:
                self.by.setdefault(name, Counter())[str(value)] += 1

    def as_json(self) -> dict[str, Any]:
        """The counts as the summary's JSON has them."""
        return {
            "rows_read": self.read,
            "rows_written": self.written,
            "dropped": dict(sorted(self.dropped.items())),
            "counts": {name: dict(sorted(counter.items())) for name, counter in self.by.items()},
        }


def prepare(
    data_set: DataSet,
    directory: Path,
    source: Callable[[], DataSetSource],
    wanted: str,
    instruction: str,
    console: Console,
) -> dict[str, Any]:
    """Write the data set's files into ``directory``, but those that are there already.

    Args:
        source: its files; not called where ``wanted`` was prepared before.
        wanted: repository and revision on the hub, or "" for a local copy: the digests of its files tell.
        instruction: added below bare questions.

    Returns:
        The manifest.

    Raises:
        DataError: a source cannot be read or used; files that are complete by then stay.
    """
    manifest = read_manifest(directory / MANIFEST)
    settings = {"name": data_set.name, "format": FORMAT, "instruction": instruction, "wanted": wanted}
    if any(manifest.get(key) != value for key, value in settings.items()):
        manifest = {**settings, "outputs": {}}
    if wanted and all(_is_there(directory, output, manifest) for output in data_set.outputs):
        return manifest
    result = source()
    manifest["source"] = {"where": result.where, "revision": result.revision}
    with _made(directory):
        _prepare_outputs(data_set, directory, result, manifest, instruction, console)
    return manifest


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """``directory`` is there inside; an error leaves none that is empty."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise


def _prepare_outputs(
    data_set: DataSet,
    directory: Path,
    found: DataSetSource,
    manifest: dict[str, Any],
    instruction: str,
    console: Console,
) -> None:
    for output in data_set.outputs:
        files = found.files.get(output.name)
        if files is None:
            continue
        described = describe_files(files)
        entry = manifest["outputs"].get(output.name, {})
        if entry.get("source") == described and _is_there(directory, output, manifest):
            continue
        path = directory / f"{output.name}.parquet"
        counts = _write(data_set, output, files, path, instruction, console)
        manifest["outputs"][output.name] = {
            "file": path.name,
            "sha256": sha256_of(path),
            "source": described,
            **counts.as_json(),
        }
        # After each file: an interrupted command does not make this one again.
        write_text(directory / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, or an empty one where there is none that can be read."""
    try:
        result = load_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) and isinstance(result.get("outputs"), dict) else {}


def _is_there(directory: Path, output: PreparedFile, manifest: dict[str, Any]) -> bool:
    """Whether the file is what the manifest says that was written."""
    path = directory / f"{output.name}.parquet"
    entry = manifest["outputs"].get(output.name)
    return isinstance(entry, dict) and path.is_file() and sha256_of(path) == entry.get("sha256")


def _write(
    data_set: DataSet, output: PreparedFile, files: list[SourceFile], path: Path, instruction: str, console: Console
) -> RowCounts:
    opened = [RowFile(file.path, file.name) for file in files]
    # All columns are checked before anything is written.
    layouts = [data_set.layout(file.name, file.schema, instruction) for file in opened]
    counts = RowCounts()
    with progress_line(console, f"{data_set.name}: {path.name}", sum(file.rows for file in opened)) as line:
        rows = _rows(output, list(zip(opened, layouts, strict=True)), counts, line.advance)
        schema = layouts[0].schema
        with atomic_write(path) as handle:
            write_row_groups(handle, schema, _pieces(rows, schema))
            if not counts.written:
                reasons = ", ".join(f"{entry['rows']} {reason}" for reason, entry in counts.dropped.items())
                raise DataError(
                    f"{', '.join(file.name for file in files)}: none of {counts.read} rows is left for {path.name}"
                    + (f": {reasons}" if reasons else "")
                )
    return counts


def _rows(
    output: PreparedFile, files: list[tuple[RowFile, Layout]], counts: RowCounts, advance: Callable[[int], object]
) -> Iterator[dict[str, Any]]:
    """The rows to write, with ``counts`` kept. Only digests of the rows that were seen stay in memory."""
    seen: dict[bytes, bytes] = {}
    index = 0
    for file, layout in files:
        for batch in file.batches(layout.columns):
            kept = []
            for place, (key, answer) in enumerate(zip(layout.keys(batch), layout.answers(batch), strict=True)):
                digest = digest_of(key)
                if output.takes is not None and not output.takes(digest):
                    continue
                counts.read += 1
                short = digest_of(answer)[:4]
                earlier = seen.get(digest)
                if earlier is not None:
                    where = Place(batch.file, batch.first + place, index + place, output.name)
                    counts.drop(REPEATED if earlier == short else CONFLICTING, where)
                    continue
                seen[digest] = short
                kept.append(place)
            for place, cells in zip(kept, batch.rows.take(pa.array(kept, pa.int64())).to_pylist(), strict=True):
                where = Place(batch.file, batch.first + place, index + place, output.name)
                try:
                    row = layout.row(where, cells)
                except RowDropped as error:
                    counts.drop(str(error), where)
                    continue
                counts.keep(row)
                yield row
            index += batch.rows.num_rows
            advance(batch.rows.num_rows)


def _pieces(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[dict[str, list[Any]]]:
    while piece := list(itertools.islice(rows, _GROUP_ROWS)):
        yield {name: [row[name] for row in piece] for name in schema.names}
