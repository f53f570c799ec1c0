"""What a sandbox server gets when it starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

ISOLATION_ORDER = ("namespaces", "bubblewrap", "rlimits")
"""From the strongest to the weakest; ``auto`` takes the first that this host allows."""

DEFAULT_PREIMPORT = ("numpy", "sympy", "scipy", "math")

TOKEN_VARIABLE = "MEGATRON_RETOOL_SANDBOX_TOKEN"
"""Environment variable with the token that every request to a server must show; unset or empty: none is needed."""


INTERPRETER_FLAGS = ("-s", "-P")
"""As -I, which would also leave PYTHONHASHSEED out; the environment has nothing but our own variables."""


@dataclass(frozen=True)
class SandboxSettings:
    """Limits and choices of one server, the same for all its workers."""

    workers: int = 128
    """Snippets that run at the same time. Workers are forked when they are first needed."""
    isolation: str = "auto"
    """``auto`` or one of ISOLATION_ORDER; a named one that the host refuses is an error, never a silent downgrade."""
    memory_limit_mb: int = 1024
    """Memory of one snippet with all its processes; a request may ask for less."""
    max_run_seconds: float = 300.0
    """Upper bound of a request's run_timeout."""
    max_processes: int = 64
    """Processes and threads that one snippet may have."""
    workspace_mb: int = 64
    """Size of a snippet's private file system, and of its longest file or output stream."""
    max_output_bytes: int = 1 << 20
    """Bytes of stdout, and of stderr, that an answer carries; a longer stream loses its middle."""
    max_queue: int = 4096
    """Requests that may wait for a worker; the next one is answered "busy"."""
    max_queue_seconds: float = 60.0
    """Longest wait for a worker before the answer is "busy"."""
    max_body_mb: int = 32
    """Size of a request, its files in base64 included."""
    max_bodies_mb: int = 256
    """Size of all requests that are held at the same time; the next one is answered "busy"."""
    body_seconds: float = 30.0
    """Longest time until the body of a request has come; a second more for each MiB."""
    idle_seconds: float = 30.0
    """Longest wait for a request on an open connection; clients give these up earlier by themselves."""
    max_connections: int = 8192
    """Fewer where the limit of open files is too low for so many."""
    print_last_expression: bool = False
    """Default of the request field of the same name."""
    preimport: tuple[str, ...] = DEFAULT_PREIMPORT
    """Modules that every snippet finds already imported."""
    max_sessions: int | None = None
    """Sessions at the same time, each of which holds a worker. The others are for single snippets. None: half of
    ``workers``."""
    session_seconds: float = 3600.0
    """Longest life of a session."""
    session_idle_seconds: float = 600.0
    """A session without a call for so long is ended."""
    read_only_paths: tuple[str, ...] = field(default_factory=tuple)
    """Further host directories that snippets may read."""

    @property
    def most_sessions(self) -> int:
        """``max_sessions``, or what it is by default."""
        return max(1, self.workers // 2) if self.max_sessions is None else self.max_sessions

    def to_json(self) -> str:
        """The settings as JSON, for the warden's command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SandboxSettings:
        """The settings that ``to_json`` wrote."""
        values = json.loads(text)
        for key in ("preimport", "read_only_paths"):
            values[key] = tuple(values[key])
        return cls(**values)
