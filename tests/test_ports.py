"""Free ports lie where no outgoing connection takes them before a slow server does."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from megatron_retool import ports


def test_a_free_port_is_none_of_the_kernels_own_and_nobodys() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for host in ("", "127.0.0.1"):
        port = ports.free_port(host)
        assert 15000 <= port < first
        with socket.socket() as listener:
            listener.bind((host, port))


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free = ports.free_port("127.0.0.1")
        offered = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(offered))
        assert ports.free_port("127.0.0.1") == free


def test_without_room_below_the_kernels_range_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_first_ephemeral_port", lambda: 1024)
    assert ports.free_port() > 1023
