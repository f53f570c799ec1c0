"""The process that imports the numerical libraries once and forks a worker whenever the server needs one more."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from code_interpreter import filesystem, linux, snippet, worker
from code_interpreter.plan import IsolationPlan

_STANDARD_LIBRARY = (
    *("argparse", "array", "ast", "atexit", "base64", "bisect", "calendar", "cmath", "collections", "contextlib"),
    *("copy", "csv", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "glob", "hashlib"),
    *("heapq", "inspect", "io", "itertools", "json", "linecache", "math", "numbers", "operator", "os", "pathlib"),
    *("pickle", "pprint", "queue", "random", "re", "shutil", "signal", "statistics", "string", "struct"),
    *("subprocess", "tempfile", "textwrap", "threading", "time", "timeit", "traceback", "types", "typing"),
)
"""Imported always: cheap, and nearly every snippet uses some."""

_SUBMODULES = {
    "scipy": ("scipy.special", "scipy.linalg", "scipy.optimize", "scipy.integrate"),
}
"""Imported along with a package that loads them only on use."""

_WARM_UP = {
    "sympy": "x = sympy.Symbol('x'); sympy.solve(x**2 - 4, x); sympy.factorint(360); sympy.simplify(x/x)",
}
"""Run once after the import: the first call of these pays for further imports and caches."""


def import_modules(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Import what the snippets shall find imported; return (imported, failed with reason)."""
    imported, failed = [], []
    for name in names:
        try:
            module = importlib.import_module(name)
            for inner in _SUBMODULES.get(name, ()):
                importlib.import_module(inner)
            if name in _WARM_UP:
                exec(_WARM_UP[name], {name: module})
            imported.append(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return imported, failed


def run_zygote(plan: IsolationPlan, control: socket.socket) -> NoReturn:
    """Import, enter the read-only root, tell the server that all is ready, then fork workers on request.

    Messages on ``control`` (SOCK_SEQPACKET, JSON). To the server: {"ready": …} or {"error": …}.
    From it: {"worker": index} with the worker's end of its channel.
    """
    linux.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        started = time.monotonic()
        warm = plan.kind != "bubblewrap"  # which starts a new interpreter for each request
        imported, failed = import_modules(plan.settings.preimport) if warm else ([], [])
        if warm:
            import_modules(_STANDARD_LIBRARY)
        if plan.cgroups is not None:
            plan.cgroups.open()
        own_directories = [f"/{name}" for name in filesystem.OWN_DIRECTORIES] if plan.kind == "bubblewrap" else []
        if plan.kind == "namespaces":
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET)
            root = f"{plan.scratch}/root"
            os.mkdir(root)
            filesystem.enter_read_only_root(plan.python_directories, root)
            own_directories = filesystem.own_directories()
        usage = _memory_in_use()
    except BaseException as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    _open_the_snippets_streams()
    gc.collect()
    gc.freeze()
    gc.disable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers and whatever they leave
    ready = {**plan.describe(), "preimported": imported, "import_seconds": round(time.monotonic() - started, 3)}
    ready["own_directories"] = own_directories
    held = filter(filesystem.lies_in_own_directory, plan.python_directories) if own_directories else ()
    ready["read_only_directories"] = list(held)
    ready["warnings"] = [*plan.warnings, *(f"cannot import {text}" for text in failed)]
    control.send(json.dumps({"ready": ready}).encode())
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, worker.MESSAGE_BYTES, 1)
        except ConnectionError:
            message = b""
        if not message:
            os._exit(0)
        channel = socket.socket(fileno=descriptors[0])
        index = json.loads(message)["worker"]
        with contextlib.suppress(OSError):  # the server sees the channel close and answers for the request
            linux.fork(functools.partial(_be_worker, plan, index, channel, control, usage))
        channel.close()


def _be_worker(
    plan: IsolationPlan, index: int, channel: socket.socket, control: socket.socket, usage: tuple[int, int]
) -> None:
    control.close()
    worker.run_worker(plan, index, channel, usage)


def _open_the_snippets_streams() -> None:
    """After all imports, which may print."""
    _put_on_standard_descriptors(os.memfd_create("empty"))
    snippet.open_standard_streams()
    _put_on_standard_descriptors(os.open(os.devnull, os.O_RDWR))  # the workers share no file


def _put_on_standard_descriptors(descriptor: int) -> None:
    for number in (0, 1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _memory_in_use() -> tuple[int, int]:
    """Address space and resident memory of this process, in bytes."""
    page = resource.getpagesize()
    try:
        with open("/proc/self/statm") as file:
            size, resident = file.read().split()[:2]
        return int(size) * page, int(resident) * page
    except OSError:
        return 1 << 30, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def redirect_standard_streams() -> None:
    """Detach from the server's terminal; messages to it go only over the control channel."""
    _put_on_standard_descriptors(os.open(os.devnull, os.O_RDWR))
    sys.stdin = sys.stdout = sys.stderr = open(os.devnull, "r+")  # noqa: SIM115
