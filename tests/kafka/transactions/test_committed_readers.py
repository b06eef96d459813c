"""Searches and the console beside transactions: they show what was committed, and nothing else."""

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import confluent_kafka
import grpc
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.testing.cluster import Cluster
from tests.kafka.client_adapters import bootstrap as addresses
from tests.kafka.reading import PATIENCE_S
from tests.kafka.transactions.raw import fresh
from tests.kafka.transactions.test_clients import await_read, transactional

COMMITTED = [b"first", b"second", b"third"]
OPEN_FROM = 9  # three records and a marker, twice, and one record that belongs to no transaction
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def filled(cluster: Cluster) -> Iterator[tuple[str, Callable[[], None]]]:
    """A topic with an aborted, a committed and an open transaction and a record of none; and what commits the open
    one."""
    name, bootstrap = cluster.make_topic(), addresses(cluster)
    producer = transactional(bootstrap, fresh("tx"))
    for values, is_commit in (([b"aborted"] * 3, False), (COMMITTED, True)):
        producer.begin_transaction()
        for value in values:
            producer.produce(name, value, key=b"k", partition=0)
        assert producer.flush(PATIENCE_S) == 0
        (producer.commit_transaction if is_commit else producer.abort_transaction)(PATIENCE_S)
    await_read(bootstrap, name, COMMITTED)
    plain = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    plain.produce(name, b"plain", key=b"k", partition=0)
    assert plain.flush(PATIENCE_S) == 0
    producer.begin_transaction()
    producer.produce(name, b"open", key=b"k", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    plain.produce(name, b"after", key=b"k", partition=0)
    assert plain.flush(PATIENCE_S) == 0
    await_read(bootstrap, name, [*COMMITTED, b"plain"])
    is_open = True

    def commit() -> None:
        nonlocal is_open
        is_open = False
        producer.commit_transaction(PATIENCE_S)

    yield name, commit
    if is_open:
        producer.abort_transaction(PATIENCE_S)


@pytest.fixture(scope="module")
def shown(cluster: Cluster) -> Iterator[str]:
    """Such a topic for the tests that only look at it."""
    with filled(cluster) as (name, _):
        yield name


def search(cluster: Cluster, topic: str, **fields: object) -> pb.SearchRecordsResponse:
    """At the leader, so that no replica lags."""
    with grpc.insecure_channel(cluster.nodes[cluster.wait_leader(topic, 0)].grpc) as channel:
        request = pb.SearchRecordsRequest(topic=topic, partition=0, **fields)  # type: ignore[arg-type]  # as given
        answer: pb.SearchRecordsResponse = smq_pb2_grpc.BrokerStub(channel).SearchRecords(request, timeout=PATIENCE_S)
    return answer


def values(answer: pb.SearchRecordsResponse) -> list[bytes]:
    return [record.value for record in answer.records]


def test_a_search_finds_what_was_committed(cluster: Cluster) -> None:
    with filled(cluster) as (name, commit):
        _search_finds_it(cluster, name, commit)


def _search_finds_it(cluster: Cluster, name: str, commit: Callable[[], None]) -> None:
    wanted = pb.RecordFilter(key=b"k")
    whole = search(cluster, name, offset=0, filter=wanted)
    assert values(whole) == [*COMMITTED, b"plain"]
    assert (whole.next_offset, whole.end_offset, whole.cursor) == (OPEN_FROM, OPEN_FROM, b"")
    page = search(cluster, name, offset=1, max_records=2)
    assert (values(page), page.next_offset) == (COMMITTED[:2], 6)
    page = search(cluster, name, cursor=page.cursor, max_records=2)
    assert values(page) == [COMMITTED[2], b"plain"]
    assert values(search(cluster, name, offset=0, end_offset=3)) == []

    # One that waits for a record there is not woken by a record of an open transaction.
    late: list[pb.SearchRecordsResponse] = []
    timeout_ms = int(PATIENCE_S * 1_000)
    waits = {"offset": OPEN_FROM, "max_wait_ms": timeout_ms, "timeout_ms": timeout_ms}
    waiting = threading.Thread(target=lambda: late.append(search(cluster, name, **waits)))
    waiting.start()
    commit()
    waiting.join()
    assert [values(answer) for answer in late] == [[b"open", b"after"]]


@pytest.mark.parametrize("query", ["", "&offset=end", "&offset=1", "&contains=t"], ids=["all", "end", "within", "text"])
def test_the_console_shows_what_was_committed(cluster: Cluster, shown: str, query: str) -> None:
    node = cluster.nodes[cluster.wait_leader(shown, 0)]
    url = f"http://{node.http}/console/topics/{shown}/messages?partition=0{query}"
    with _DIRECT.open(url, timeout=PATIENCE_S) as answer:
        page = answer.read().decode()
    found = [
        value for value in ("aborted", "first", "third", "plain", "open", "after") if f"<pre>{value}</pre>" in page
    ]
    assert found == [value for value in ("first", "third", "plain") if "contains" not in query or "t" in value]
    assert ">Later<" not in page, "nothing can be read after it yet"
