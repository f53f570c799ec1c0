"""TensorBoard's event files.

TensorBoard's own writer writes from a thread, which ends at the first error and leaves half a record at the file's end.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_retool.runs.append_file import AppendFile

_numbers = itertools.count()


class EventFile:
    """A new event file in ``directory``. TensorBoard hides what older ones have from ``first_step`` on."""

    def __init__(self, directory: Path, first_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard takes files in the order of their names: of two within a second the number of the process, which
        # wraps around, would decide.
        seconds, rest = divmod(time.time_ns(), 10**9)
        place = f"{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = AppendFile(directory / f"events.out.tfevents.{place}")
        self._header = _record(Event(file_version="brain.Event:2"))
        self._header += _record(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._file.path

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """
        Raises:
            OSError: nothing was written; the step comes with the next.
        """
        self._add(step, [Summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    def add_table(self, step: int, tag: str, rows: Sequence[Sequence[str]]) -> None:
        """Show cells of Markdown, ``rows`` of the same length, under TensorBoard's Text.

        Raises:
            OSError: nothing was written; the table comes with the next step.
        """
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in (len(rows), len(rows[0]))])
        cells = [cell.encode() for row in rows for cell in row]
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=cells)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(step, [Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

    def _add(self, step: int, values: Sequence[Summary.Value]) -> None:
        header, self._header = self._header, b""
        self._file.append(header + _record(Event(step=step, summary=Summary(value=values))))

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._file.close()


def _record(event: Event) -> bytes:
    event.wall_time = time.time()
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
