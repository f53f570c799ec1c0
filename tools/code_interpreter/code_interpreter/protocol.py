"""Requests and answers of POST /run_code: SandboxFusion's JSON, with a typed outcome added to every answer.

Those of POST /run_jupyter, which is the same with several cells in place of one code, are in jupyter.py.
"""

from __future__ import annotations

import base64
import binascii
import enum
import posixpath
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from code_interpreter.filesystem import OWN_DIRECTORIES
from code_interpreter.snippet import SOURCE_NAMES
from untrusted.errors import InputError

_MAX_FETCHED_FILES = 256
_MAX_PATH_BYTES = 1024
_MAX_PLACES = 8192
"""Files of a request and the directories that hold them, half of what a workspace has room for."""
_ABSOLUTE = tuple(f"/{name}/" for name in OWN_DIRECTORIES)


class Outcome(enum.StrEnum):
    """What became of a request. Exactly one holds for every answer."""

    FINISHED = "finished"
    """The code ran to its end; return_code says how."""
    COMPILE_ERROR = "compile_error"
    """The code is not valid Python; nothing ran."""
    TIME_LIMIT_EXCEEDED = "time_limit_exceeded"
    MEMORY_LIMIT_EXCEEDED = "memory_limit_exceeded"
    OUTPUT_LIMIT_EXCEEDED = "output_limit_exceeded"
    """A stream hit the size at which writing is refused. Shorter streams are truncated only in the answer."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed; nothing is known about the code."""
    BUSY = "busy"
    """No worker became free in time, or the server stops: try again. HTTP status 503."""
    INVALID_REQUEST = "invalid_request"
    """The request names an unknown language or has a field of the wrong type or value. HTTP status 422."""


class InvalidRequest(InputError):
    """The body of a request breaks the schema. The message names the field."""


