"""The process that runs a reward function: one JSON request a line on stdin, one JSON reply a line on stdout.

    python -m megatron_retool.rewards.worker FUNCTION KEYWORD_ARGUMENTS_AS_JSON MEMORY_LIMIT_MB PARENT_PID

Started by the reward manager, which holds the deadline and kills.  Needs no torch: a start costs tens of milliseconds.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable
from typing import Any

from megatron_retool.registry import Extension, ExtensionError
from megatron_retool.rewards.base import BadResultError, ScoreFunction, normalize_result, reward_functions

_PR_SET_PDEATHSIG = 1
_loop: Any = None


def main(arguments: list[str]) -> int:
    """Serve until stdin ends."""
    name, kwargs, memory_limit_mb, parent = arguments[0], arguments[1], int(arguments[2]), int(arguments[3])
    # A worker stuck inside one long C call sees neither the end of stdin nor a Python signal handler.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    limit = memory_limit_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What the function prints must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message, default=plain_json) + "\n")
        replies.flush()

    try:
        function = reward_functions.bind(name, json.loads(kwargs))
    except ExtensionError as error:
        reply({"ready": False, "error": str(error)})
        return 1
    reply({"ready": True})
    for line in sys.stdin:
        reply(_answer(function, json.loads(line)))
    return 0


def _answer(function: Extension[ScoreFunction], request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = function(*(request[name] for name in reward_functions.takes))
        if inspect.isawaitable(result):
            result = _wait_for(result)
        return {"result": normalize_result(result)}
    except TimeoutError as error:
        return {"failure": "timeout", "message": str(error)}
    except MemoryError:
        return {"failure": "memory", "message": "the reward function ran out of memory"}
    except BadResultError as error:
        return {"failure": "bad_result", "message": str(error)}
    except Exception as error:
        return {"failure": "exception", "message": function.raised(error)[:1000]}


def _wait_for(result: Awaitable[Any]) -> Any:
    """On one event loop for all requests: what a function keeps open between them belongs to it."""
    global _loop
    if _loop is None:
        import asyncio

        _loop = asyncio.new_event_loop()
    return _loop.run_until_complete(result)


def plain_json(value: Any) -> Any:
    """Numbers and arrays of numpy as JSON; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
