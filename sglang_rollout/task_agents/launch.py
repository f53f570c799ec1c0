"""Becomes a task agent's program, behind a guard that ends all that the program started.

Standard library only: a start costs tens of milliseconds.
"""

from __future__ import annotations

import os
import resource
import sys

from megatron_retool.rewards.guard import fork_guarded

NOT_FOUND = 127


def main(arguments: list[str]) -> int:
    """Arguments: the parent's process id, the program, its arguments. Returns only where it cannot be started."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fork_guarded(int(arguments[0]))
    try:
        os.execvp(arguments[1], arguments[1:])
    except OSError as error:
        print(f"{arguments[1]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
