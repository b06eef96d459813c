"""Addresses as an operator writes them: host:port, [v6]:port, and which hosts other machines can reach.

Owns their reading and writing. It never resolves a name and opens no socket. Light on purpose: commands that need no
server read addresses, too.
"""

import ipaddress

from smq.coordinator.user_errors import ConfigError

Address = tuple[str, int]


def parse_address(key: str, value: object) -> Address:
    """host:port, [v6]:port. ConfigError names the key."""
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {value!r}: it must be a string")
    host, colon, port = value.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{key} is {value!r}: it must be host:port, such as 127.0.0.1:9092")
    if any(c.isspace() or c in "/@," for c in bare):
        raise ConfigError(f"{key} is {value!r}: it must be one host and its port, such as node-1.example.org:9092")
    if ":" in bare and bare == host:
        raise ConfigError(f"{key} is {value!r}: an IPv6 address needs brackets, such as [::1]:9092")
    return bare, int(port)


def format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether the host stands for every address of the machine. No other machine can connect to it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach the host. Names other than localhost do not count as loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_private(host: str) -> bool:
    """Whether the host is an address that the internet does not route: loopback, link-local, 10.0.0.0/8, fc00::/7 and
    so on. A name does not count, and neither does a wildcard."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (address.is_private or address.is_link_local) and not address.is_unspecified
