"""The sockets on which nodes listen, according to the kernel: they must match the nodes' configuration.

Owns the reading of /proc/net/tcp. Linux only; it opens no socket.
"""

import ipaddress
import os
import struct
from pathlib import Path
from typing import Final

from smq.testing.node_process import Nodes

_LISTENING: Final = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """(host, port) of every TCP socket on which that process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue  # closed in the meantime
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                host, port = fields[1].split(":")
                found.add((_address(host), int(port, 16)))
    return found


def unexpected(fleet: Nodes) -> list[str]:
    """Addresses that nodes listen on although their configuration does not say so."""
    found = []
    for node, member in fleet.nodes.items():
        allowed = {address.rpartition(":")[0] for address in (member.grpc, member.http, member.kafka)}
        if member.process is not None and member.is_alive():  # an external cluster has no process here
            found += [
                f"node {node} listens on {host}:{port}"
                for host, port in sorted(listening(member.pid))
                if host not in allowed
            ]
    return found


def _address(text: str) -> str:
    """The kernel prints 32-bit words in its own byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
