"""Blocking calls to a cluster from Spark's Python workers: which topics there are, and which offsets can be read.

Owns the connections of one worker process, and the retries: if a node fails, another is asked, until
`retry_timeout_ms` is over. Only one thread at a time uses a Cluster. Only this package imports it.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import grpc

from smq.clients.errors import error_from_detail, error_from_rpc
from smq.clients.login import Token
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc as pb_grpc
from smq.clients.retry import Backoff
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.topic_config import batch_rules, is_external
from smq.spark_connector.errors import ReadError, SinkError
from smq.spark_connector.options import Security, TimeUnit
from smq.spark_connector.read_bounds import PartitionKey, PartitionView

log = logging.getLogger(__name__)
NO_SECURITY: Final = Security()
T = TypeVar("T")

FETCH_TIMEOUT_S: Final = 10.0  # a node without an answer for this long counts as dead, and another is asked
VIEW_TIMEOUT_S: Final = 4.0  # the same for a question about the cluster: an election takes a second or two
FAILED_LAST_S: Final = 30.0  # a node that gave no answer is asked last for this long
BACKOFF: Final = Backoff(first_ms=50.0, max_ms=1000.0)  # tasks are many and not urgent
LIST_PARTITIONS_MAX: Final = 500  # of one ListOffsets request: below the server's cap
REPLICAS_TRIED_BEFORE_PAUSE: Final = 3  # a partition usually has this many
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 128 << 20),  # a batch is never split, and may be configured up to 100 MiB
    # Answers have megabytes: frames and windows larger than gRPC's defaults save a fifth of the reader's CPU time.
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.enable_http_proxy", 0),  # nodes are addressed directly; a web proxy in the environment is not for them
    ("grpc.max_reconnect_backoff_ms", 1000),  # a restarted node is back within seconds: reconnect soon
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All topics: the id of each (a topic that is deleted and created again gets another), and each partition's ends
    and replicas. Topics with storage=external have no records here, so they are in `external` and have no views."""

    topic_ids: dict[str, str]
    views: dict[PartitionKey, PartitionView]
    external: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlaces:
    """Where a topic is written: how many partitions it has, and the addresses of those leaders that are known."""

    count: int
    leaders: dict[int, str]
    batch_bytes_max: int


