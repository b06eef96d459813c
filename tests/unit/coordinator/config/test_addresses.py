"""Addresses: how they are read and written, and which hosts other machines can reach."""

import pytest

from smq.coordinator.config.addresses import format_address, is_loopback, is_private, is_wildcard, parse_address
from smq.coordinator.user_errors import ConfigError


@pytest.mark.parametrize(
    "text", ["127.0.0.1:1", "[::1]:65535", "localhost:0", "[::]:7401", "0.0.0.0:7401", "smq-0.smq.svc:9092"]
)
def test_addresses_are_read_as_they_are_written(text: str) -> None:
    assert format_address(parse_address("k", text)) == text


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (7401, "it must be a string"),
        ("127.0.0.1", "host:port"),
        (":7401", "host:port"),
        ("a:65536", "host:port"),
        ("a:-1", "host:port"),
        ("a:٣", "host:port"),
        ("::1:7401", r"needs brackets, such as \[::1\]:9092"),
        ("a b:7401", "one host and its port"),
        ("a:1,b:2", "one host and its port"),
        ("http://a:7401", "brackets|one host"),
    ],
)
def test_anything_else_is_refused_and_named(value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=f"the_key is .*{says}"):
        parse_address("the_key", value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_hosts(host: str) -> None:
    assert is_loopback(host)
    assert is_private(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_hosts_that_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["10.1.2.3", "192.168.0.1", "172.16.0.1", "fd00::1", "fe80::1", "169.254.0.1"])
def test_hosts_that_the_internet_does_not_route(host: str) -> None:
    assert is_private(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "2001:4860:4860::8888", "example.org", "smq-0.smq.svc"])
def test_hosts_that_may_be_public(host: str) -> None:
    assert not is_private(host)


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("a", False)])
def test_wildcards(host: str, expected: bool) -> None:
    assert is_wildcard(host) is expected
