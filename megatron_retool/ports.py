"""A TCP port for a server that is about to be started, and a socket that listens on one address."""

from __future__ import annotations

import ipaddress
import random
import socket
from pathlib import Path

_FIRST = 15000
_ATTEMPTS = 64


def free_port(host: str = "") -> int:
    """A TCP port of ``host`` (an address of this node; empty: all of them) without a listener.

    It lies below the range from which the kernel gives ports to outgoing connections, where there is room: a server
    that takes half a minute to start would lose one of that range to any of them.
    """
    below = _first_ephemeral_port()
    for _ in range(_ATTEMPTS if below > _FIRST + _ATTEMPTS else 0):
        port = random.SystemRandom().randrange(_FIRST, below)
        if _is_free(host, port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_address(host: str) -> bool:
    """Whether ``host`` is an IPv4 address, and no name."""
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False


def listening_descriptor(address: str, port: int) -> int:
    """The descriptor of a socket that listens only on ``address`` (IPv4). Whoever takes it closes it.

    Raises:
        OSError: the port is taken, or the address is none of this host's.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
        return listener.detach()


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _first_ephemeral_port() -> int:
    """Of the kernel's setting; 0 where it cannot be read."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
