"""Parquet files: read, with one error for everything that may be damaged and its place, and written by pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from untrusted.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa


_FREE_BYTES, _MOST_TIMES, _COUNTED_ROWS = 2**30, 256, 1024


class UnreadableFile(InputError):
    """A file is missing, damaged, or of another kind. The message names it, row and column where known, and a cure."""


def read_parquet(path: str | Path, columns: Sequence[str] | None = None, optional: Sequence[str] = ()) -> pa.Table:
    """The table, whose checksums (where it has some), lengths and text have been checked.

    Args:
        columns: those that must be there, and are read; None: all.
        optional: read too, where the file has them.

    Raises:
        UnreadableFile: naming file, row and column.
    """
    with _opened(path, columns, optional) as file:
        return file.table()


def read_row_groups(
    path: str | Path, columns: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> Iterator[pa.Table]:
    """The table of ``read_parquet`` by pieces: a row group after another.

    Raises:
        UnreadableFile: naming file, row and column.
    """
    with _opened(path, columns, optional) as file:
        yield from map(file.table, range(file.handle.num_row_groups))


def column_names(path: str | Path) -> list[str]:
    """Of a file's table.

    Raises:
        UnreadableFile: the file is missing or damaged.
    """
    import pyarrow.parquet as pq

    with damage_named(path):
        return list(pq.read_schema(path).names)


def read_row(
    path: str | Path, row: int, columns: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> dict[str, Any]:
    """A row as ``read_parquet`` would have it; only its row group is read.

    Args:
        row: from 0, within the file.

    Raises:
        UnreadableFile: naming file, row and column.
    """
    with _opened(path, columns, optional) as file:
        before = 0
        for group in range(file.handle.num_row_groups):
            rows = file.handle.metadata.row_group(group).num_rows
            if row < before + rows:
                return dict(file.table(group).slice(row - before, 1).to_pylist()[0])
            before += rows
        raise UnreadableFile(f"{path} has {before} rows, and no row {row}")


def list_groups(
    path: str | Path, names: Sequence[str]
) -> Iterator[dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]]:
    """Columns of lists, a row group after another: of each its offsets [rows + 1] and its values end to end.

    Raises:
        UnreadableFile: naming file, row and column.
    """
    import numpy as np

    for table in read_row_groups(path, names):
        check_lists(path, table, names)
        result = {}
        for name in names:
            column = table[name].combine_chunks()
            offsets = column.offsets.to_numpy().astype(np.int64)
            values = column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
            result[name] = (offsets - offsets[0], values)
        yield result


def check_lists(path: str | Path, table: pa.Table, names: Sequence[str]) -> None:
    """Hold that these columns of a table are lists of numbers or truth values, one in each row.

    Args:
        path: of the file that the table was read from.

    Raises:
        UnreadableFile: naming file, row and column.
    """
    import pyarrow as pa

    for name in names:
        kind = table.schema.field(name).type
        inner = kind.value_type if pa.types.is_list(kind) else None
        numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        if inner is None or not any(each(inner) for each in numbers):
            raise UnreadableFile(f"{path}: column {name!r} holds {kind} in place of lists of numbers")
        if table[name].null_count:
            row = table[name].is_null().index(True).as_py()
            raise UnreadableFile(f"{path}, row {row}: column {name!r} has no list")


@dataclass(frozen=True)
class _Opened:
    """
    Attributes:
        columns: what is read; None: all.
    """

    path: Path
    handle: Any
    columns: Sequence[str] | None

    def table(self, group: int | None = None) -> pa.Table:
        """Of a row group, or of the whole file, checked."""
        import pyarrow as pa

        columns = None if self.columns is None else list(self.columns)
        try:
            if group is None:
                table = self.handle.read(columns=columns)
            else:
                table = self.handle.read_row_group(group, columns=columns)
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(self.path, error, _place_of_damage(self.handle, columns)) from error
        return table


@contextlib.contextmanager
def _opened(path: str | Path, columns: Sequence[str] | None, optional: Sequence[str]) -> Iterator[_Opened]:
    """The file with the columns that ``read_parquet`` describes; whatever fails in the block is its damage."""
    import pyarrow.parquet as pq

    path = Path(path)
    with damage_named(path), pq.ParquetFile(path, page_checksum_verification=True) as handle:
        result = handle.schema_arrow.names
        _check_columns(path, result, columns)
        if columns is not None:
            columns = [*columns, *(name for name in optional if name in result)]
        yield _Opened(path, handle, columns)


def check_expansion(path: str | Path) -> None:
    """Refuse a file whose values would take far more memory than data of its size does, before they are read.

    A page of a few bytes may stand for a million rows of the same long text. Its dictionary is read, and the rows are
    counted by it.

    Raises:
        UnreadableFile: naming the file and its size in memory.
    """
    import pyarrow.parquet as pq

    path = Path(path)
    with damage_named(path), pq.ParquetFile(path) as handle:
        limit = max(_FREE_BYTES, _MOST_TIMES * path.stat().st_size)
        # Not by the columns' metadata: asked for a damaged one, pyarrow ends the process.
        groups = [handle.metadata.row_group(number) for number in range(handle.num_row_groups)]
        least = sum(group.num_rows + group.total_byte_size for group in groups)
        if least <= limit < sum(group.num_rows * (1 + group.total_byte_size) for group in groups):
            least, paths = 0, [handle.schema.column(number).path for number in range(len(handle.schema))]
            with pq.ParquetFile(path, read_dictionary=paths, page_checksum_verification=True) as counted:
                for batch in counted.iter_batches(_COUNTED_ROWS):
                    batch.validate(full=True)  # an index beyond a dictionary would end the process
                    least += sum(map(_expanded_bytes, batch.columns))
                    if least > limit:
                        break
        if least > limit:
            raise UnreadableFile(
                f"{path}: its rows would take more than {least / 2**30:.1f} GiB of memory, and the file has "
                f"{path.stat().st_size} bytes, as no data of any use does: write smaller files, or leave out the column"
            )


def _expanded_bytes(column: Any) -> int:
    """What a column that keeps its dictionaries takes without them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_struct(kind):
        return sum(_expanded_bytes(part) for part in column.flatten())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return len(column) * 4 + _expanded_bytes(pc.list_flatten(column))
    if not pa.types.is_dictionary(kind):
        return int(column.nbytes)
    lengths = pc.binary_length(column.dictionary).cast(pa.int64())
    return len(column) * 4 + int(pc.sum(lengths.take(column.indices)).as_py() or 0)


