"""Blocking calls to a cluster from Spark's Python workers: what topics there are, and up to where they can be read.

Owns the connections of one worker process, and the patience: whichever node fails, another is asked until
`retry_timeout_ms` is over. One thread uses a Cluster at a time. Imported by `reader` and `fetching` only.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from smq.clients.errors import error_from_detail, error_from_rpc
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc as pb_grpc
from smq.clients.retry import Backoff
from smq.raft_state.errors import ErrorCode, SmqError
from smq.spark_connector.errors import ReadError
from smq.spark_connector.planning import PartitionKey

log = logging.getLogger(__name__)
T = TypeVar("T")

FETCH_TIMEOUT_S: Final = 10.0  # a node that answers nothing this long is taken for dead, and another is asked
VIEW_TIMEOUT_S: Final = 4.0  # the same for a question about the cluster: an election takes a second or two
FAILED_LAST_S: Final = 30.0  # a node that gave no answer is asked last for this long
BACKOFF: Final = Backoff(first_ms=50.0, max_ms=1000.0)  # tasks are many and in no hurry
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 128 << 20),  # a batch comes whole, and may be configured up to 100 MiB
    ("grpc.enable_http_proxy", 0),  # the nodes are in this network; a web proxy of the environment is not meant
    ("grpc.max_reconnect_backoff_ms", 1000),  # a restarted node is back within seconds: notice it
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Partition counts of all topics there are, and the gRPC addresses of each partition's replicas, live first."""

    counts: dict[str, int]
    replicas: dict[PartitionKey, tuple[str, ...]]


class Cluster:
    """One worker's connections to the nodes of one cluster."""

    def __init__(self, servers: Sequence[str], retry_timeout_ms: int) -> None:
        self._servers = list(servers)
        self.retry_timeout_s: Final = retry_timeout_ms / 1000
        self._channels: dict[str, grpc.Channel] = {}
        self._failed_at: dict[str, float] = {}  # monotonic seconds, by address: one entry a node

    def close(self) -> None:
        """Ends all connections. The cluster may be used again afterwards, and connects anew."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def broker(self, address: str) -> pb_grpc.BrokerStub:
        return pb_grpc.BrokerStub(self._channel(address))

    def failed(self, address: str) -> None:
        """The node gave no answer: it is asked last for a while, so that not every task waits for it."""
        self._failed_at[address] = time.monotonic()

    def failed_last(self, addresses: Iterable[str]) -> list[str]:
        """The same addresses in the same order, but those that gave no answer lately come last."""
        since = time.monotonic() - FAILED_LAST_S
        return sorted(addresses, key=lambda address: self._failed_at.get(address, since) > since)

    def layout(self) -> Layout:
        """As of a linearizable point: a topic created before the call is there."""
        request = pb.DescribeClusterRequest(linearizable=True, timeout_ms=int(VIEW_TIMEOUT_S * 1000))
        answer = self._anywhere(
            lambda address: pb_grpc.AdminStub(self._channel(address)).DescribeCluster(request, timeout=VIEW_TIMEOUT_S)
        )
        addresses = {node.node: node.grpc_address for node in answer.nodes if node.grpc_address}
        fenced = {node.node for node in answer.nodes if node.fenced}
        replicas = {}
        for topic in answer.topics:
            for p in topic.partitions:
                live_first = sorted(p.replicas, key=lambda node: node in fenced)
                replicas[topic.name, p.partition] = tuple(addresses[n] for n in live_first if n in addresses)
        return Layout(counts={t.name: len(t.partitions) for t in answer.topics}, replicas=replicas)

    def ends(self, keys: Sequence[PartitionKey]) -> dict[PartitionKey, tuple[int, int]]:
        """[lo, hi) of what a read-committed reader may see of each partition, as of a linearizable point."""
        if not keys:
            return {}
        request = pb.ListOffsetsRequest(timeout_ms=int(VIEW_TIMEOUT_S * 1000))
        for topic, partition in keys:
            request.partitions.add(topic=topic, partition=partition, offset_type=pb.RESET_TO_LATEST)

        def call(address: str) -> dict[PartitionKey, tuple[int, int]]:
            answer = self.broker(address).ListOffsets(request, timeout=VIEW_TIMEOUT_S)
            for listed in answer.offsets:
                if listed.HasField("error"):
                    raise error_from_detail(listed.error)
            return {(listed.topic, listed.partition): (listed.lo, listed.offset) for listed in answer.offsets}

        return self._anywhere(call)

    def _anywhere(self, call: Callable[[str], T]) -> T:
        """`call` with one address after another. SmqError where trying again cannot help, ReadError in the end."""
        patience = Patience(self.retry_timeout_s)
        while True:
            for address in self.failed_last(self._servers):
                try:
                    return call(address)
                except (grpc.RpcError, SmqError) as e:
                    error = as_smq_error(e, address)
                    if not error.code.is_retriable:
                        raise error from e
                    self.failed(address)
                    patience.note(address, error)
            patience.pause("the cluster could not be asked")

    def _channel(self, address: str) -> grpc.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return channel


class Patience:
    """How long to go on trying without progress, and what has gone wrong meanwhile."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._errors: dict[str, SmqError] = {}
        self.renew()

    def renew(self) -> None:
        """There was progress: all of the time is left again."""
        self._give_up_at = time.monotonic() + self._timeout_s
        self._pauses = 0
        self._errors.clear()

    def note(self, address: str, error: SmqError) -> None:
        self._errors[address] = error

    def pause(self, what: str) -> None:
        """Waits a little, longer each time; ReadError when the time is up."""
        if time.monotonic() >= self._give_up_at:
            reasons = "; ".join(f"{address}: {error}" for address, error in self._errors.items())
            raise ReadError(f"{what} within {self._timeout_s:g} s ({reasons or 'no node had anything new'})")
        self._pauses += 1
        time.sleep(BACKOFF.delay_ms(self._pauses, random.random) / 1000)


def as_smq_error(error: grpc.RpcError | SmqError, address: str) -> SmqError:
    """What a failed call to `address` means."""
    return error if isinstance(error, SmqError) else error_from_rpc(error, address)


# These say that it is gone or never was: no other replica will answer otherwise.
GONE: Final = (ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION)
