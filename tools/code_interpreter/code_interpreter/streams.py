"""The in-memory files that carry a request into the sandbox and its output back."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Streams:
    """Descriptors of all that crosses the sandbox's wall.

    Input of any length is there at once, and output can neither fill a pipe nor wait for a reader: the kernel refuses
    to let a stream grow beyond the file size limit.
    """

    request: int
    stdin: int
    stdout: int
    stderr: int
    records: int | None
    """What a notebook's cells did (see notebook.py), or the process's end of a session's socket (see console.py); None
    for other languages."""

    @classmethod
    def open(cls, header: Mapping[str, Any], files: Mapping[str, bytes], stdin: bytes, records: bool) -> Streams:
        """Make them, with the request and its input written.

        Args:
            header: what the snippet reads first (see snippet.py).
            files: contents follow the header, in this order.
            records: whether to make a stream of records.

        Raises:
            OSError: there is no room.
        """
        encoded = json.dumps(header).encode()
        opened: list[int] = []
        try:
            for name, parts in (
                ("request", [struct.pack("!I", len(encoded)), encoded, *files.values()]),
                ("stdin", [stdin]),
                ("stdout", []),
                ("stderr", []),
                *([("records", [])] if records else []),
            ):
                writable = os.memfd_create(name)
                opened.append(writable)
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[os.write(writable, view) :]
                if name in ("request", "stdin"):
                    opened[-1] = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
                    os.close(writable)
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        request, standard_input, stdout, stderr, *further = opened
        return cls(request, standard_input, stdout, stderr, further[0] if further else None)

    def descriptors(self) -> list[int]:
        """Those that there are, in the order of the fields."""
        return [each for each in (self.request, self.stdin, self.stdout, self.stderr, self.records) if each is not None]

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in self.descriptors():
            os.close(descriptor)


def read_text(descriptor: int, limit: int, start: int = 0, end: int | None = None) -> tuple[str, int]:
    """The text from byte ``start`` to byte ``end``, and its size in bytes.

    Of a longer one than ``limit`` bytes the first and the last half ``limit`` bytes.
    """
    size = (os.fstat(descriptor).st_size if end is None else end) - start
    if size <= limit:
        return os.pread(descriptor, size, start).decode("utf-8", "replace"), size
    head, tail = limit - limit // 2, limit // 2
    first = os.pread(descriptor, head, start).decode("utf-8", "replace")
    last = os.pread(descriptor, tail, start + size - tail).decode("utf-8", "replace")
    return f"{first}\n... [{size - limit} bytes left out] ...\n{last}", size


def read_all(descriptor: int, limit: int) -> bytes | None:
    """A file's content, or None where it is longer than ``limit`` bytes."""
    size = os.fstat(descriptor).st_size
    if size > limit:
        return None
    content = b""
    while len(content) < size:
        part = os.pread(descriptor, size - len(content), len(content))
        if not part:
            break
        content += part
    return content
