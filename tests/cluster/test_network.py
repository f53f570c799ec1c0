from __future__ import annotations

import socket

import pytest

from megatron_retool.cluster.network import NetworkError, address_of, address_towards, interface_with, main


def test_loopback_is_reached_from_loopback() -> None:
    address = address_towards("127.0.0.1")
    assert address == "127.0.0.1"
    assert address_of(interface_with(address)) == address


def test_unknown_names_are_named() -> None:
    with pytest.raises(NetworkError, match="no route to no-such-host.invalid"):
        address_towards("no-such-host.invalid")
    with pytest.raises(NetworkError, match="interface none0 has no IPv4 address"):
        address_of("none0")
    with pytest.raises(NetworkError, match="203.0.113.1"):
        interface_with("203.0.113.1")


def test_command_prints_address_interface_and_free_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1"]) == 0
    address, interface, port = capsys.readouterr().out.split()
    assert (address, interface) == ("127.0.0.1", interface_with("127.0.0.1"))
    with socket.socket() as listener:
        listener.bind((address, int(port)))
    assert main(["127.0.0.1", "--interface", "none0"]) == 1
    assert "none0" in capsys.readouterr().err
