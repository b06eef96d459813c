"""gRPC channels and stubs by address, and the options of every channel.

Owns the channels of one client object and closes them. It must never retry. Only `smq.clients` imports it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from grpc import aio

from smq.clients.forked import channel_opened
from smq.clients.login import Login, Token
from smq.clients.pb.smq_pb2_grpc import AdminStub, AgentStub, BrokerStub, GroupsStub, TransactionsStub, UsersStub
from smq.clients.tls import Tls
from smq.raft_state.errors import ErrorCode, SmqError

if TYPE_CHECKING:  # these exist only for the type checker
    from smq.clients.pb.smq_pb2_grpc import (
        AdminAsyncStub,
        AgentAsyncStub,
        BrokerAsyncStub,
        GroupsAsyncStub,
        TransactionsAsyncStub,
        UsersAsyncStub,
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
    users: "UsersAsyncStub"
    token: Token | None  # of the client's user at this node

    async def log_in(self) -> None:
        """Before a call: it then has a token that the node takes. AUTHENTICATION_FAILED, and gRPC's errors."""
        if self.token is not None and self.token.is_due:
            await self.token.renew(self.users)


class _WithToken:
    """A channel whose calls have a token in their metadata."""

    def __init__(self, channel: aio.Channel, token: Token) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, method: Any) -> Any:
        return lambda *args, **kwargs: method(*args, **kwargs, metadata=self._token.metadata)


class Channels:
    """One channel per address, made on first use. Bounded by the number of nodes of the cluster. INVALID_REQUEST for a
    login without TLS: the token, and all records, could be read on the way."""

    def __init__(self, tls: Tls | None = None, login: Login | None = None) -> None:
        if login is not None and tls is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, "a login needs TLS: name the CA of the nodes' certificates, too")
        self._credentials = tls.credentials() if tls is not None else None
        self._login = login
        self._nodes: dict[str, NodeStubs] = {}

    def node(self, address: str) -> NodeStubs:
        found = self._nodes.get(address)
        if found is None:
            channel_opened()
            if self._credentials is not None:
                channel = aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
            else:
                channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            token = Token(self._login) if self._login is not None else None
            calls: Any = channel if token is None else _WithToken(channel, token)
            found = self._nodes[address] = NodeStubs(
                address=address,
                channel=channel,
                agent=AgentStub(calls),
                broker=BrokerStub(calls),
                groups=GroupsStub(calls),
                transactions=TransactionsStub(calls),
                admin=AdminStub(calls),
                users=UsersStub(channel),
                token=token,
            )
        return found

    async def close(self) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.channel.close(None)
