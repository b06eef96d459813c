"""What a running node checks of itself: does its clock agree with the others', do its advertised addresses lead to it?

Owns the warnings that come of it, and what ends the process: a clock that is days off, or an address that another node
advertises, too. It sends no byte of a protocol. Only the composition root makes these checks.

A loopback address leads a client to its own machine. So nodes of different machines may share one, and their
hosts under [peers] tell the machines apart. For HTTP that is usual. For clients it is a warning: they find one node
under the addresses of several.

Nothing in smq needs clocks that agree: times of records and expiry follow the replicated state. But a clock that is
days off is a machine that has lost it, and it would date its records wrongly for ever.

An advertised address that this node cannot reach is a warning and no refusal: not every network lets a machine reach
itself by its outer address, and a name may lead to a pod only once it is ready.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import structlog

from smq.coordinator.config.addresses import Address, format_address, is_loopback, parse_address
from smq.coordinator.service.audience import OWN, told_of
from smq.raft_state.ids import NodeId
from smq.raft_state.state import NodeState
from smq.replication.api import NodeApi

log = structlog.get_logger(__name__)


# ------------------------------------------------------------------------------------------------------------ the clock
FAR_MS: Final = 24 * 3_600_000  # more than any time zone that was taken for UTC
WARN_MS: Final = 10_000  # a machine that asks a time server is off by milliseconds
_START_S: Final = 60.0  # a running node is not ended by a clock that is set


class ClockCheck:
    """`on_far` ends the process. A majority must agree that it is this clock that is wrong."""

    def __init__(self, nodes: int, on_far: Callable[[str], None], now_s: Callable[[], float] = time.monotonic) -> None:
        self._quorum: Final = nodes // 2 + 1
        self._on_far = on_far
        self._now_s = now_s
        self._began_s = now_s()
        self._ahead_ms: dict[NodeId, int] = {}  # by peer, of this clock

    def note(self, peer: NodeId, ahead_ms: int) -> None:
        """A peer's hello has come: its clock is that far ahead of this one."""
        self._ahead_ms[peer] = ahead_ms
        agreed = sorted(p for p, a in self._ahead_ms.items() if abs(a) > FAR_MS and abs(a - ahead_ms) < FAR_MS)
        if len(agreed) >= self._quorum and self._now_s() - self._began_s < _START_S:
            way = "behind" if ahead_ms > 0 else "ahead of"
            nodes = " and ".join(map(str, agreed))
            self._on_far(
                f"this machine's clock is {_days(ahead_ms)} {way} those of nodes {nodes}: set it, and let it follow a "
                "time server (chrony, systemd-timesyncd)"
            )

    def warnings(self) -> list[str]:
        return [
            f"the clock of node {peer} is {_seconds(ahead)} this node's: let both follow a time server"
            for peer, ahead in sorted(self._ahead_ms.items())
            if abs(ahead) > WARN_MS
        ]


def _seconds(ahead_ms: int) -> str:
    return f"{abs(ahead_ms) / 1000:,.0f} s {'ahead of' if ahead_ms > 0 else 'behind'}"


def _days(ms: int) -> str:
    return f"{abs(ms) / 86_400_000:,.1f} days"


# -------------------------------------------------------------------------------------------------------- the addresses
_CONNECT_S: Final = 2.0
_AGAIN_S: Final = 10.0  # a load balancer takes some time to find a new node
_CHECK_S: Final = 0.5
_HTTP: Final = "HTTP"  # no client is led by it
_TRIES: Final = 20  # in a row: a node that is gone is fenced long before, and its address is free then

Reach = Mapping[str, tuple[Address, ssl.SSLContext | None]]  # by key: the advertised address, and how to greet it


