"""Runs one snippet in the process that was made for it.

Standard library only, as notebook.py and console.py: bubblewrap executes these in a new interpreter.

The request comes in a file descriptor as a 4-byte big-endian header length, the header (JSON: language, code,
print_last_expression, cells, cell_timeout, record_bytes, files as [path, size] pairs, fetch_files, limits), and the
input files' bytes one after the other.  What happened beyond the exit status stands as single letters on the status
descriptor: see the constants.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from code_interpreter import console, notebook

STARTED = b"S"
"""The sandbox is set up; what fails from here on is the snippet's own doing."""
COMPILE_ERROR = b"C"
MEMORY_ERROR = b"M"
SETUP_FAILED = b"E"
"""Followed by a message."""

FILE_NAME = "main.py"
SOURCE_NAMES = {"python": FILE_NAME, "pytest": "test_main.py", "bash": "main.sh"}
"""The languages of POST /run_code, and the name of the code's own file in the working directory."""
CELLS = "jupyter"
"""The language of POST /run_jupyter."""
SESSION = "session"
"""The language of a session, whose cells come later (see console.py)."""

_BASH = "/bin/bash"


def read_header(descriptor: int) -> tuple[dict[str, Any], int]:
    """The request's header and the offset of the bytes behind it."""
    (length,) = struct.unpack("!I", os.pread(descriptor, 4, 0))
    return json.loads(os.pread(descriptor, length, 4)), 4 + length


def write_files(descriptor: int, offset: int, files: list[list[Any]], directory: str) -> None:
    """Write the input files, relative paths below ``directory``; the server has checked them."""
    for path, size in files:
        target = os.path.join(directory, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        end = offset + size
        while offset < end:
            offset += os.write(file, os.pread(descriptor, min(1 << 20, end - offset), offset))
        os.close(file)


def set_limits(limits: dict[str, Any], address_space_in_use: int) -> None:
    """Bind this process and its descendants by rlimits.

    Args:
        limits: memory_bytes, max_processes, file_bytes.
        address_space_in_use: bytes that the interpreter had mapped before the snippet.
    """
    memory = limits["memory_bytes"] + address_space_in_use
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, limits["max_processes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 256),
        # 1 byte, not 0: with 0 the kernel would still feed a dump to a core_pattern that is a pipe.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_MEMLOCK, 1 << 20),
        (resource.RLIMIT_MSGQUEUE, 1 << 20),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


INTERPRETER_ENVIRONMENT = {
    # A set of texts has the same order in each run.
    "PYTHONHASHSEED": "0",
    # Without it a thread reserves up to 128 MiB, which the limit of the address space counts.
    "MALLOC_ARENA_MAX": "1",
}
"""Of every interpreter that runs snippets, from its start."""


def environment(home: str, temporary: str) -> dict[str, str]:
    """All the environment that a snippet has."""
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": temporary,
        "MPLCONFIGDIR": f"{temporary}/matplotlib",
        "IPYTHONDIR": f"{temporary}/ipython",
        "LANG": "C.UTF-8",
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        **INTERPRETER_ENVIRONMENT,
    }


def run(header: dict[str, Any], status: int, records: int) -> int:
    """Run what the request asks for and return the exit status.

    Args:
        header: of the request.
        status: descriptor for what happens beyond the exit status.
        records: descriptor for what a notebook's cells do, or of a session's socket; −1 for other languages.
    """
    for descriptor in {status, records} - {-1}:
        os.set_inheritable(descriptor, False)
    language = header["language"]
    if language == "bash":
        _run_bash(header["code"], header["limits"])
    sys.path.insert(0, os.getcwd())
    if language == CELLS:
        return notebook.run_cells(header["cells"], header["cell_timeout"], records, header["record_bytes"])
    if language == SESSION:
        return console.run_session(records, _compile)
    if language == "pytest":
        return _run_guarded(lambda: _run_pytest(header["code"]), status)
    return _run_guarded(lambda: _run_python(header["code"], header["print_last_expression"], status), status)


def _run_bash(code: str, limits: dict[str, Any]) -> NoReturn:
    name = SOURCE_NAMES["bash"]
    # Python ignores these two, and what is ignored stays so.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # The interpreter's own address space goes with it.
    memory = min(limits["memory_bytes"], resource.getrlimit(resource.RLIMIT_AS)[1])
    try:
        _write_source(name, code)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        os.execv(_BASH, [_BASH, name])
    except OSError as error:
        os.write(2, f"{_BASH} {name}: {error.strerror}\n".encode())
        os._exit(127)


def open_standard_streams() -> None:
    """Make Python's streams, for a process whose first three descriptors are files as ``streams.Streams`` has.

    A fork has them: it then need not make its own, and what they were made on is replaced by its descriptors.
    """
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)


