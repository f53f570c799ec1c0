"""The system-call filter of sandboxed code: classic BPF written with ``struct``, installed with prctl.

It refuses what a computation never needs and what past kernel exploits needed: tracing, mounting, new namespaces,
keyrings, BPF, io_uring, userfaultfd, other processes' memory, watching who opens the host's files, and every socket
family but the allowed ones (AF_VSOCK, for one, is not confined by a network namespace).  Everything else stays allowed;
the other layers confine it.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from collections.abc import Sequence

from code_interpreter import linux

# name: (x86_64, aarch64); None where the architecture has no such call.
DENIED_CALLS: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
SIGNAL_CALLS = {"kill": (62, 129), "tgkill": (234, 131)}
OTHER_SIGNAL_CALLS = {
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
NEW_NAMESPACE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000
_LOAD, _AND, _EQUAL, _GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_FIRST_ARGUMENT = 0, 4, 16
_SECCOMP_MODE_FILTER = 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def supported() -> bool:
    """Whether the system-call numbers of this machine are known."""
    return platform.machine() in _ARCHITECTURES


def build_filter(socket_families: Sequence[int], only_signal: int | None = None) -> bytes:
    """A BPF program (array of ``struct sock_filter``) for this machine.

    Args:
        socket_families: what ``socket`` may open; any other family gets EACCES.
        only_signal: where given, ``kill`` reaches only this process and its group. For hosts on which the sandboxed
            code has the uid of its server.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    program: list[tuple[int, int, int, int]] = []

    def add(code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        program.append((code, if_true, if_false, value & 0xFFFFFFFF))

    def refuse(number: int | None, error: int = errno.EPERM) -> None:
        if number is not None:
            add(_EQUAL, number, 0, 1)
            add(_RETURN, _ERRNO | error)

    def allow_only(number: int, first_arguments: Sequence[int], error: int) -> None:
        add(_EQUAL, number, 0, 2 * len(first_arguments) + 2)
        add(_LOAD, _OFFSET_FIRST_ARGUMENT)
        for value in first_arguments:
            add(_EQUAL, value, 0, 1)
            add(_RETURN, _ALLOW)
        add(_RETURN, _ERRNO | error)

    add(_LOAD, _OFFSET_ARCHITECTURE)
    add(_EQUAL, architecture, 1, 0)
    add(_RETURN, _KILL_PROCESS)
    add(_LOAD, _OFFSET_NUMBER)
    if column == 0:
        add(_GREATER_EQUAL, _X32_BIT, 0, 1)
        add(_RETURN, _ERRNO | errno.ENOSYS)
    for numbers in DENIED_CALLS.values():
        refuse(numbers[column])
    # clone3 hides its flags in memory, where a filter cannot look; glibc falls back to clone on ENOSYS.
    refuse(CLONE3[column], errno.ENOSYS)
    allow_only(SOCKET[column], socket_families, errno.EACCES)
    if only_signal is not None:
        for numbers in SIGNAL_CALLS.values():
            allow_only(numbers[column], (only_signal, 0, -only_signal), errno.EPERM)
        for numbers in OTHER_SIGNAL_CALLS.values():
            refuse(numbers[column])
    add(_EQUAL, CLONE[column], 0, 4)
    add(_LOAD, _OFFSET_FIRST_ARGUMENT)
    add(_AND, NEW_NAMESPACE_FLAGS)
    add(_EQUAL, 0, 1, 0)
    add(_RETURN, _ERRNO | errno.EPERM)
    add(_RETURN, _ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install(program: bytes) -> None:
    """Bind this process and all its descendants to ``program``; needs no_new_privs or CAP_SYS_ADMIN."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    linux.prctl(linux.PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header))


LOCAL_AND_INTERNET = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""For code in an empty network namespace: the families are harmless there, and libraries probe for them."""
