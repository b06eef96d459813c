"""Listening sockets: names, both kinds of addresses, and how a client's address is written."""

import socket

import pytest

from smq.coordinator.cli.cluster_dir import free_ports
from smq.replication.net.listening import bind_closed, bind_listener, open_closed, plain_host


@pytest.mark.parametrize(
    ("listen", "dial"),
    [
        ("::", "127.0.0.1"),
        ("::", "::1"),
        ("0.0.0.0", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
    ],
)
def test_a_listener_is_reached_by_the_addresses_that_it_stands_for(listen: str, dial: str) -> None:
    with bind_listener(listen, 0) as listener:
        listener.setblocking(True)
        client = socket.create_connection((dial, listener.getsockname()[1]), timeout=5)
        accepted, address = listener.accept()
        assert plain_host(address[0]) == dial
        assert client.getsockname()[1] == address[1]
        client.close()
        accepted.close()


def test_one_address_listens_for_itself_alone() -> None:
    with bind_listener("::1", 0) as listener, pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5)


def test_a_name_that_leads_nowhere_is_an_os_error() -> None:
    with pytest.raises(OSError):
        bind_listener("name.invalid", 0)


@pytest.mark.parametrize(
    ("host", "expected"), [("::ffff:10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("fd00::1", "fd00::1")]
)
def test_an_ipv4_client_of_a_socket_for_both_kinds_is_written_as_ipv4(host: str, expected: str) -> None:
    assert plain_host(host) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_closed_port_refuses_clients_and_other_owners_until_it_is_opened(host: str) -> None:
    (port,) = free_ports(1)
    with bind_closed(host, port) as closed:
        for bind in (bind_closed, bind_listener):
            with pytest.raises(OSError, match="in use"):
                bind(host, port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        open_closed(closed)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_port_is_bound_and_opened_while_connections_of_its_last_owner_are_closing() -> None:
    with bind_listener("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        listener.accept()[0].close()  # the first to close: its end lingers in the system
        client.close()
    with bind_closed("127.0.0.1", port) as closed:
        open_closed(closed)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
