"""gRPC channels and stubs by address, and the options of every channel.

Owns the channels of one client object and closes them. It must never retry. Only `smq.clients` imports it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from grpc import aio

from smq.clients.forked import channel_opened
from smq.clients.pb.smq_pb2_grpc import AdminStub, AgentStub, BrokerStub, GroupsStub, TransactionsStub
from smq.clients.tls import Tls

if TYPE_CHECKING:  # these exist only for the type checker
    from smq.clients.pb.smq_pb2_grpc import (
        AdminAsyncStub,
        AgentAsyncStub,
        BrokerAsyncStub,
        GroupsAsyncStub,
        TransactionsAsyncStub,
    )

MESSAGE_BYTES_MAX: Final = 128 << 20  # above the server's largest cap (100 MiB), so that the server decides

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A node that was killed is back within a second; gRPC's default would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A node may come back under another address, to which its name leads by then. gRPC would ask for it every 30 s at
    # most; a second spares name servers most of the attempts to connect.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A call may wait for minutes (JoinGroup). If its node hangs, this ends it after half a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a call that waits sends nothing
    ("grpc.enable_http_proxy", 0),  # nodes are addressed directly; a web proxy in the environment is not for them
    ("grpc.use_local_subchannel_pool", 1),  # one client's broken connection does not affect another's
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStubs:
    address: str
    channel: aio.Channel
    agent: "AgentAsyncStub"
    broker: "BrokerAsyncStub"
    groups: "GroupsAsyncStub"
    transactions: "TransactionsAsyncStub"
    admin: "AdminAsyncStub"


class Channels:
    """One channel per address, made on first use. Bounded by the number of nodes of the cluster."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._credentials = tls.credentials() if tls is not None else None
        self._nodes: dict[str, NodeStubs] = {}

    def node(self, address: str) -> NodeStubs:
        found = self._nodes.get(address)
        if found is None:
            channel_opened()
            if self._credentials is not None:
                channel = aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
            else:
                channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            found = self._nodes[address] = NodeStubs(
                address=address,
                channel=channel,
                agent=AgentStub(channel),
                broker=BrokerStub(channel),
                groups=GroupsStub(channel),
                transactions=TransactionsStub(channel),
                admin=AdminStub(channel),
            )
        return found

    async def close(self) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.channel.close(None)