def _run_pytest(code: str) -> NoReturn:
    """As ``pytest test_main.py``."""
    name = SOURCE_NAMES["pytest"]
    _write_source(name, code)
    sys.argv = ["pytest", name]
    import pytest

    raise SystemExit(int(pytest.main([name])))


def _run_python(code: str, print_last_expression: bool, status: int) -> None:
    """As ``python main.py``."""
    import builtins
    import linecache
    import types

    sys.argv = [FILE_NAME]
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=os.path.join(os.getcwd(), FILE_NAME))
    sys.modules["__main__"] = module
    with contextlib.suppress(OSError):  # the request brought a main.py of its own
        _write_source(FILE_NAME, code)
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    try:
        programs = _compile(code, print_last_expression)
    except Exception:
        os.write(status, COMPILE_ERROR)
        raise
    for program in programs:
        exec(program, module.__dict__)


def _run_guarded(program: Callable[[], None], status: int) -> int:
    """Call ``program`` as the interpreter calls a script, down to its end, and return the exit status."""
    import atexit
    import threading
    import traceback

    exit_status = 0
    try:
        program()
    except SystemExit as error:
        if isinstance(error.code, int):
            exit_status = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            exit_status = 1
    except BaseException as error:
        exit_status = 1
        if isinstance(error, MemoryError):
            os.write(status, MEMORY_ERROR)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE_NAME:
            trace = trace.tb_next
        error.__traceback__ = trace
        del trace
        traceback.print_exception(error)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        exit_status = exit_status or 1
    for name in ("stdout", "__stdout__", "stderr", "__stderr__"):
        stream = getattr(sys, name)
        try:
            if not stream.closed:
                stream.flush()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
            exit_status = exit_status or 1
    return exit_status


def _write_source(name: str, code: str) -> None:
    """For bash and pytest; of Python, for multiprocessing's spawn and for code that opens ``__file__``."""
    with open(name, "x", encoding="utf-8", errors="surrogatepass") as file:
        file.write(code)


def _compile(code: str, print_last_expression: bool, name: str = FILE_NAME) -> list[Any]:
    if not print_last_expression:
        return [compile(code, name, "exec", dont_inherit=True)]
    import ast

    tree = ast.parse(code, name)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return [compile(tree, name, "exec", dont_inherit=True)]
    # "single" sends an expression statement's value through sys.displayhook, as the interactive interpreter does.
    last = ast.Interactive([tree.body.pop()])
    return [compile(part, name, mode, dont_inherit=True) for part, mode in ((tree, "exec"), (last, "single"))]


def own_modules() -> list[str]:
    """The project's modules that are imported, by name."""
    return [name for name in sys.modules if name.partition(".")[0] in ("code_interpreter", "untrusted")]


def forget(modules: Sequence[str]) -> None:
    """Leave the snippet none of ``modules``; what runs holds on to them."""
    for name in modules:
        del sys.modules[name]


def main() -> None:
    """``python -s -P -c … REQUEST_FD STATUS_FD RECORDS_FD``, inside bubblewrap."""
    request, status, records = map(int, sys.argv[1:4])
    try:
        header, offset = read_header(request)
        os.environ.clear()
        os.environ.update(environment(os.getcwd(), "/tmp"))
        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
        set_limits(header["limits"], in_use)
        write_files(request, offset, header["files"], os.getcwd())
        os.close(request)
        forget(own_modules())
        open_standard_streams()
        os.write(status, STARTED)
    except BaseException as error:
        os.write(status, SETUP_FAILED + str(error).encode(errors="replace")[:1000])
        os._exit(125)
    os._exit(run(header, status, records))