class Cluster:
    """One worker's connections to the nodes of one cluster."""

    def __init__(self, servers: Sequence[str], retry_timeout_ms: int, security: Security = NO_SECURITY) -> None:
        self._security = security
        self._servers = list(servers)
        self.retry_timeout_s: Final = retry_timeout_ms / 1000
        self._channels: dict[str, grpc.Channel] = {}
        self._tokens: dict[str, Token] = {}  # of the user, by address
        self._failed_at: dict[str, float] = {}  # monotonic seconds, by address: one entry per node

    def close(self) -> None:
        """Ends all connections. The cluster may be used again afterwards, and then reconnects."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._tokens.clear()

    def broker(self, address: str) -> pb_grpc.BrokerStub:
        return pb_grpc.BrokerStub(self._channel(address))

    def admin(self, address: str) -> pb_grpc.AdminStub:
        return pb_grpc.AdminStub(self._channel(address))

    def agent(self, address: str) -> pb_grpc.AgentStub:
        return pb_grpc.AgentStub(self._channel(address))

    def transactions(self, address: str) -> pb_grpc.TransactionsStub:
        return pb_grpc.TransactionsStub(self._channel(address))

    def failed(self, address: str) -> None:
        """The node gave no answer: for a while it is asked last, so that not every task waits for it."""
        self._failed_at[address] = time.monotonic()
        if address in self._tokens:  # a node that has been restarted knows no token
            self._tokens[address].forget()

    def failed_last(self, addresses: Iterable[str]) -> list[str]:
        """The same addresses in the same order, but nodes that failed recently come last, the latest failure at the
        very end: a caller that always takes the first tries them all."""
        since = time.monotonic() - FAILED_LAST_S
        return sorted(addresses, key=lambda address: max(since, self._failed_at.get(address, since)))

    def layout(
        self, timeout_s: float | None = None, *, exact: Callable[[PartitionKey], bool] = lambda _: False
    ) -> Layout:
        """As of a linearizable point: includes every topic created before the call, and the exact ends of the
        partitions that `exact` names. ReadError if this is not known within `timeout_s` (default: the retry timeout):
        no node has answered, or a partition has no leader."""
        retries = self._retries(timeout_s)
        while True:
            found = self._layout(timeout_s)
            open_ends = [f"{t}-{p}" for (t, p), view in found.views.items() if not view.is_end_known and exact((t, p))]
            if not open_ends:
                return found
            retries.pause(f"the leaders of {', '.join(sorted(open_ends)[:10])} did not say where these partitions end")

    def _layout(self, timeout_s: float | None) -> Layout:
        request = pb.DescribeClusterRequest(linearizable=True, timeout_ms=int(VIEW_TIMEOUT_S * 1000))
        answer = self._anywhere(
            lambda address: self.admin(address).DescribeCluster(request, timeout=VIEW_TIMEOUT_S),
            timeout_s,
        )
        addresses = {node.node: node.grpc_address for node in answer.nodes if node.grpc_address}
        live = {node.node for node in answer.nodes if not node.fenced}
        views = {
            (topic.name, p.partition): PartitionView(
                topic_id=topic.topic_id.hex(),
                lo=p.log_start,
                hi=p.lso,
                replicas=_addresses(p.replicas, addresses, live),
                is_end_known=not p.end_unknown,
            )
            for topic in answer.topics
            if not is_external(topic.config)
            for p in topic.partitions
        }
        return Layout(
            topic_ids={t.name: t.topic_id.hex() for t in answer.topics},
            views=views,
            external=frozenset(t.name for t in answer.topics if is_external(t.config)),
        )

    def offsets_at(
        self, unit: TimeUnit, times: Mapping[PartitionKey, int], views: Mapping[PartitionKey, PartitionView]
    ) -> dict[PartitionKey, int | None]:
        """The first readable offset of each partition at or after its time; None if there is none."""

        def ask(key: PartitionKey) -> pb.ListOffsetsPartition:
            topic, partition = key
            if unit is TimeUnit.APPEND_NS:
                return pb.ListOffsetsPartition(
                    topic=topic, partition=partition, offset_type=pb.EXACT_TS_NS, offset_value=times[key]
                )
            return pb.ListOffsetsPartition(topic=topic, partition=partition, timestamp_ms=times[key])

        listed = self._list_offsets({key: ask(key) for key in times}, views)
        return {key: found.offset if found.offset < found.hi else None for key, found in listed.items()}

    def sized_ends(
        self,
        requested: Mapping[PartitionKey, tuple[int, int]],
        views: Mapping[PartitionKey, PartitionView],
        timeout_s: float | None = None,
    ) -> dict[PartitionKey, tuple[int, int]]:
        """(end, stored bytes) of the batches that fit, for (start, most bytes) of each partition; at least one batch.
        ReadError if not all are known within `timeout_s` (default: the retry timeout)."""
        asks = {
            (topic, partition): pb.ListOffsetsPartition(
                topic=topic, partition=partition, offset_value=start, max_bytes=bytes_max
            )
            for (topic, partition), (start, bytes_max) in requested.items()
        }
        listed = self._list_offsets(asks, views, timeout_s)
        return {key: (found.offset, found.size_bytes) for key, found in listed.items()}

    def _list_offsets(
        self,
        asks: Mapping[PartitionKey, pb.ListOffsetsPartition],
        views: Mapping[PartitionKey, PartitionView],
        timeout_s: float | None = None,
    ) -> dict[PartitionKey, pb.ListedOffset]:
        """Each partition's answer, from one of its replicas."""
        retries = self._retries(timeout_s)
        listed: dict[PartitionKey, pb.ListedOffset] = {}
        tries = 0
        while left := [key for key in asks if key not in listed]:
            by_address: dict[str, list[PartitionKey]] = {}
            for key in left:
                by_address.setdefault(self.failed_last(views[key].replicas or self._servers)[0], []).append(key)
            for address, keys in by_address.items():
                for start in range(0, len(keys), LIST_PARTITIONS_MAX):
                    some = [asks[key] for key in keys[start : start + LIST_PARTITIONS_MAX]]
                    listed |= self._list_some(address, some, retries)
            tries += 1
            if tries % REPLICAS_TRIED_BEFORE_PAUSE == 0 and len(listed) < len(asks):
                retries.pause("the partitions' offsets could not be looked up")
        return listed

    def _list_some(
        self, address: str, asks: Sequence[pb.ListOffsetsPartition], retries: "Retries"
    ) -> dict[PartitionKey, pb.ListedOffset]:
        """One node's answers, without the partitions that it cannot answer for. SmqError if a retry cannot help."""
        request = pb.ListOffsetsRequest(partitions=asks, timeout_ms=int(VIEW_TIMEOUT_S * 1000))
        errors: list[grpc.RpcError | SmqError] = []
        listed = {}
        try:
            for found in self.broker(address).ListOffsets(request, timeout=VIEW_TIMEOUT_S).offsets:
                if found.HasField("error"):
                    errors.append(error_from_detail(found.error))
                else:
                    listed[found.topic, found.partition] = found
        except grpc.RpcError as e:
            errors.append(e)
        for error in errors:
            retries.record(address, _retriable(as_smq_error(error, address)))
            self.failed(address)
        return listed

    def topic_places(self, topic: str) -> TopicPlaces:
        """As of a linearizable point. SmqError if there is no such topic, or smq does not store its records."""
        request = pb.DescribeClusterRequest(topics=[topic], linearizable=True, timeout_ms=int(VIEW_TIMEOUT_S * 1000))
        answer = self.ask(lambda address: self.admin(address).DescribeCluster(request, timeout=VIEW_TIMEOUT_S))
        addresses = {node.node: node.grpc_address for node in answer.nodes if node.grpc_address}
        (found,) = answer.topics
        if is_external(found.config):
            raise SmqError(ErrorCode.WRONG_STORAGE, f"topic {topic!r} has storage=external: its records are elsewhere")
        return TopicPlaces(
            count=len(found.partitions),
            leaders={p.partition: addresses[p.leader] for p in found.partitions if p.leader in addresses},
            batch_bytes_max=batch_rules(found.config).bytes_max,
        )

    def ask(self, call: Callable[[str], T], timeout_s: float | None = None) -> T:
        """As `_anywhere`, but follows an answer that names the node to ask. SinkError at the timeout."""
        retries = Retries(self.retry_timeout_s if timeout_s is None else timeout_s, SinkError)
        named: str | None = None
        while True:
            for address in [named] if named else self.failed_last(self._servers):
                was_named, named = named is not None, None
                try:
                    return call(address)
                except (grpc.RpcError, SmqError) as e:
                    error = _retriable(as_smq_error(e, address))
                retries.record(address, error)
                named = None if was_named else error.details.leader_address
                if named:
                    break
                if error.code is not ErrorCode.TRANSACTION_ENDING:
                    self.failed(address)
            if not named:
                retries.pause("the cluster could not be asked")

    def _anywhere(self, call: Callable[[str], T], timeout_s: float | None = None) -> T:
        """`call` with one address after another. SmqError if a retry cannot help, ReadError at the timeout."""
        retries = self._retries(timeout_s)
        while True:
            for address in self.failed_last(self._servers):
                try:
                    return call(address)
                except (grpc.RpcError, SmqError) as e:
                    self.failed(address)
                    retries.record(address, _retriable(as_smq_error(e, address)))
            retries.pause("the cluster could not be asked")

    def _retries(self, timeout_s: float | None) -> "Retries":
        return Retries(self.retry_timeout_s if timeout_s is None else timeout_s)

    def _channel(self, address: str) -> grpc.Channel:
        channel = self._channels.get(address)
        if channel is None:
            tls, login = self._security
            if tls is not None:
                channel = grpc.secure_channel(address, tls.credentials(), options=CHANNEL_OPTIONS)
            else:
                channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if login is not None:
                token = self._tokens[address] = Token(login)
                channel = grpc.intercept_channel(channel, _WithToken(token, pb_grpc.UsersStub(channel)))
            self._channels[address] = channel
        return channel


