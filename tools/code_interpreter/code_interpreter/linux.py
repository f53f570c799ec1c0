"""The Linux system calls that the sandbox needs and Python does not wrap. Every failure raises OSError."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Callable

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP = 1, 4, 24, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_KEEPCAPS, PR_CAP_AMBIENT = 36, 38, 8, 47
CAP_DAC_READ_SEARCH = 2

_MACHINE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(_MACHINE)
_CAPSET = {"x86_64": 126, "aarch64": 91}.get(_MACHINE)
_MOUNT_SETATTR = 442
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> int:
    """``result`` of a system call, or OSError with the calling thread's errno where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """mount(2).

    Raises:
        OSError: the kernel refuses.
    """
    result = _libc.mount(_bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data))
    check(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Detach ``target`` at once, even while files in it are open."""
    check(_libc.umount2(_bytes(target), MNT_DETACH), f"unmount {target}")


def unshare(flags: int) -> None:
    """unshare(2).

    Raises:
        OSError: the kernel refuses.
    """
    check(_libc.unshare(flags), f"unshare 0x{flags:x}")


def setns(descriptor: int, kind: int) -> None:
    """setns(2).

    Raises:
        OSError: the kernel refuses.
    """
    check(_libc.setns(descriptor, kind), "setns")


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2).

    Raises:
        OSError: the kernel refuses, or the call's number is not known on this processor.
    """
    if _PIVOT_ROOT is None:
        raise OSError(38, f"pivot_root: no system call number known for {_MACHINE}")
    check(_libc.syscall(_PIVOT_ROOT, _bytes(new_root), _bytes(put_old)), f"pivot_root {new_root}")


def prctl(option: int, argument: object = 0, second: object = 0) -> None:
    """prctl(2).

    Raises:
        OSError: the kernel refuses.
    """
    arguments = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (argument, second)]
    check(_libc.prctl(option, *arguments, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def sethostname(name: str) -> None:
    """sethostname(2).

    Raises:
        OSError: the kernel refuses.
    """
    encoded = os.fsencode(name)
    check(_libc.sethostname(encoded, len(encoded)), "sethostname")


def start_loopback() -> None:
    """Make 127.0.0.1 of the current network namespace, which starts without, a place to send to."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        interface = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, get_flags, interface))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


def bind_read_only(source: str, target: str) -> None:
    """Show ``source`` at ``target``, read-only, without set-uid programs and devices."""
    try:
        mount(source, target, None, MS_BIND)
    except OSError:
        # A user namespace may not leave out the mounts that lie below a directory it did not mount itself.
        mount(source, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("=QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    at_fdcwd, at_recursive = -100, 0x8000
    if _libc.syscall(_MOUNT_SETATTR, at_fdcwd, _bytes(target), at_recursive, attributes, len(attributes)) == 0:
        return
    # Before Linux 5.12: remount, keeping the flags that a user namespace is not allowed to clear.
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def drop_bounding_set() -> None:
    """Make sure that no program executed from here on gains a capability."""
    capability = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # EINVAL: past the last capability that this kernel knows
            return
        capability += 1


def clear_capabilities() -> None:
    """Give up every capability of this process."""
    _set_capabilities(0)


def keep_read_search_only() -> None:
    """Leave this process, which kept its capabilities over a change of uid, and all that it executes the right to read
    files whatever their mode; take every other capability away."""
    _set_capabilities(1 << CAP_DAC_READ_SEARCH)
    check(_libc.prctl(PR_CAP_AMBIENT, 2, CAP_DAC_READ_SEARCH, 0, 0), "raise an ambient capability")


def _set_capabilities(mask: int) -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    # Two words each of effective, permitted and inheritable: the first struct has capabilities 0 to 31.
    check(_libc.syscall(_CAPSET, header, struct.pack("=6I", mask, mask, mask, 0, 0, 0)), "capset")


def fork(child: Callable[[], object]) -> int:
    """Fork a process that calls ``child`` and ends, with status 0, or 1 where ``child`` raises; return its id.

    Whatever ``child`` raises, the copied process never reaches the caller's own loops and ``finally`` blocks, which
    would act on what belongs to the original.

    Raises:
        OSError: no process can be made.
    """
    process = os.fork()
    if process == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    return process


def die_with_parent(signal_number: int) -> None:
    """Ask for ``signal_number`` when the thread that forked this process ends. Cleared by a change of uid."""
    prctl(PR_SET_PDEATHSIG, signal_number)
