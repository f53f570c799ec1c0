"""Runs the cells of a session one after the other in the process that was made for it; variables live on.

Standard library only, as snippet.py. Cells come, and what became of them goes back, over one stream socket: each
message is a 4-byte big-endian length and JSON. To the process: {"code", "print_last_expression"}; from it:
{"end": ENDS}. What a cell prints goes to the process's standard streams.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

ENDS = ("ok", "error", "compile_error", "memory", "exit")
"""Of a cell: exit is SystemExit with a status other than 0."""


def read_message(descriptor: int) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    head = _read(descriptor, 4)
    body = _read(descriptor, struct.unpack("!I", head)[0]) if head else None
    return json.loads(body) if body else None


def write_message(descriptor: int, **message: object) -> None:
    """Write a JSON message with its length in front."""
    body = json.dumps(message).encode()
    os.write(descriptor, struct.pack("!I", len(body)) + body)


def run_session(descriptor: int, compile_cell: Callable[[str, bool, str], list[Any]]) -> int:
    """Run cells until the other side closes the stream; the exit status.

    Args:
        compile_cell: code, print_last_expression and a file's name to programs.
    """
    import builtins
    import linecache
    import types

    process = os.getpid()
    sys.argv = [""]
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    number = 0
    while (message := read_message(descriptor)) is not None:
        number += 1
        name, code = f"cell_{number}.py", message["code"]
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        end = "compile_error"
        try:
            programs = compile_cell(code, message["print_last_expression"], name)
            end = "error"
            for program in programs:
                exec(program, module.__dict__)
            end = "ok"
        except SystemExit as error:
            end = "exit" if error.code else "ok"
            if error.code and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        except BaseException as error:
            end = "memory" if isinstance(error, MemoryError) else end
            trace = error.__traceback__
            while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("cell_"):
                trace = trace.tb_next
            traceback.print_exception(type(error), error, trace)
            del error, trace
        if os.getpid() != process:  # one that the cell forked
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        write_message(descriptor, end=end)
    return 0


def _read(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            return b""
        data += part
    return data
