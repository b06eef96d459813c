"""Listening sockets: names, both kinds of addresses, and how a client's address is written."""

import socket

import pytest

from smq.replication.net.listening import bind_listener, plain_host


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
