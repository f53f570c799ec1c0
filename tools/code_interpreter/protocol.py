"""Requests and answers of POST /run_code: SandboxFusion's JSON, with a typed outcome added to every answer."""

from __future__ import annotations

import base64
import binascii
import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_FETCHED_FILES = 256


class Outcome(enum.StrEnum):
    """What became of a request. Exactly one holds for every answer."""

    FINISHED = "finished"
    """The code ran to its end; return_code says how."""
    COMPILE_ERROR = "compile_error"
    """The code is not valid Python; nothing ran."""
    TIME_LIMIT_EXCEEDED = "time_limit_exceeded"
    MEMORY_LIMIT_EXCEEDED = "memory_limit_exceeded"
    OUTPUT_LIMIT_EXCEEDED = "output_limit_exceeded"
    """A stream hit the size at which writing is refused. Shorter streams are truncated in the answer alone."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed; nothing is known about the code."""
    BUSY = "busy"
    """No worker became free in time; the code did not run. HTTP status 503."""
    INVALID_REQUEST = "invalid_request"
    """The request names an unknown language or has a field of the wrong type. HTTP status 422."""


class InvalidRequest(ValueError):
    """The body of a request breaks the schema. The message names the field."""


@dataclass(frozen=True)
class ExecutionRequest:
    """One snippet and its limits."""

    code: str
    run_timeout: float = 10.0
    """Wall-clock seconds."""
    memory_limit_mb: int | None = None
    """None: the server's limit."""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written below the working directory before the code runs."""
    fetch_files: tuple[str, ...] = ()
    """Returned after the code ran, where they exist and are regular files."""
    print_last_expression: bool | None = None
    """Whether the value of a final expression statement is printed; None: the server's default."""

    @classmethod
    def from_json(cls, body: Any) -> ExecutionRequest:
        """Check and convert a decoded JSON body. Unknown fields are ignored, as SandboxFusion does.

        Raises:
            InvalidRequest: naming the field.
        """
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        code = body.get("code")
        if not isinstance(code, str):
            raise InvalidRequest("code: a string is required")
        language = body.get("language", "python")
        if language != "python":
            raise InvalidRequest(f"language: {language!r:.60} is not supported; this server runs 'python' alone")
        timeout = body.get("run_timeout", 10)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= sys.float_info.max:
            raise InvalidRequest(f"run_timeout: {timeout!r:.60} is not a positive number of seconds")
        memory = body.get("memory_limit_MB", -1)
        if isinstance(memory, bool) or not isinstance(memory, int):
            raise InvalidRequest(f"memory_limit_MB: {memory!r:.60} is not an integer")
        stdin = body.get("stdin")
        if stdin is not None and not isinstance(stdin, str):
            raise InvalidRequest("stdin: must be a string or null")
        fetch = body.get("fetch_files") or []
        if not isinstance(fetch, list) or not all(isinstance(path, str) for path in fetch):
            raise InvalidRequest("fetch_files: must be a list of strings")
        if len(fetch) > _MAX_FETCHED_FILES:
            raise InvalidRequest(f"fetch_files: {len(fetch)} files; at most {_MAX_FETCHED_FILES} are returned")
        last = body.get("print_last_expression")
        if last is not None and not isinstance(last, bool):
            raise InvalidRequest("print_last_expression: must be true, false or null")
        return cls(
            code=code,
            run_timeout=float(timeout),
            memory_limit_mb=memory if memory > 0 else None,
            stdin=(stdin or "").encode("utf-8", "surrogatepass"),
            files=_decode_files(body.get("files") or {}),
            fetch_files=tuple(dict.fromkeys(_check_path("fetch_files", path) for path in fetch)),
            print_last_expression=last,
        )

    def to_json(self) -> dict[str, Any]:
        """A body that this server and SandboxFusion's own understand."""
        body: dict[str, Any] = {
            "code": self.code,
            "language": "python",
            "run_timeout": self.run_timeout,
            "compile_timeout": self.run_timeout,
            "memory_limit_MB": self.memory_limit_mb or -1,
            "stdin": self.stdin.decode("utf-8", "surrogatepass") if self.stdin else None,
            "files": {path: base64.b64encode(content).decode() for path, content in self.files.items()},
            "fetch_files": list(self.fetch_files),
        }
        if self.print_last_expression is not None:
            body["print_last_expression"] = self.print_last_expression
        return body


