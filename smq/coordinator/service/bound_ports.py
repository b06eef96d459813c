"""The listening sockets of a process, and the error of a port that is not available.

Owns the wording of that error, and the check that ports are free before anything is written for them. It must never
serve. `server.composition` opens its ports here, and `cli.cluster_dir` checks those of a new cluster.
"""

import socket
from collections.abc import Iterable
from contextlib import ExitStack

from smq.coordinator.config.addresses import Address, format_address
from smq.coordinator.user_errors import PortTaken
from smq.replication.net.listening import bind_closed, bind_listener


def listener(purpose: str, address: Address, *, is_closed: bool = False) -> socket.socket:
    """A bound socket; port 0 takes a free one. It listens, unless it `is_closed`: then `open_closed` lets clients in.
    PortTaken says whose port it would have been."""
    try:
        return bind_closed(*address) if is_closed else bind_listener(*address)
    except OSError as e:
        raise port_taken(purpose, address, e.strerror or str(e)) from e


def port_taken(purpose: str, address: Address, reason: str) -> PortTaken:
    return PortTaken(
        f"cannot listen on {format_address(address)} for {purpose}: {reason}; choose another port, or stop the process "
        "that uses it"
    )


def check_free(ports: Iterable[tuple[str, Address]]) -> None:
    """PortTaken unless all of these, with their purposes, can be bound at the same time."""
    with ExitStack() as held:
        for purpose, address in ports:
            held.enter_context(listener(purpose, address))
