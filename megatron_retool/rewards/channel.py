"""Requests and replies between the reward manager and a worker: numbered frames with a checksum, under deadlines.

A frame is magic, number, length, CRC-32, then the payload. Whatever else comes along is recognised as no frame.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib

_HEADER = struct.Struct("!4sQII")
_MAGIC = b"RWD\x01"
MOST_BYTES = 256 << 20
"""Of a payload. What claims to be longer is no frame."""


class BrokenFrame(ValueError):
    """What came is not what the other end's ``send`` writes."""


class Channel:
    """One end. Deadlines are values of ``time.monotonic``; None: none.

    Raises:
        TimeoutError: from any method, at its deadline. The channel is then of no more use.
        EOFError, OSError: likewise, when the other end is closed.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, number: int, payload: bytes, deadline: float | None = None) -> None:
        """Write a message with its number and checksum.

        Raises:
            TimeoutError: the other side does not read before ``deadline``.
        """
        left = memoryview(_HEADER.pack(_MAGIC, number, len(payload), zlib.crc32(payload)) + payload)
        while left:
            self._await(deadline)
            left = left[self._socket.send(left) :]

    def receive(self, deadline: float | None = None) -> tuple[int, bytes]:
        """Number and payload of the next frame. Raises BrokenFrame."""
        magic, number, length, checksum = _HEADER.unpack(self._read(_HEADER.size, deadline))
        if magic != _MAGIC or length > MOST_BYTES:
            raise BrokenFrame("it does not begin as a frame does")
        payload = self._read(length, deadline)
        if zlib.crc32(payload) != checksum:
            raise BrokenFrame("its checksum is wrong")
        return number, payload

    def has_input(self) -> bool:
        """Whether bytes wait to be read that no request has asked for."""
        self._socket.settimeout(0)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, ConnectionError):
            return False

    def close(self) -> None:
        """Close the socket; errors are of no interest any more."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _read(self, count: int, deadline: float | None) -> bytes:
        parts = []
        while count:
            self._await(deadline)
            part = self._socket.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _await(self, deadline: float | None) -> None:
        """Let the next operation take until ``deadline``."""
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining)
