"""File, network and signal rules that a process lays on itself without any privilege: Linux's Landlock.

For hosts that refuse namespaces, which most containers do.  A kernel before 5.13, or a container whose system-call
filter refuses Landlock, has ``version() == 0``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence

from code_interpreter import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_BIND_AND_CONNECT = 3
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_RIGHTS_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | (1 << 15)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def version() -> int:
    """Landlock's ABI version on this kernel; 0 where there is none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def restrict(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str] = ()) -> None:
    """Leave this process and its descendants no files but those below the given paths, no TCP and no signals outward.

    Needs no_new_privs.  TCP rules need ABI 4 (Linux 6.7), signal rules ABI 6 (Linux 6.12).

    Args:
        readable: directories and files to read and execute.
        writable: directories to do anything in.
        devices: files to read and write.

    Raises:
        OSError: this kernel has no Landlock, or refuses it.
    """
    abi = version()
    handled = max((v, rights) for v, rights in {0: 0, **_FILE_RIGHTS_BY_VERSION}.items() if v <= abi)[1]
    attributes = struct.pack("=Q", handled)
    if abi >= 4:
        attributes += struct.pack("=Q", _TCP_BIND_AND_CONNECT)
    if abi >= 6:
        attributes += struct.pack("=Q", _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = linux.check(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    try:
        for paths, rights in (
            (readable, _EXECUTE | _READ_FILE | _READ_DIR),
            (writable, handled),
            (devices, _READ_FILE | _WRITE_FILE),
        ):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    _allow(ruleset, path, rights & handled)
        linux.check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _RIGHTS_OF_A_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        linux.check(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), f"landlock rule for {path}")
    finally:
        os.close(descriptor)
