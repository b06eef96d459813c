"""Consume-transform-produce by real clients, through kills of nodes and of the client itself: each record once.

The client's program (`copy` in tests/kafka/foreign) copies a topic in transactions that also hold its group's offsets,
aborts every fifth of them, and after an error begins again with a new producer and a new consumer.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import confluent_kafka
import pytest

from smq.coordinator.kafka.api_keys import ApiKey
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import bootstrap
from tests.kafka.foreign.clients import BUILDS, Missing
from tests.kafka.foreign.driver import COPY_S, Client
from tests.kafka.reading import PATIENCE_S, messages

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PARTITIONS = 3
PART = 220  # records of each partition, for each kill and after the last one
GROUP = "copiers"
CLIENTS = ("confluent-kafka", "kafka-clients (Java)", "franz-go")
# librdkafka's issues 5511 and 5456: if the group's coordinator, as it remembers it, is missing in an answer to Metadata
# (a node that is not back yet is), then rd_kafka_send_offsets_to_transaction() waits for ever, whatever its time-out.
# So its program needs what the others do without: to be started again.
HANGING = ("confluent-kafka",)
STALL_S = 30.0  # without progress: longer than a restart of all nodes, an election and a session


class Copying:
    """A client that copies one topic to another, and is started again when it was killed."""

    def __init__(self, cluster: Cluster, name: str, root: Path) -> None:
        self.cluster = cluster
        self.source, self.target = cluster.make_topic(PARTITIONS), cluster.make_topic(PARTITIONS)
        self._name = name
        self._root = root
        self._command = BUILDS[name](root)
        self._addresses = bootstrap(cluster)
        self._pool = ThreadPoolExecutor(1)
        self._may_hang = name in HANGING
        self._seen, self._seen_at = 0, 0.0
        self.starts = self.hangs = 0

    def start(self) -> None:
        self.starts, self._seen_at = self.starts + 1, time.monotonic()
        log = self._root / f"client-{self.starts}.log"
        self._client = Client(self._name, [*self._command, self._addresses], log)
        asked = (self.source, self.target, GROUP, PARTITIONS, PART * (len(KILLS) + 1))
        self.counts: Future[dict[str, int]] = self._pool.submit(self._client.copy, *asked)

    def kill(self) -> None:
        assert not self.counts.done(), "it has died in the middle of its work"
        self._client.kill()
        assert isinstance(self.counts.exception(PATIENCE_S), AssertionError)

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown()

    def done(self) -> int:
        """How many records of the source the group has committed, according to any node that answers."""
        if self.counts.done():
            self.counts.result()  # an error of the client ends the wait for it
        raw = self.cluster.alive()[0].raw
        return sum(raw.committed(f"kafka-cg-{GROUP}", self.source, p) or 0 for p in range(PARTITIONS))

    def wait_done(self, records: int) -> None:
        def is_done() -> bool:
            done = self.done()
            if done > self._seen:
                self._seen, self._seen_at = done, time.monotonic()
            elif self._may_hang and time.monotonic() > self._seen_at + STALL_S:
                self.hangs += 1
                self.kill()
                self.start()
            return done >= records

        wait_for(f"{records} records are copied", is_done, COPY_S)


def write(addresses: str, topic: str, part: int) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": addresses, "enable.idempotence": True})
    for place in range(PARTITIONS):
        for n in range(part * PART, (part + 1) * PART):
            producer.produce(topic, b"%d-%d" % (place, n), partition=place)
    assert producer.flush(PATIENCE_S) == 0


def read(addresses: str, topic: str, isolation: str) -> list[list[bytes]]:
    found = messages(addresses, topic, partitions=PARTITIONS, isolation=isolation)
    return [[message.value() or b"" for message in partition] for partition in found]


# ----------------------------------------------------------------------------------------------------- the kills
def _coordinator(copying: Copying, key: str, key_type: int) -> int:
    raw = RawKafka(copying.cluster.alive()[0].kafka)
    (found,) = raw.call(ApiKey.FIND_COORDINATOR, 4, key_type=key_type, coordinator_keys=[key])["coordinators"]
    raw.close()
    return int(found["node_id"])


def _leader(copying: Copying) -> list[int]:
    return [copying.cluster.wait_leader(copying.target, 0)]


def _coordinator_of_the_producer(copying: Copying) -> list[int]:
    return [_coordinator(copying, f"copy-{copying.target}", 1)]


def _coordinator_of_the_group(copying: Copying) -> list[int]:
    return [_coordinator(copying, GROUP, 0)]


def _every_node(copying: Copying) -> list[int]:
    return sorted(copying.cluster.nodes)


def _no_node(_copying: Copying) -> Sequence[int]:
    return ()


# The nodes that die, and whether the client dies with them.
KILLS: tuple[tuple[Callable[[Copying], Sequence[int]], bool], ...] = (
    (_leader, False),
    (_coordinator_of_the_producer, False),
    (_no_node, True),
    (_every_node, False),
    (_coordinator_of_the_group, False),
    (_every_node, True),
)


@pytest.mark.parametrize("name", CLIENTS)
def test_each_record_is_copied_once_through_kills_of_nodes_and_of_the_client(
    own_cluster: Cluster, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    try:
        copying = Copying(own_cluster, name, tmp_path)
    except Missing as e:
        pytest.skip(str(e))
    addresses = bootstrap(own_cluster)
    copying.start()
    step = PARTITIONS * PART
    for part, (victims, is_client_killed) in enumerate(KILLS):
        write(addresses, copying.source, part)
        copying.wait_done(part * step + step // 4)
        dead = victims(copying)
        own_cluster.kill(*dead)
        if is_client_killed:
            copying.kill()
        if len(dead) == len(own_cluster.nodes):
            own_cluster.restart(*dead)
        if is_client_killed:
            copying.start()
        copying.wait_done((part + 1) * step)  # without the node, if it is one
        if len(dead) < len(own_cluster.nodes):
            own_cluster.restart(*dead)
    write(addresses, copying.source, len(KILLS))
    records = PART * (len(KILLS) + 1)
    whole = PARTITIONS * records
    copying.wait_done(whole)
    counts = copying.counts.result(PATIENCE_S)
    copying.close()

    wait_for(
        "the last control batches",
        lambda: sum(map(len, read(addresses, copying.target, "read_committed"))) >= whole,
        PATIENCE_S,
    )
    copies = read(addresses, copying.target, "read_committed")
    everything = read(addresses, copying.target, "read_uncommitted")
    out, raw = (sum(map(len, found)) for found in (copies, everything))
    told = f"{name}: {whole} in, {out} out, {raw} in the logs; {copying.starts} starts ({copying.hangs} after it hung)"
    record_property("counts", f"{told}, the last of which: {counts}")
    assert copies == [[b"copy of %d-%d" % (place, n) for n in range(records)] for place in range(PARTITIONS)]
    assert raw > whole, "of the aborted transactions, too, records lie in the logs"
    committed = [own_cluster.nodes[1].raw.committed(f"kafka-cg-{GROUP}", copying.source, p) for p in range(PARTITIONS)]
    assert committed == [records] * PARTITIONS
    assert counts["aborted"]
    assert copying.starts - copying.hangs == 1 + sum(is_client_killed for _, is_client_killed in KILLS)
    own_cluster.wait_converged(copying.target, PARTITIONS)
    own_cluster.wait_digests_equal()
