"""The process that runs a reward function: one JSON request a line on stdin, one JSON reply a line on stdout.

    python -m megatron_retool.rewards.worker FUNCTION MEMORY_LIMIT_MB PARENT_PID

Started by the reward manager, which holds the deadline and kills.  Needs no torch: a start costs tens of milliseconds
(plus sympy for mathematics, imported before the first request so that no deadline pays for it).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

from megatron_retool.rewards.base import BadResultError, ScoreFunction, load_function, normalize_result

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve until stdin ends."""
    name, memory_limit_mb, parent = arguments[0], int(arguments[1]), int(arguments[2])
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
        function = load_function(name)
        if name == "math":
            import math_verify  # noqa: F401
    except ValueError as error:
        reply({"ready": False, "error": str(error)})
        return 1
    reply({"ready": True})
    for line in sys.stdin:
        reply(_answer(function, json.loads(line)))
    return 0


def _answer(function: ScoreFunction, request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = function(
            request["data_source"], request["solution_str"], request["ground_truth"], request["extra_info"]
        )
        return {"result": normalize_result(result)}
    except TimeoutError as error:
        return {"failure": "timeout", "message": str(error)}
    except MemoryError:
        return {"failure": "memory", "message": "the reward function ran out of memory"}
    except BadResultError as error:
        return {"failure": "bad_result", "message": str(error)}
    except Exception as error:
        return {"failure": "exception", "message": f"{type(error).__name__}: {error}"[:1000]}


def plain_json(value: Any) -> Any:
    """Numbers and arrays of numpy as JSON; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
