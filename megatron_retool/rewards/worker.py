"""The process that runs a reward function: a JSON request, a JSON reply, each in a frame of ``channel``.

    python -m megatron_retool.rewards.worker FUNCTION KEYWORD_ARGUMENTS_AS_JSON MEMORY_LIMIT_MB PARENT_PID DESCRIPTOR

Started by the reward manager, which holds the deadline and kills.  Needs no torch: a start costs tens of milliseconds.

Requests and replies have a descriptor of their own, which no child of the function inherits: nothing that the function
prints, and no process that it leaves behind, can be taken for a reply.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable
from typing import Any

from megatron_retool.registry import Extension, ExtensionError
from megatron_retool.rewards.base import BadResultError, ScoreFunction, normalize_result, reward_functions
from megatron_retool.rewards.channel import BrokenFrame, Channel
from megatron_retool.rewards.guard import fork_guarded
from untrusted import check_levels

MOST_RESULT_BYTES = 64 << 20
_loop: Any = None


def main(arguments: list[str]) -> int:
    """Serve until the manager closes its end."""
    name, kwargs, memory_limit_mb, parent, descriptor = arguments[0], arguments[1], *map(int, arguments[2:5])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fork_guarded(parent)
    limit = memory_limit_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    os.register_at_fork(after_in_child=channel.close)
    os.dup2(2, 1)
    worker = os.getpid()
    try:
        function = reward_functions.bind(name, json.loads(kwargs))
    except ExtensionError as error:
        channel.send(0, json.dumps({"ready": False, "error": str(error)}).encode())
        return 1
    channel.send(0, json.dumps({"ready": True, "pid": worker}).encode())
    while True:
        try:
            number, request = channel.receive()
        except (EOFError, OSError, BrokenFrame):
            # Its guard has to hear that the manager is gone, even where somebody stopped it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(os.getppid(), signal.SIGCONT)
            return 0
        payload = _answer(function, json.loads(request))
        if os.getpid() != worker:
            os._exit(0)  # The function forked, and this is the child, which has returned as well.
        channel.send(number, payload)


def _answer(function: Extension[ScoreFunction], request: dict[str, Any]) -> bytes:
    try:
        result = function(*(request[name] for name in reward_functions.takes))
        if inspect.isawaitable(result):
            result = _wait_for(result)
        return json.dumps({"result": _plain(normalize_result(result))}).encode()
    except TimeoutError as error:
        failure, message = "timeout", str(error)
    except MemoryError:
        failure, message = "memory", "the reward function ran out of memory"
    except BadResultError as error:
        failure, message = "bad_result", str(error)
    except BaseException as error:
        # SystemExit and the like too: the answer to one response is all that a function decides.
        failure, message = "exception", function.raised(error)[:1000]
    return json.dumps({"failure": failure, "message": message}).encode()


def _plain(result: dict[str, Any]) -> Any:
    """``result`` as JSON types that whoever stores them can write again."""
    try:
        text = json.dumps(result, default=plain_json)
        if len(text) > MOST_RESULT_BYTES:
            raise BadResultError(f"a reward function returned {len(text)} bytes; at most {MOST_RESULT_BYTES} are kept")
        plain = json.loads(text)
        check_levels(plain)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, BadResultError):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadResultError(f"what the reward function returned cannot be kept as JSON: {reason}"[:300]) from error
    return plain


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
