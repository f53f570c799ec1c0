"""Finds the strongest isolation that this host allows, by trying it in a throw-away process."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from code_interpreter import cgroups, filesystem, landlock, linux, seccomp
from code_interpreter.locked_directory import abandoned, make_locked
from code_interpreter.plan import IsolationPlan
from code_interpreter.settings import ISOLATION_ORDER, SandboxSettings
from untrusted.errors import OperationError

SEARCH_PATH = f"{os.defpath}:/usr/local/bin"
_SCRATCH_PREFIX = "retool-sandbox-"
_ABANDONED_SECONDS = 10.0
"""How long a start may take to remove one of these; the next start continues."""
_UIDS_PER_SERVER = 1 << 14
_FIRST_UID = 0x70000000
"""systemd documents 0x70000000 to 0x7fffffff as unused."""


class IsolationUnavailable(OperationError):
    """The isolation that was asked for cannot be had on this host; the message says why."""


def remove_abandoned(parent: Path) -> None:
    """Remove the scratch directories of wardens that were killed."""
    for path in abandoned(parent, f"{_SCRATCH_PREFIX}*-*"):
        filesystem.remove_directory(str(path), _ABANDONED_SECONDS)


def make_plan(settings: SandboxSettings, server_process_id: int) -> IsolationPlan:
    """Choose the isolation and prepare what belongs to it (cgroups, scratch directory).

    Raises:
        IsolationUnavailable: ``settings.isolation`` names one that this host refuses.
    """
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent)
    directory = parent / f"{_SCRATCH_PREFIX}{server_process_id}-{secrets.token_hex(4)}"
    scratch_lock = make_locked(directory, 0o700)
    scratch = str(directory)
    os.chmod(scratch, 0o711)
    wanted = ISOLATION_ORDER if settings.isolation == "auto" else (settings.isolation,)
    root = os.geteuid() == 0
    reasons: list[str] = []
    for kind in wanted:
        plan = IsolationPlan(
            settings,
            kind,
            scratch=scratch,
            scratch_lock=scratch_lock,
            python_directories=filesystem.python_directories(settings.read_only_paths),
            warnings=list(reasons),
        )
        if kind == "namespaces":
            refusal = _refusal(lambda: try_namespaces(scratch, False)) if root else "the server is not root"
            if refusal is not None:
                plan.user_namespace = True
                second = _refusal(lambda: try_namespaces(scratch, True))
                refusal = None if second is None else f"{refusal}; with a user namespace: {second}"
        elif kind == "bubblewrap":
            # Root inside bubblewrap would be root to the files of /proc and to the process limit.
            plan.first_uid = _choose_first_uid(server_process_id, settings.workers) if root else None
            refusal = _bubblewrap_refusal(plan)
        else:
            refusal = None
        if refusal is None:
            break
        reasons.append(f"isolation {kind!r} is not available: {refusal}")
    else:
        filesystem.remove_directory(scratch)
        raise IsolationUnavailable("; ".join(reasons))

    if kind == "rlimits":
        plan.landlock = landlock.version()
        exposed = "it sees this host's processes" if plan.landlock else "it can read every file that its user can read"
        plan.warnings.append(
            f"code runs WITHOUT namespaces: {exposed}. "
            "Allow user namespaces, install bubblewrap, or run the server in a container of its own"
        )
    if root and not plan.user_namespace and plan.first_uid is None:
        first = _choose_first_uid(server_process_id, settings.workers)
        plan.first_uid = first if first is not None and can_change_user(first) else None
    hidden = [path for path in plan.python_directories if not filesystem.is_readable_by_others(path)]
    if kind == "rlimits" and plan.first_uid is not None and hidden:
        plan.keep_read_search = plan.landlock > 0
        if not plan.keep_read_search:
            plan.warnings.append(
                f"{hidden[0]} cannot be read by other users: snippets can use only preimported modules. "
                "Install the interpreter elsewhere, or open the directory with chmod o+x"
            )
    plan.cgroups = cgroups.find(server_process_id)
    if plan.cgroups is None:
        plan.warnings.append("no writable cgroup: memory is limited for each process, not for a snippet's all together")
    plan.seccomp = seccomp.supported() and _refusal(_try_seccomp) is None
    if not plan.seccomp:
        plan.warnings.append("system calls are not filtered: this kernel or machine type has no usable seccomp")
    return plan


def try_namespaces(scratch: str, user_namespace: bool) -> None:
    """Build, in the calling (throw-away) process, all that a worker and its snippet need."""
    enter_namespaces(user_namespace)

    def build() -> None:
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWUTS)
        filesystem.enter_read_only_root([], scratch)
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        linux.unshare(linux.CLONE_NEWPID)
        linux.setns(own, linux.CLONE_NEWPID)
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
        linux.mount("tmpfs", filesystem.SANDBOX, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m")

    if os.waitpid(linux.fork(functools.partial(_say_refusal, build)), 0)[1] != 0:
        raise OSError("")  # the child has told the reason


def enter_namespaces(user_namespace: bool) -> None:
    """Give the caller's future children a pid namespace (and the caller a user namespace that maps root to itself)."""
    if user_namespace:
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER)
        write_id_maps(0, uid, gid)
    linux.unshare(linux.CLONE_NEWPID)


