"""How this host isolates: decided once by the warden, obeyed by zygote and workers, told by /health."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from code_interpreter.cgroups import CgroupParent
from code_interpreter.settings import SandboxSettings


@dataclass
class IsolationPlan:
    """The layers in force."""

    settings: SandboxSettings
    kind: str
    """One of settings.ISOLATION_ORDER."""
    user_namespace: bool = False
    """The server is not root: it is root only inside a user namespace of its own."""
    first_uid: int | None = None
    """Worker i runs its snippets as first_uid + i; None: all run as the server's user."""
    cgroups: CgroupParent | None = None
    seccomp: bool = False
    landlock: int = 0
    """ABI version where it stands in for namespaces, else 0."""
    keep_read_search: bool = False
    """The interpreter lies where other users cannot look (/root, say), and Landlock bounds what may be read: snippets
    then may read files of any mode below the paths that Landlock grants."""
    scratch: str = ""
    """A private directory of the server on the host, removed when it ends."""
    scratch_lock: int = -1
    """Held by the warden for as long as it lives."""
    python_directories: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """What /health says."""
        return {
            "isolation": self.kind,
            "user_namespace": self.user_namespace,
            "uid_per_worker": self.first_uid is not None,
            "cgroup_version": self.cgroups.version if self.cgroups else None,
            "seccomp": self.seccomp,
            "landlock": self.landlock,
            "warnings": self.warnings,
        }

    def uid(self, worker: int) -> int | None:
        """The user id of a worker; None where all have the server's."""
        return None if self.first_uid is None else self.first_uid + worker