@dataclass(frozen=True)
class ExecutionResult:
    """What came of a snippet."""

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    return_code: int | None = None
    """Exit status; −N where signal N ended the process; None where it was ended at a limit or never ran."""
    seconds: float = 0.0
    """Wall-clock time of the run, without the wait for a worker."""
    message: str = ""
    """For people: why it failed, what was left out."""
    truncated: bool = False
    """A stream was longer than an answer may be and lost its middle."""
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.FINISHED and self.return_code == 0

    def to_json(self) -> dict[str, Any]:
        """SandboxFusion's answer, with ``outcome`` and ``truncated`` added."""
        ran = self.outcome not in (Outcome.SANDBOX_ERROR, Outcome.BUSY, Outcome.INVALID_REQUEST)
        run_result = None
        if ran:
            timed_out = self.outcome is Outcome.TIME_LIMIT_EXCEEDED
            run_result = {
                "status": "TimeLimitExceeded" if timed_out else "Finished",
                "execution_time": self.seconds,
                "return_code": self.return_code,
                "stdout": self.stdout,
                "stderr": self.stderr,
            }
        return {
            "status": "Success" if self.ok else "Failed" if ran else "SandboxError",
            "message": self.message,
            "compile_result": None,
            "run_result": run_result,
            "executor_pod_name": None,
            "files": {path: base64.b64encode(content).decode() for path, content in self.files.items()},
            "outcome": self.outcome.value,
            "truncated": self.truncated,
        }

    @classmethod
    def from_json(cls, body: Any) -> ExecutionResult:
        """Read an answer of this server or of SandboxFusion's own, which has no ``outcome``.

        Raises:
            ValueError: the body is not such an answer.
        """
        if not isinstance(body, dict) or "status" not in body:
            raise ValueError(f"not an answer of a sandbox: {str(body)[:200]}")
        run = body.get("run_result") or {}
        if "outcome" in body:
            outcome = Outcome(body["outcome"])
        elif body["status"] == "SandboxError" or run.get("status") == "Error" or not run:
            outcome = Outcome.SANDBOX_ERROR
        elif run.get("status") == "TimeLimitExceeded":
            outcome = Outcome.TIME_LIMIT_EXCEEDED
        else:
            outcome = Outcome.FINISHED
        return cls(
            outcome=outcome,
            stdout=run.get("stdout") or "",
            stderr=run.get("stderr") or "",
            return_code=run.get("return_code"),
            seconds=run.get("execution_time") or 0.0,
            message=body.get("message") or "",
            truncated=bool(body.get("truncated")),
            files={path: base64.b64decode(content) for path, content in (body.get("files") or {}).items()},
        )


def _decode_files(files: Any) -> dict[str, bytes]:
    if not isinstance(files, dict):
        raise InvalidRequest("files: must be an object of path: base64 content")
    decoded = {}
    for path, content in files.items():
        _check_path("files", path)
        if content is None:
            continue
        try:
            decoded[path] = base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise InvalidRequest(f"files: the content of {path!r:.200} is not base64: {error}") from None
    return decoded


def _check_path(name: str, path: str) -> str:
    parts = path.split("/")
    if (
        path.startswith("/")
        or not parts[-1]
        or any(part == ".." or len(part.encode("utf-8", "replace")) > 255 for part in parts)
        or parts[-1] == "."
        or "\0" in path
        or len(path) > 1024
    ):
        raise InvalidRequest(f"{name}: {path[:200]!r} is not a relative path inside the working directory")
    return path