def write_row_groups(handle: Any, schema: pa.Schema, pieces: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to an open file, each piece (column -> values) as a row group; only one is in memory at a time.

    Compressed with zstd, with a checksum for each page. Values of the type large_binary, which do not repeat, get no
    dictionary.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = zip(schema.names, schema.types, strict=True)
    repeating = [path for column in columns for path, kind in _leaves(*column) if kind != pa.large_binary()]
    options = {"compression": "zstd", "write_page_checksum": True, "use_dictionary": repeating}
    with pq.ParquetWriter(handle, schema, **options) as writer:
        for piece in pieces:
            writer.write_table(pa.table(piece, schema=schema))


def _leaves(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """(path in the file, type) of what a column without deeper nesting is stored as."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        yield f"{name}.list.element", kind.value_type
    elif pa.types.is_struct(kind):
        parts = pa.schema(kind)
        yield from ((f"{name}.{part}", inner) for part, inner in zip(parts.names, parts.types, strict=True))
    else:
        yield name, kind


@contextlib.contextmanager
def damage_named(path: str | Path) -> Iterator[None]:
    """Make every error of reading ``path`` in the block an UnreadableFile."""
    import pyarrow as pa

    try:
        yield
    except UnreadableFile:
        raise
    except FileNotFoundError as error:
        raise UnreadableFile(f"{path}: the file does not exist") from error
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str | Path, error: BaseException, place: str = "") -> UnreadableFile:
    reason = (str(error).splitlines() or [""])[0][:300].rstrip(". ") or type(error).__name__
    return UnreadableFile(
        f"{path}{place}: cannot be read: {reason}. It is damaged or cut short: fetch or make it again"
    )


def _check_columns(path: Path, found: Sequence[str], wanted: Sequence[str] | None) -> None:
    for name in set(found):
        if found.count(name) > 1:
            raise UnreadableFile(f"{path}: column {name!r} appears {found.count(name)} times")
    missing = [name for name in wanted or () if name not in found]
    if missing:
        raise UnreadableFile(
            f"{path}: column {missing[0]!r} is missing; the file has {', '.join(found)}: name another file here"
        )


def _place_of_damage(file: Any, columns: Sequence[str] | None) -> str:
    """ ", rows 0 to 99, column 'prompt'", or less where the damage is not in one column's values."""
    import pyarrow as pa

    first = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        for name in columns or file.schema_arrow.names:
            try:
                column = file.read_row_group(group, columns=[name]).column(0)
            except (pa.ArrowException, OSError, ValueError):
                return f", rows {first} to {first + count - 1}, column {name!r}"
            try:
                column.validate(full=True)
            except pa.ArrowException:
                return f"{_row_of(column, first)}, column {name!r}"
        first += count
    return ""


def _row_of(column: pa.ChunkedArray, first: int) -> str:
    """The first row that is not valid."""
    import pyarrow as pa

    for row in range(len(column)):
        try:
            column.slice(row, 1).validate(full=True)
        except pa.ArrowException:
            return f", row {first + row}"
    return f", rows {first} to {first + len(column) - 1}"