class SelfCheck:
    """`on_taken` ends the process. `warnings` are for an operator to act on."""

    def __init__(
        self, node: NodeApi, peers: Mapping[NodeId, Address], reach: Reach, on_taken: Callable[[str], None]
    ) -> None:
        self._node = node
        self._peers = peers
        self._reach = reach
        self._on_taken = on_taken
        self._failures: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._try_all()), asyncio.create_task(self._refuse_duplicate())]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def warnings(self) -> list[str]:
        found = [
            f"this node cannot connect to {format_address(self._reach[key][0])}, which it advertises as {key} "
            f"({reason}): if clients cannot either, correct the address, the name or the firewall"
            for key, reason in sorted(self._failures.items())
        ]
        found += [
            f"{_both(me, other, key, address)}, which leads each client to its own machine: advertise addresses that "
            "differ, and that clients reach"
            for me, other, key, address in self._shared()
            if key != _HTTP and not self._is_one_place(other, address)
        ]
        return found

    # --------------------------------------------------------------------------------------------- connecting
    async def _try_all(self) -> None:
        """Until each was reached once: later failures are those of a network, not of a setting. The Kafka ports of a
        node that is not ready may be closed."""
        await self._ready()
        left = dict(self._reach)
        while left:
            for key, (address, tls) in list(left.items()):
                reason = await _try(address, tls)
                if not reason:
                    del left[key]
                    if self._failures.pop(key, None) is not None:
                        log.info("advertised_address_reached", key=key, address=format_address(address))
                elif key not in self._failures:
                    log.warning(
                        "advertised_address_unreachable", key=key, address=format_address(address), reason=reason
                    )
                    self._failures[key] = reason
            if left:
                await asyncio.sleep(_AGAIN_S)

    async def _ready(self) -> None:
        while not self._node.status().is_ready:  # noqa: ASYNC110 - readiness is a state of the node, not an event
            await asyncio.sleep(_CHECK_S)

    # -------------------------------------------------------------------------------- duplicates
    async def _refuse_duplicate(self) -> None:
        """The process that started later gives way. The earlier one serves clients by that address already."""
        await self._ready()
        for _ in range(_TRIES):
            if self._duplicate() is None:
                return
            await asyncio.sleep(_CHECK_S)
        if (taken := self._duplicate()) is not None:
            self._on_taken(taken)

    def _duplicate(self) -> str | None:
        for me, other, key, address in self._shared():
            if other.incarnation <= me.incarnation and self._is_one_place(other, address):
                return f"{_both(me, other, key, address)}: give each node addresses of its own"
        return None

    def _shared(self) -> Iterator[tuple[NodeState, NodeState, str, str]]:
        """This node, another live one, and the key and the address that both advertise."""
        nodes = self._node.state.nodes
        me = nodes.get(self._node.node_id)
        if me is None:
            return
        mine = {address for _, address in _advertised(me)}
        for other in nodes.values():
            if other is not me and not other.fenced:
                yield from ((me, other, key, address) for key, address in _advertised(other) if address in mine)

    def _is_one_place(self, other: NodeState, address: str) -> bool:
        """Whether the address leads to the same machine wherever it is used."""
        if not is_loopback(parse_address("", address)[0]):
            return True
        mine, others = self._peers[self._node.node_id][0], self._peers.get(other.node, ("", 0))[0]
        return mine == others or (is_loopback(mine) and is_loopback(others))


def _both(me: NodeState, other: NodeState, key: str, address: str) -> str:
    return f"node {other.node} advertises {address} ({key}), and so does this node {me.node}"


def _advertised(node: NodeState) -> Iterator[tuple[str, str]]:
    for name in (OWN, *(listener.name for listener in node.listeners)):
        told = told_of(node, name)
        for kind, address in (("gRPC", told.grpc_address), ("Kafka", told.kafka_address)):
            if address:
                yield f"{kind} {name}".rstrip(), address
    if node.http_address:
        yield _HTTP, node.http_address


async def _try(address: Address, tls: ssl.SSLContext | None) -> str:
    """Why no connection came about; empty if one did."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(*address, ssl=tls)
        writer.close()
    except ssl.SSLError:
        pass  # something answers; what it shows is for its clients to judge
    except (OSError, TimeoutError) as e:
        return str(e) or "timed out"
    return ""
