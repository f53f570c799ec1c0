"""Real sandbox servers, one for each isolation that this host allows."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from code_interpreter.process import SandboxServerError, SandboxServerProcess
from code_interpreter.protocol import ExecutionRequest, ExecutionResult, Outcome
from code_interpreter.settings import SandboxSettings

SECRET = f"SECRET-{uuid.uuid4().hex}"
"""In the environment of every server; no snippet may find it."""


@dataclass
class Sandbox:
    """A running server and a blocking way to ask it."""

    process: SandboxServerProcess
    health: dict[str, Any]

    @property
    def isolation(self) -> str:
        return self.health["isolation"]

    @property
    def hides_files(self) -> bool:
        return self.isolation != "rlimits" or self.health["landlock"] > 0

    def run(self, code: str, **fields: Any) -> ExecutionResult:
        fields.setdefault("run_timeout", 15.0)
        return ExecutionResult.from_json(self.post(ExecutionRequest(code, **fields).to_json())[1])

    def notebook(self, *cells: str, **fields: Any) -> dict[str, Any]:
        """The answer to a notebook, by POST /run_jupyter."""
        return self.post({"cells": cells, "total_timeout": 200, **fields}, "/run_jupyter")[1]

    def post(self, body: Any, route: str = "/run_code") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.process.url}{route}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=240) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.process.url}{path}", timeout=10) as response:
            return response.read().decode()

    def scratch_directories(self) -> list[Path]:
        """The server's scratch; in /tmp where the server may not enter the tests' temporary directory."""
        places = {Path(tempfile.gettempdir()), Path("/tmp")}
        return [path for place in places for path in place.glob(f"retool-sandbox-{self.process.pid}-*")]

    def check_alive(self) -> None:
        """The server answers, and answers right."""
        result = self.run("print(6 * 7)")
        assert (result.outcome, result.stdout) == (Outcome.FINISHED, "42\n"), result


def is_alive(process: psutil.Process) -> bool:
    """Not ended, and no zombie. A process may end between the two questions."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(isolation: str = "auto", *, wrapper: tuple[str, ...] = (), **settings: Any) -> Sandbox:
    """Start a server; skip the test where this host does not allow ``isolation``."""
    settings = {"workers": 4, "memory_limit_mb": 512, "preimport": ["math"], "print_last_expression": False, **settings}
    arguments = settings.pop("arguments", ())
    process = SandboxServerProcess(
        SandboxSettings(isolation=isolation, **settings), extra_arguments=arguments, command_prefix=wrapper
    )
    before = os.environ.get("SANDBOX_TEST_SECRET")
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    try:
        process.start()
    except SandboxServerError as error:
        if "is not available" in str(error):
            pytest.skip(str(error))
        raise
    finally:
        if before is None:
            del os.environ["SANDBOX_TEST_SECRET"]
    with urllib.request.urlopen(f"{process.url}/health", timeout=10) as response:
        return Sandbox(process, json.load(response))


_AS_ORDINARY_USER = """
set -e
if [ -n "$HIDDEN" ]; then
    mount -t tmpfs none /mnt && mkdir /mnt/python && mount --bind "$PYTHON" /mnt/python
    mount -t tmpfs -o mode=755 none "$HIDDEN" && mkdir -p "$PYTHON" && mount --bind /mnt/python "$PYTHON"
fi
exec setpriv --reuid 61234 --regid 61234 --clear-groups --inh-caps=-all "$@"
"""


def as_ordinary_user() -> tuple[str, ...]:
    """A command prefix that takes root's rights away, and shows the interpreter where it lies in root's home."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("setpriv or unshare is not installed")
    python = sys.base_prefix
    hidden = [str(p) for p in reversed(Path(python).parents) if not p.stat().st_mode & 0o001]
    variables = (f"HIDDEN={hidden[0] if hidden else ''}", f"PYTHON={python}")
    return ("unshare", "--mount", "env", *variables, "sh", "-c", _AS_ORDINARY_USER, "sh")
