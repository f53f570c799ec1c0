"""What a worker's report and a snippet's streams make of a result."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any

from code_interpreter import snippet
from code_interpreter.jupyter import read_cells
from code_interpreter.protocol import CellResult, ExecutionRequest, ExecutionResult, Outcome
from code_interpreter.settings import SandboxSettings
from code_interpreter.snippet import CELLS
from code_interpreter.streams import Streams, read_all, read_text


def result_of(
    settings: SandboxSettings,
    request: ExecutionRequest,
    answer: Mapping[str, Any],
    streams: Streams,
    files: Mapping[str, int],
) -> ExecutionResult:
    """The result of a snippet that ran to an end of its own or to a limit.

    Args:
        answer: the worker's report: state, seconds, wait status, flags, whether memory was exceeded.
        files: descriptors of the files that were asked for, by path.
    """
    stream_limit = settings.workspace_mb << 20
    cells: tuple[CellResult, ...] = ()
    cell_timed_out, position, truncated = False, (0, 0), False
    if streams.records is not None and request.language == CELLS:
        limit = settings.max_output_bytes
        cells, position, truncated = read_cells(streams, len(request.cells), limit, answer["seconds"])
        # It did not let itself be interrupted, and the process ended itself.
        last = next((cell for cell in cells if cell.status == "unfinished"), None)
        cell_timed_out = last is not None and 0 < request.cell_timeout <= last.seconds
    stdout, stdout_left = read_text(streams.stdout, settings.max_output_bytes, position[0])
    stderr, stderr_left = read_text(streams.stderr, settings.max_output_bytes, position[1])
    sizes = {"stdout": stdout_left + position[0], "stderr": stderr_left + position[1]}
    messages = [
        f"{name} truncated: {size} bytes, {settings.max_output_bytes} kept"
        for name, size in sizes.items()
        if size > settings.max_output_bytes
    ]
    truncated = truncated or bool(messages)
    code: int | None = os.waitstatus_to_exitcode(answer["wait_status"])
    flags = answer["flags"].encode()
    if answer["state"] == "timeout" or cell_timed_out:
        outcome, code = Outcome.TIME_LIMIT_EXCEEDED, None
        messages.insert(0, "the time limit was exceeded")
    elif answer["memory_exceeded"] or snippet.MEMORY_ERROR in flags:
        outcome = Outcome.MEMORY_LIMIT_EXCEEDED
        messages.insert(0, "the memory limit was exceeded")
    elif max(sizes.values()) >= stream_limit:
        outcome = Outcome.OUTPUT_LIMIT_EXCEEDED
        messages.insert(0, f"a stream reached the limit of {stream_limit} bytes")
    elif snippet.COMPILE_ERROR in flags:
        outcome = Outcome.COMPILE_ERROR
    else:
        outcome = Outcome.FINISHED
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                messages.insert(0, f"ended by {signal.Signals(-code).name}")
    contents, budget = {}, settings.workspace_mb << 20
    for path, descriptor in files.items():
        content = read_all(descriptor, budget)
        if content is None:
            messages.append(f"file {path!r} left out: the files together are longer than {stream_limit} bytes")
            continue
        budget -= len(content)
        contents[path] = content
    message = "; ".join(messages)
    return ExecutionResult(outcome, stdout, stderr, code, answer["seconds"], message, truncated, contents, cells)
