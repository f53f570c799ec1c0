"""Address and interface of this node as another node sees them: `python -m megatron_retool.cluster.network PEER`.

Compute nodes have several interfaces, and a node's own name often resolves to a loopback address in /etc/hosts. The
routing table knows better: the source address of packets to the peer.
"""

from __future__ import annotations

import argparse
import socket
import sys

import psutil

from megatron_retool.errors import OperationError
from megatron_retool.ports import free_port


class NetworkError(OperationError):
    """A peer or interface has no usable IPv4 address. The message names it."""


def address_towards(peer: str) -> str:
    """This node's IPv4 address on the route to ``peer`` (host name or address).

    Raises:
        NetworkError: ``peer`` does not resolve, or there is no route to it.
    """
    try:
        resolved = socket.getaddrinfo(peer, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only chooses the interface.
            probe.connect((resolved, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NetworkError(f"no route to {peer}: {error}") from error


def address_of(interface: str) -> str:
    """IPv4 address of a named interface.

    Raises:
        NetworkError: this node has no such interface, or it has no IPv4 address.
    """
    interfaces = psutil.net_if_addrs()
    for entry in interfaces.get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    known = ", ".join(sorted(interfaces))
    raise NetworkError(f"interface {interface} has no IPv4 address on {socket.gethostname()} (interfaces: {known})")


def interface_with(address: str) -> str:
    """Name of the interface that has ``address``.

    Raises:
        NetworkError: no interface of this node has it.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise NetworkError(f"no interface of {socket.gethostname()} has the address {address}")


def main(arguments: list[str] | None = None) -> int:
    """Print this node's address, interface and a free port; the exit status."""
    parser = argparse.ArgumentParser(description="Print this node's address, interface and a free port.")
    parser.add_argument("peer", help="another node; this one where the job has one node only")
    parser.add_argument("--interface", help="take this interface's address instead of asking the routing table")
    options = parser.parse_args(arguments)
    try:
        address = address_of(options.interface) if options.interface else address_towards(options.peer)
        print(address, interface_with(address), free_port())
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
