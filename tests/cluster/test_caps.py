"""The memory of a node stays bounded: with clients that never read, that never stop, and that are very many."""

import contextlib
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb.smq_pb2_grpc import AgentStub, BrokerStub
from smq.coordinator import limits
from smq.coordinator.kafka.api_keys import ApiKey
from smq.raft_state.errors import ErrorCode
from smq.records import NewRecord, encode_batch
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka
from smq.testing.node_client import error_of
from smq.testing.node_process import wait_for
from tests.cluster.slow_reader import SlowReader

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
BIG = encode_batch([NewRecord(key=None, value=os.urandom(MIB - 1000), timestamp_ms=1)])
SERVED_S = 60.0  # on a machine with a dozen processes per core; otherwise milliseconds
SETTLED_S = 1.0  # without any growth: whatever comes was asked for long before
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # HTTP/2's, with empty settings


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with a topic of 40 MiB."""
    made = Cluster(tmp_path_factory.mktemp("caps"), 1)
    try:
        made.start()
        made.nodes[1].raw.create_topic("big", 1)
        made.wait_leader("big", 0)
        for _ in range(40):
            made.nodes[1].raw.publish_batch("big", 0, BIG)
        yield made
    finally:
        made.stop()


@pytest.fixture
def slow(one: Cluster) -> Iterator[SlowReader]:
    relay = SlowReader(one.nodes[1].grpc)
    yield relay
    relay.close()


@pytest.fixture
def before(one: Cluster) -> int:
    """The memory of a new process of the node. An old one's allocator would keep memory of earlier tests and so hide
    the growth in this one. For the same reason glibc is set to return large blocks immediately."""
    one.kill(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
        one.restart(1)
    one.wait_leader("big", 0)
    return memory_bytes(one)


def memory_bytes(cluster: Cluster, node: int = 1) -> int:
    """Resident, without the pages of files: LMDB's map is the system's to drop."""
    for line in Path(f"/proc/{cluster.nodes[node].pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not report RssAnon")


def settled_growth(cluster: Cluster, before: int, node: int = 1) -> int:
    """The most that the node has held above `before` once it has stopped growing."""
    most, since = 0, time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        grown = memory_bytes(cluster, node) - before
        if grown > most + MIB:
            most, since = grown, time.monotonic()
        time.sleep(0.05)
    return most


def check_served(cluster: Cluster) -> None:
    """Another client is served, while the first goes on. How soon depends on what else the machine does, so an attempt
    that gets no answer in time is repeated."""

    def is_served() -> bool:
        return len(cluster.nodes[1].raw.fetch("big", 0, 0, max_bytes=MIB).batches) == 1

    wait_for("an answer for another client", is_served, SERVED_S)


# -------------------------------------------------------------------------------------------- clients that never read
def test_a_grpc_client_that_fetches_and_never_reads_holds_no_more_than_its_share(
    one: Cluster, before: int, slow: SlowReader
) -> None:
    """200 fetches of 8 MiB are 1.6 GiB, if they were all read from the log."""
    with grpc.insecure_channel(slow.address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        fetch = BrokerStub(channel).Fetch
        request = pb.FetchRequest(partitions=[pb.FetchPartition(topic="big", partition=0, offset=0, max_bytes=8 * MIB)])
        assert len(fetch(request).partitions[0].batches) >= 7
        slow.stop_reading()
        calls: list[Any] = [fetch.future(request) for _ in range(200)]
        grown = settled_growth(one, before)
        check_served(one)
        for call in calls:
            call.cancel()
    # Each answer is in memory up to three times: its batches, the message, and gRPC's own copy. As much again is what
    # the allocator may keep of the answers before; without a cap it would be 25 times the first.
    assert grown < 2 * 3 * limits.FETCH_INFLIGHT_BYTES_PER_CONNECTION_MAX + 64 * MIB


def test_a_subscriber_that_never_reads_holds_one_response(one: Cluster, before: int, slow: SlowReader) -> None:
    with grpc.insecure_channel(slow.address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        grpc.channel_ready_future(channel).result(30)  # one that is not yet greeted would ask for nothing
        slow.stop_reading()
        ask = threading.Event()

        def requests() -> Iterator[pb.SubscribeRecordRequest]:
            init = pb.SubscribeInit(partition=0, subscription_id="slow", topic="big", offset_type=pb.RESET_TO_EARLIEST)
            init.max_bytes = 100 * MIB  # more than it gets
            yield pb.SubscribeRecordRequest(init=init)
            ask.wait(30)

        call: Any = AgentStub(channel).SubscribeRecord(requests())
        grown = settled_growth(one, before)
        check_served(one)
        ask.set()
        call.cancel()
    # The log's batches, their records, the message, its bytes and gRPC's copy; the allocator as above.
    assert grown < 2 * 5 * limits.SUBSCRIBE_BYTES_MAX


def test_a_kafka_client_that_fetches_and_never_reads_holds_no_more_than_its_share(one: Cluster, before: int) -> None:
    raw = RawKafka(one.nodes[1].kafka)
    raw.socket.settimeout(2)
    topics = [{"topic": "big", "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 8 * MIB}]}]
    for _ in range(300):  # 2.4 GiB, if they were all read from the log
        raw.send(ApiKey.FETCH, 4, replica_id=-1, max_wait_ms=0, min_bytes=1, max_bytes=8 * MIB, topics=topics)
    grown = settled_growth(one, before)
    check_served(one)
    raw.close()
    assert grown < 3 * limits.KAFKA_INFLIGHT_BYTES_PER_CONNECTION_MAX + 64 * MIB


# ------------------------------------------------------------------------------------------ clients that never stop
def test_a_grpc_client_that_never_stops_sending_is_slowed_down(one: Cluster, before: int) -> None:
    """Requests of 8 MiB on as many streams as one connection may have."""
    most = 0
    streams = limits.PUBLISH_STREAMS_PER_CONNECTION_MAX
    command = [sys.executable, "-m", "tests.cluster.endless_sender", one.nodes[1].grpc, str(streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as pouring:
        try:
            assert pouring.stdout is not None
            for _ in range(streams):
                assert pouring.stdout.readline() == "pours\n"
            for _ in range(40):
                most = max(most, memory_bytes(one) - before)
                time.sleep(0.05)
            check_served(one)
        finally:
            pouring.kill()
    # A message in the making, one parsed, one with the node, and what the allocator keeps of those before.
    assert most < 5 * 9 * MIB * streams


def test_a_grpc_client_of_many_large_calls_fills_only_the_places_of_arrivals(one: Cluster, before: int) -> None:
    """150 calls of 8 MiB each, for a method that needs a byte. A node that is too slow for them says so."""
    most = 0
    request = b"\x9a\x06" + _varint(8 * MIB) + bytes(8 * MIB)  # an unknown field: it is skipped
    with grpc.insecure_channel(one.nodes[1].grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        ask: Any = channel.unary_unary("/smq.v1.Admin/NodeStatus", None, None)
        calls = [ask.future(request) for _ in range(150)]
        while not all(call.done() for call in calls):
            most = max(most, memory_bytes(one) - before)
            time.sleep(0.02)
        codes = {call.code() for call in calls}
    assert grpc.StatusCode.OK in codes
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    check_served(one)
    # On its way a request is gRPC's bytes, then Python's; being served Python's and the message.
    arriving = limits.GRPC_ARRIVALS_MAX + limits.GRPC_ARRIVALS_SLOW_MAX
    assert most < 2 * 9 * MIB * arriving + 2 * limits.GRPC_LARGE_REQUESTS_BYTES_MAX + 64 * MIB


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def test_publishing_streams_of_one_connection_are_counted(one: Cluster) -> None:
    most = limits.PUBLISH_STREAMS_PER_CONNECTION_MAX
    done = threading.Event()

    def wait() -> Iterator[pb.PublishRecordRequest]:
        yield pb.PublishRecordRequest(partition=0, topic="big", correlation_id=7)
        done.wait(60)

    with grpc.insecure_channel(one.nodes[1].grpc) as channel:
        publish: Any = AgentStub(channel).PublishRecord
        streams = [publish(wait()) for _ in range(most)]
        for stream in streams:
            assert next(stream).correlation_id == 7
        with pytest.raises(grpc.RpcError) as refused:
            next(publish(wait()))
        assert getattr(error_of(refused.value), "code", None) is ErrorCode.LIMIT_EXCEEDED
        done.set()
        assert [list(stream) for stream in streams] == [[]] * most
        assert next(publish(wait())).correlation_id == 7


def test_a_kafka_client_that_never_stops_sending_is_not_read_beyond_its_share(fault_cluster: Cluster) -> None:
    """Batches for a partition that cannot take any: the other replicas stand still."""
    topic = fault_cluster.make_topic()
    leader = fault_cluster.wait_leader(topic, 0)
    before = memory_bytes(fault_cluster, leader)
    raw = RawKafka(fault_cluster.nodes[leader].kafka)
    raw.socket.settimeout(2)
    topics = [{"name": topic, "partition_data": [{"index": 0, "records": [bytes(BIG)]}]}]
    for other in fault_cluster.nodes.keys() - {leader}:
        fault_cluster.pause(other)
    with contextlib.suppress(TimeoutError):
        for _ in range(400):
            raw.send(ApiKey.PRODUCE, 3, acks=-1, timeout_ms=30_000, topic_data=topics)
    grown = settled_growth(fault_cluster, before, leader)
    raw.close()
    fault_cluster.heal()
    assert grown < 3 * limits.KAFKA_INFLIGHT_BYTES_PER_CONNECTION_MAX + 64 * MIB


# ------------------------------------------------------------------------------------------------ descriptors
def test_a_node_with_few_descriptors_refuses_clients_and_stays_in_its_cluster(own_cluster: Cluster) -> None:
    """Clients take all that they get on every port of node 1, and it goes on voting, replicating and storing."""
    own_cluster.start()
    own_cluster.nodes[2].raw.create_topic("t", 3, replication_factor=3)
    own_cluster.kill(1)
    own_cluster.run(1, before=["/bin/sh", "-c", 'ulimit -n 320; exec "$@"', "sh"])
    own_cluster.wait_ready(1)
    log = own_cluster.nodes[1].log.read_text()
    assert "few_file_descriptors" in log
    assert "LimitNOFILE" in log
    node = own_cluster.nodes[1]
    held = [s for address in (node.kafka, node.grpc, node.http) for s in _flood(address, 400)]
    try:
        descriptors = len(list(Path(f"/proc/{node.pid}/fd").iterdir()))
        assert descriptors < 320 - 60, "what is left is the disk's and the peers'"
        wait_for("a refusal in the log", lambda: "connection_refused" in node.log.read_text())
        own_cluster.kill(2)  # a majority is nodes 1 and 3 now: an acknowledgement is node 1's as well
        for partition in range(3):
            leader = own_cluster.wait_leader("t", partition, other_than=2)
            own_cluster.nodes[leader].raw.publish_values("t", partition, [b"one", b"two"])
        own_cluster.restart(2)
        own_cluster.wait_converged("t", 3)
    finally:
        for s in held:
            s.close()


def _flood(address: str, count: int, local: str = "127.0.0.1") -> list[socket.socket]:
    """As many connections as one gets; the node closes the others immediately."""
    host, _, port = address.rpartition(":")
    held = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            held.append(socket.create_connection((host, int(port)), timeout=5, source_address=(local, 0)))
    return held


# ----------------------------------------------------------------------------------------------- very many
@pytest.mark.full
def test_ten_thousand_idle_connections_cost_little_and_disturb_no_client(
    one: Cluster, before: int, record_property: Callable[[str, object], None]
) -> None:
    """8,000 of Kafka clients from five addresses, 2,000 of gRPC clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 16_000:
        pytest.skip(f"the hard limit of open files is {hard}: this test and its node need 16,000 each")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 16_000), hard))
    node = one.nodes[1]
    held: list[socket.socket] = []
    try:
        for i in range(1, 6):
            held += _flood(node.kafka, 1_600, f"127.0.0.{i}")
        for s in _flood(node.grpc, 2_000, "127.0.0.9"):
            s.sendall(GREETING)
            held.append(s)
        wait_for("all of them", lambda: _descriptors(one) > 10_000)
        grown = memory_bytes(one) - before
        record_property("MiB held by 10,000 idle connections", grown // MIB)
        check_served(one)
        alive = sum(1 for s in held if _is_open(s))
        assert alive == 10_000
        assert grown < 10_000 * 40_000
        extra = [s for s in _flood(node.kafka, 500, "127.0.0.1") if _is_open_after(s)]
        assert len(extra) <= 400, "2,000 of one address, and no more"
        for s in extra:
            s.close()
        more = _flood(node.grpc, 100, "127.0.0.9")
        held += more
        for s in more:
            s.sendall(GREETING)
        wait_for("the end of the connections above 2,000 of one address", lambda: not any(_is_open(s) for s in more))
        assert all(_is_open(s) for s in held[8_000:10_000]), "the oldest connections stay"
    finally:
        for s in held:
            s.close()
    wait_for("their end", lambda: _descriptors(one) < 200)


def _descriptors(cluster: Cluster) -> int:
    return len(os.listdir(f"/proc/{cluster.nodes[1].pid}/fd"))


def _is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1 << 16))  # gRPC's own settings, and pings
    except BlockingIOError:
        return True
    except OSError:
        return False


def _is_open_after(sock: socket.socket) -> bool:
    """Once the node has had the time to refuse it: it answers a request."""
    sock.settimeout(10)
    try:
        sock.sendall(struct.pack(">ihhih", 10, ApiKey.API_VERSIONS, 0, 1, -1))
        return bool(sock.recv(1))
    except OSError:
        return False
