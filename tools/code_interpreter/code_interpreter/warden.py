"""Stands between the server and the zygote: chooses the isolation, and cleans up however the others end.

    python -s -P warden.py SETTINGS_JSON SERVER_PID CONTROL_FD LIFELINE_FD

The server starts it with an empty environment, so that no snippet inherits a secret.  The zygote is pid 1 of a pid
namespace where the host allows one: when the warden ends it, the kernel ends every worker and snippet with it.  The
server holds the other end of the lifeline; when the server dies, even by SIGKILL, the warden reads its end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

_LOOK_MILLISECONDS = 10_000
_REMOVAL_SECONDS = 10.0
"""The next server to start removes what is left of the scratch directory after that."""


def main() -> int:
    """Isolate this process, and start workers as the server asks; the exit status."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from code_interpreter import descendants, filesystem, isolation, linux, zygote
    from code_interpreter.child_signal import ChildSignal
    from code_interpreter.settings import SandboxSettings

    sys.path.pop(0)
    settings = SandboxSettings.from_json(sys.argv[1])
    server, lifeline = int(sys.argv[2]), int(sys.argv[4])
    control = socket.socket(fileno=int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only the lifeline decides: a signal to the group must not orphan
    try:
        plan = isolation.make_plan(settings, server)
    except (isolation.IsolationUnavailable, OSError) as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return 1
    try:
        if plan.kind == "namespaces":
            isolation.enter_namespaces(plan.user_namespace)
        children = ChildSignal()

        def be_zygote() -> None:
            children.forget()
            os.close(lifeline)
            os.close(plan.scratch_lock)  # the warden's alone, so that its successor sees at once that it has died
            zygote.redirect_standard_streams()
            zygote.run_zygote(plan, control)

        child = linux.fork(be_zygote)
        control.close()
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        poll = select.poll()
        poll.register(children, select.POLLIN)
        poll.register(lifeline, select.POLLIN | select.POLLHUP)
        # The kernel ends a pid namespace's processes with its first one.
        look = None if plan.kind == "namespaces" else _LOOK_MILLISECONDS
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            children.drain()
            if lifeline in dict(poll.poll(look)):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            if look is not None:
                descendants.end(spared=child)  # what a worker that died left behind
        if plan.first_uid is not None and plan.kind != "namespaces":
            for index in range(settings.workers):
                isolation.kill_user(plan.first_uid + index)
        descendants.end()
    finally:
        filesystem.remove_directory(plan.scratch, _REMOVAL_SECONDS)
        if plan.cgroups is not None:
            plan.cgroups.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