def write_id_maps(inside: int, uid: int, gid: int) -> None:
    """Map one user and one group of the outer user namespace into the one just entered."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def bubblewrap_command(plan: IsolationPlan, directory: str, *, unshare_only: bool = False) -> list[str]:
    """The ``bwrap`` invocation up to the program to run; ``directory`` holds home/, tmp/ and mnt/."""
    command = [
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
        *("--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"),
    ]
    for path in filesystem.system_directories():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    if not unshare_only:
        command += ["--bind", f"{directory}/home", filesystem.HOME, "--chdir", filesystem.HOME]
        for name in filesystem.OWN_DIRECTORIES:
            command += ["--bind", f"{directory}/{name}", f"/{name}"]
    # After /tmp and /mnt, which may hold them.
    for path in plan.python_directories:
        command += ["--ro-bind", path, path]
    return command


def _bubblewrap_refusal(plan: IsolationPlan) -> str | None:
    if shutil.which("bwrap", path=SEARCH_PATH) is None:
        return "bwrap is not installed"
    command = [*bubblewrap_command(plan, "", unshare_only=True), "/usr/bin/env", "true"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            env={"PATH": SEARCH_PATH},
            user=plan.first_uid,
            group=plan.first_uid,
            extra_groups=None if plan.first_uid is None else [],
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"bwrap cannot be run: {error}"
    return None if done.returncode == 0 else (done.stderr.strip() or f"bwrap ended with {done.returncode}")


def _refusal(attempt: Callable[[], None]) -> str | None:
    """Run ``attempt`` in a forked process; None where it succeeds, else the reason."""
    reader, writer = os.pipe()

    def child() -> None:
        os.dup2(writer, 1)
        _say_refusal(attempt)

    process = linux.fork(child)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    failed = os.waitpid(process, 0)[1] != 0
    return (text or "unknown reason") if failed else None


def _say_refusal(attempt: Callable[[], None]) -> None:
    """Call ``attempt`` in a process that ends after it; what it raises goes to the standard output too."""
    try:
        attempt()
    except BaseException as error:
        os.write(1, str(error).encode(errors="replace")[:500])
        raise


def _try_seccomp() -> None:
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.build_filter(seccomp.LOCAL_AND_INTERNET))
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()
    except PermissionError:
        return
    raise OSError("the filter is not obeyed")


def _choose_first_uid(server_process_id: int, workers: int) -> int | None:
    """The first of ``workers`` uids that this user namespace has and that no other server uses; None if too few."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    full = any(first <= _FIRST_UID and first + count >= 0x7FFFFFFF for first, _, count in ranges)
    if full:
        return _FIRST_UID + (server_process_id % _UIDS_PER_SERVER) * _UIDS_PER_SERVER
    first, _, count = max(ranges, key=lambda entry: entry[2])
    if count < 1000 + workers:
        return None
    places = (count - 1000) // workers
    return first + 1000 + (server_process_id % places) * workers


def can_change_user(uid: int) -> bool:
    """Whether this process may become ``uid``: a container can lack the capability although its user is root."""

    def attempt() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    return _refusal(attempt) is None


def kill_user(uid: int) -> None:
    """End every process of ``uid``; for hosts on which no pid namespace does that."""

    def kill() -> None:
        with contextlib.suppress(OSError):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)

    os.waitpid(linux.fork(kill), 0)
