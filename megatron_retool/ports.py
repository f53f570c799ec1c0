"""A free TCP port. Standard library only: every room may import this one."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """A TCP port of ``host`` (all interfaces where empty) that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
