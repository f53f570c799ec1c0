"""Requests and answers of POST /run_jupyter, as SandboxFusion has them, with what became of each cell added."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from code_interpreter.notebook import MOST_DISPLAYS
from code_interpreter.protocol import (
    CellResult,
    ExecutionRequest,
    ExecutionResult,
    InvalidRequest,
    common_fields,
    seconds,
)
from code_interpreter.snippet import CELLS
from code_interpreter.streams import Streams, read_text
from untrusted import check_levels

MOST_DISPLAY_BYTES = 16 << 20
"""What the cells of one notebook may display together."""
_MOST_CELLS = 1024
_ENDS = ("ok", "error", "timeout")
_ROOM_FOR_MARKS = 4 << 20


def request_from_json(body: Any) -> ExecutionRequest:
    """Check and convert a decoded JSON body. Unknown fields are ignored, as SandboxFusion does.

    Raises:
        InvalidRequest: naming the field.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    cells = body.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, str) for cell in cells):
        raise InvalidRequest("cells: a list of strings is required")
    if len(cells) > _MOST_CELLS:
        raise InvalidRequest(f"cells: {len(cells)} cells; at most {_MOST_CELLS} are run")
    kernel = body.get("kernel", "python3")
    if kernel != "python3":
        raise InvalidRequest(f"kernel: {kernel!r:.60} is not supported; this server has python3")
    return ExecutionRequest(
        code="",
        language=CELLS,
        cells=tuple(cells),
        cell_timeout=seconds(body, "cell_timeout", 0, zero=True),
        run_timeout=seconds(body, "total_timeout", 45),
        **common_fields(body),
    )


def result_to_json(result: ExecutionResult) -> dict[str, Any]:
    """SandboxFusion's answer, with ``outcome`` and ``truncated``, and each cell's ``status`` and ``execution_time``."""
    return {
        **result.common_json(),
        "driver": result.command_result(),
        "cells": [
            {
                "status": cell.status,
                "execution_time": cell.seconds,
                "stdout": cell.stdout,
                "stderr": cell.stderr,
                "display": list(cell.display),
                "error": list(cell.error),
            }
            for cell in result.cells
        ],
    }


def read_cells(
    streams: Streams, count: int, limit: int, duration: float
) -> tuple[tuple[CellResult, ...], tuple[int, int], bool]:
    """What the cells said, by the records that the process wrote; it may have written anything.

    Args:
        count: cells of the request.
        limit: bytes of each output stream that the cells together may keep.
        duration: seconds that the process ran.

    Returns:
        One result for each cell; how many bytes of stdout and stderr they account for; whether any lost its middle.
    """
    outputs = (streams.stdout, streams.stderr)
    sizes = [os.fstat(descriptor).st_size for descriptor in outputs]
    limits = [limit if size <= limit else limit // max(count, 1) for size in sizes]
    cells: list[CellResult] = []
    position, truncated = [0, 0], False
    current: _OpenCell | None = None

    def close(cell: _OpenCell, status: str, at: float, reached: list[int]) -> None:
        nonlocal position, truncated
        texts = []
        for descriptor, most, start, end in zip(outputs, limits, position, reached, strict=True):
            text, size = read_text(descriptor, most, start, end)
            texts.append(text)
            truncated = truncated or size > most
        position = reached
        took = min(max(at - cell.started, 0.0), duration)
        cells.append(CellResult(status, took, texts[0], texts[1], tuple(cell.display), tuple(cell.error)))

    for record in _records(streams):
        reached = [
            min(max(_whole(record.get(name)), start), size)
            for name, start, size in zip(("stdout", "stderr"), position, sizes, strict=True)
        ]
        if current is None:
            if record.get("start") == len(cells) < count:
                current, position = _OpenCell(_number(record.get("at"))), reached
        elif isinstance(record.get("display"), dict):
            current.display.append(record["display"])
        elif isinstance(record.get("error"), dict):
            current.error.append(record["error"])
        elif record.get("end") in _ENDS:
            close(current, record["end"], _number(record.get("at")), reached)
            current = None
    if current is not None:
        close(current, "unfinished", duration, sizes)
    cells += [CellResult("not_run")] * (count - len(cells))
    return tuple(cells), (position[0], position[1]), truncated


@dataclass
class _OpenCell:
    started: float
    display: list[dict[str, Any]] = field(default_factory=list)
    error: list[dict[str, Any]] = field(default_factory=list)


def _records(streams: Streams) -> Iterator[dict[str, Any]]:
    assert streams.records is not None
    size = os.fstat(streams.records).st_size
    data = os.pread(streams.records, min(size, MOST_DISPLAY_BYTES + _ROOM_FOR_MARKS), 0)
    for line in itertools.islice(io.BytesIO(data), 2 * _MOST_CELLS + MOST_DISPLAYS):
        try:
            # What JSON cannot say becomes text, so that the answer is JSON for every reader.
            record = json.loads(line, parse_constant=str, parse_float=_finite)
            check_levels(record)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _finite(text: str) -> float | str:
    return float(text) if math.isfinite(float(text)) else text


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e9 else 0.0
