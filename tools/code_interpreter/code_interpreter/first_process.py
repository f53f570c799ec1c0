"""The program that is pid 1 of a snippet's pid namespace: it reads a byte from its standard input, and ends.

Each snippet has one, so it has to start fast. A program of the host loads libraries first, which takes four times as
long; a fork of the worker copies the page tables of all imported modules.
"""

from __future__ import annotations

import os
import platform
import struct
from pathlib import Path

_CODE = {
    # xor edi, edi; lea rsi, [rsp - 8]; mov edx, 1; xor eax, eax; syscall  (read)
    # xor edi, edi; mov eax, 60; syscall  (exit)
    "x86_64": (62, "31ff 488d7424f8 ba01000000 31c0 0f05 31ff b83c000000 0f05"),
    # mov x0, 0; sub x1, sp, 16; mov x2, 1; mov x8, 63; svc 0  (read)
    # mov x0, 0; mov x8, 93; svc 0  (exit)
    "aarch64": (183, "000080d2 e14300d1 220080d2 e80780d2 010000d4 000080d2 a80b80d2 010000d4"),
}
"""The number of the machine in an ELF file, and its instructions."""
_ADDRESS = 0x400000
_HEADERS_BYTES = 64 + 56


def write_program(path: str) -> None:
    """Write it, an ELF file of one segment; nothing where this machine's instructions are not known."""
    if platform.machine() not in _CODE:
        return
    machine, text = _CODE[platform.machine()]
    code = bytes.fromhex(text)
    size = _HEADERS_BYTES + len(code)
    entry = _ADDRESS + _HEADERS_BYTES
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, machine, 1, entry, 64, 0, 0, 64, 56, 1, 64, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _ADDRESS, _ADDRESS, size, size, 0x10000)
    Path(path).write_bytes(header + segment + code)
    os.chmod(path, 0o555)


def runs(path: str) -> bool:
    """Whether the program is there and this host executes it."""
    try:
        action = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        return os.waitpid(os.posix_spawn(path, [path], {}, file_actions=[action]), 0)[1] == 0
    except OSError:
        return False
