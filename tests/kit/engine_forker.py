"""Imports SGLang once, and forks engines from there: the process that ``forked_engine`` starts.

    python -P engine_forker.py DESCRIPTOR

DESCRIPTOR is a socket. Each request through it is a tuple, pickled; each has one answer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import runpy
import sys
import traceback
from multiprocessing.connection import Connection

PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.elastic_ep.expert_backup_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
)
"""What most engines import. SGLang puts plugins' functions into modules that are there already, too."""


def fork_engines(connection: Connection) -> None:
    """Import SGLang, then fork an engine for each request until the other end is closed."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    ended: dict[int, int] = {}
    with contextlib.suppress(EOFError):
        while True:
            request, *arguments = connection.recv()
            if request == "start":
                child = os.fork()
                if child == 0:
                    connection.close()
                    _become_engine(*arguments)
                os.setpgid(child, child)  # before anyone may kill the group
                connection.send(child)
            else:
                with contextlib.suppress(ChildProcessError):
                    while (found := os.waitpid(-1, os.WNOHANG))[0]:
                        ended[found[0]] = os.waitstatus_to_exitcode(found[1])
                connection.send(ended.get(arguments[0]))


def _become_engine(command: list[str], environment: dict[str, str], log: str) -> None:
    """What ``python -m sglang.launch_server …`` does, with a new interpreter's environment and path."""
    code = 1
    try:
        import numpy as np

        os.setpgid(0, 0)
        given = os.environ["PYTHONPATH"].split(os.pathsep)
        interpreters_path = [path for path in sys.path if path not in given]
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = [*environment["PYTHONPATH"].split(os.pathsep), *interpreters_path]
        random.seed()
        np.random.seed()
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        module = command.index("-m") + 1
        sys.argv = command[module:]
        runpy.run_module(command[module], run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    fork_engines(Connection(int(sys.argv[1])))