class _CallDetails(NamedTuple):
    """As grpc.ClientCallDetails, which is only an interface."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _WithToken(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg] # generic in stubs
    """Gives each call the token of a login, and logs in again when that is due."""

    def __init__(self, token: Token, users: pb_grpc.UsersStub) -> None:
        self._token = token
        self._users = users
        self._lock = threading.Lock()  # a fetch ahead is a call of another thread

    def _details(self, given: Any) -> _CallDetails:
        with self._lock:
            if self._token.is_due:
                self._token.renew_blocking(self._users)
            metadata = (*(given.metadata or ()), *self._token.metadata)
        return _CallDetails(
            given.method, given.timeout, metadata, given.credentials, given.wait_for_ready, given.compression
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._details(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._details(client_call_details), request_iterator)


class Retries:
    """The time left for retries without progress, and the errors so far. `failure` is raised when it is over."""

    def __init__(self, timeout_s: float, failure: type[RuntimeError] = ReadError) -> None:
        self._timeout_s = timeout_s
        self._failure = failure
        self._errors: dict[str, SmqError] = {}
        self.reset()

    def reset(self) -> None:
        """There was progress: the full time is left again."""
        self._give_up_at = time.monotonic() + self._timeout_s
        self._pauses = 0
        self._errors.clear()

    def record(self, address: str, error: SmqError) -> None:
        self._errors[address] = error

    def pause(self, what: str) -> None:
        """Sleeps, longer each time; the failure when the time is up."""
        if time.monotonic() >= self._give_up_at:
            reasons = "; ".join(f"{address}: {error}" for address, error in self._errors.items())
            raise self._failure(f"{what} within {self._timeout_s:g} s ({reasons or 'no node had anything new'})")
        self._pauses += 1
        time.sleep(BACKOFF.delay_ms(self._pauses, random.random) / 1000)


def _addresses(replicas: Iterable[int], addresses: Mapping[int, str], live: Container[int]) -> tuple[str, ...]:
    """Where to read: the live replicas, or all if none is live (they may be back before the read begins)."""
    known = [node for node in replicas if node in addresses]
    return tuple(addresses[node] for node in [n for n in known if n in live] or known)


def _retriable(error: SmqError) -> SmqError:
    """Returns the error if a retry may help; raises it otherwise."""
    if not error.code.is_retriable:
        raise error
    return error


def as_smq_error(error: grpc.RpcError | SmqError, address: str) -> SmqError:
    """The SmqError of a failed call to `address`."""
    return error if isinstance(error, SmqError) else error_from_rpc(error, address)


# The topic or partition does not exist: no other replica will give another answer.
GONE: Final = (ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION)