@dataclass(frozen=True)
class ExecutionRequest:
    """One snippet and its limits."""

    code: str
    language: str = "python"
    """A key of snippet.SOURCE_NAMES, or snippet.CELLS."""
    run_timeout: float = 10.0
    """Wall-clock seconds."""
    memory_limit_mb: int | None = None
    """None: the server's limit."""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written before the code runs: relative paths below its working directory, absolute ones below /mnt or /tmp."""
    fetch_files: tuple[str, ...] = ()
    """Returned after the code ran, where they exist and are regular files."""
    print_last_expression: bool | None = None
    """Whether the value of a final expression statement is printed; None: the server's default. Only for Python."""
    cells: tuple[str, ...] = ()
    """In place of ``code``, of a notebook (``language`` CELLS)."""
    cell_timeout: float = 0.0
    """Wall-clock seconds of each cell; 0: only ``run_timeout`` holds."""

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
        if not isinstance(language, str) or language not in SOURCE_NAMES:
            known = ", ".join(SOURCE_NAMES)
            raise InvalidRequest(f"language: {language!r:.60} is not supported; this server runs {known}")
        stdin = body.get("stdin")
        if stdin is not None and not isinstance(stdin, str):
            raise InvalidRequest("stdin: must be a string or null")
        common = common_fields(body)
        if language != "python":
            for path in common["files"]:
                if posixpath.normpath(path).split("/")[0] == SOURCE_NAMES[language]:
                    raise InvalidRequest(f"files: {path!r:.60} is where the {language} code itself is written")
        last = body.get("print_last_expression")
        if last is not None and not isinstance(last, bool):
            raise InvalidRequest("print_last_expression: must be true, false or null")
        return cls(
            code=code,
            language=language,
            run_timeout=seconds(body, "run_timeout", 10),
            stdin=(stdin or "").encode("utf-8", "surrogatepass"),
            print_last_expression=last,
            **common,
        )

    def to_json(self) -> dict[str, Any]:
        """A body that this server and SandboxFusion's own understand."""
        body: dict[str, Any] = {
            "code": self.code,
            "language": self.language,
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
class CellResult:
    """What came of one cell of a notebook."""

    status: str
    """ok, error, timeout, unfinished (the process ended in it) or not_run."""
    seconds: float = 0.0
    stdout: str = ""
    stderr: str = ""
    display: tuple[Mapping[str, Any], ...] = ()
    """For each displayed object its data by media type; binary data as base64."""
    error: tuple[Mapping[str, Any], ...] = ()
    """Exceptions that nothing caught: ename, evalue, and the lines of the traceback."""


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
    cells: tuple[CellResult, ...] = ()
    """Of a notebook; ``stdout`` and ``stderr`` then are what was written outside of its cells."""

    @property
    def ok(self) -> bool:
        """Whether the code ended by itself with exit status 0."""
        return self.outcome is Outcome.FINISHED and self.return_code == 0

    @property
    def ran(self) -> bool:
        """Whether the code was started at all."""
        return self.outcome not in (Outcome.SANDBOX_ERROR, Outcome.BUSY, Outcome.INVALID_REQUEST)

    @property
    def status(self) -> str:
        """SandboxFusion's word."""
        return "Success" if self.ok else "Failed" if self.ran else "SandboxError"

    def command_result(self) -> dict[str, Any] | None:
        """What SandboxFusion's ``run_result`` says; None where nothing ran."""
        if not self.ran:
            return None
        timed_out = self.outcome is Outcome.TIME_LIMIT_EXCEEDED
        return {
            "status": "TimeLimitExceeded" if timed_out else "Finished",
            "execution_time": self.seconds,
            "return_code": self.return_code,
            "stdout": self.stdout,
            "stderr": self.stderr,
        }

    def common_json(self) -> dict[str, Any]:
        """The fields that the answers of all routes have."""
        return {
            "status": self.status,
            "message": self.message,
            "executor_pod_name": None,
            "files": {path: base64.b64encode(content).decode() for path, content in self.files.items()},
            "outcome": self.outcome.value,
            "truncated": self.truncated,
        }

    def to_json(self) -> dict[str, Any]:
        """SandboxFusion's answer, with ``outcome`` and ``truncated`` added."""
        return {**self.common_json(), "compile_result": None, "run_result": self.command_result()}

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


def seconds(body: Mapping[str, Any], name: str, default: float, *, zero: bool = False) -> float:
    """The duration ``name`` of a request's body.

    Raises:
        InvalidRequest: it is no positive number (or zero, where ``zero`` allows it).
    """
    value = body.get(name, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max or (value == 0 and not zero):
        raise InvalidRequest(f"{name}: {value!r:.60} is not a positive number of seconds")
    return float(value)


def common_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """memory_limit_mb, files and fetch_files of an ``ExecutionRequest``, which the requests of all routes have.

    Raises:
        InvalidRequest: naming the field.
    """
    memory = body.get("memory_limit_MB", -1)
    if isinstance(memory, bool) or not isinstance(memory, int):
        raise InvalidRequest(f"memory_limit_MB: {memory!r:.60} is not an integer")
    fetch = body.get("fetch_files") or []
    if not isinstance(fetch, list) or not all(isinstance(path, str) for path in fetch):
        raise InvalidRequest("fetch_files: must be a list of strings")
    if len(fetch) > _MAX_FETCHED_FILES:
        raise InvalidRequest(f"fetch_files: {len(fetch)} files; at most {_MAX_FETCHED_FILES} are returned")
    return {
        "memory_limit_mb": memory if memory > 0 else None,
        "files": _decode_files(body.get("files") or {}),
        "fetch_files": tuple(dict.fromkeys(_check_path("fetch_files", path) for path in fetch)),
    }


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
    _check_places(decoded)
    return decoded


def _check_places(paths: Iterable[str]) -> None:
    """Raise InvalidRequest where two paths name one place, or one needs a directory where another is a file."""
    files: set[str] = set()
    directories: set[str] = set()
    for path in paths:
        place = posixpath.normpath(path)
        if place in files:
            raise InvalidRequest(f"files: {path[:200]!r} names the same place as another path")
        files.add(place)
        while (place := posixpath.dirname(place)) not in ("", "/"):
            directories.add(place)
        if len(files) + len(directories) > _MAX_PLACES:
            raise InvalidRequest(f"files: more than {_MAX_PLACES} files and directories")
    if both := files & directories:
        raise InvalidRequest(f"files: {min(both)[:200]!r} is a file, and a directory of another path")


def _check_path(name: str, path: str) -> str:
    parts = path.split("/")
    if len(path) > _MAX_PATH_BYTES:
        raise InvalidRequest(f"{name}: {path[:200]!r}… is longer than {_MAX_PATH_BYTES} bytes")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: {path[:200]!r} is not valid Unicode") from None
    if (
        (path.startswith("/") and not path.startswith(_ABSOLUTE))
        or not parts[-1]
        or any(part == ".." or len(part.encode()) > 255 for part in parts)
        or parts[-1] == "."
        or "\0" in path
        or size > _MAX_PATH_BYTES
    ):
        below = " or ".join(_ABSOLUTE)
        raise InvalidRequest(f"{name}: {path[:200]!r} is neither a path inside the working directory nor below {below}")
    return path
