"""Searches and ends on three real nodes: from any replica, and on to the next page after the death of a node."""

from smq.clients import RecordFilter, SyncConsumer, SyncProducer
from smq.testing.cluster import Cluster

COUNT = 3_000
WANTED = RecordFilter(key_prefix=b"k7", headers={"parity": b"odd"})
EXPECTED = [n for n in range(COUNT) if str(n).startswith("7") and n % 2]


def _servers(cluster: Cluster) -> list[str]:
    return [node.grpc for node in cluster.nodes.values()]


def _fill(cluster: Cluster) -> str:
    topic = cluster.make_topic()
    with SyncProducer(_servers(cluster), compression="zstd") as producer:
        sent = [
            producer.send(topic, b"v" * 50, b"k%d" % n, [("parity", b"odd" if n % 2 else b"even")], partition=0)
            for n in range(COUNT)
        ]
        assert [future.result().offset for future in sent] == list(range(COUNT))
    return topic


def test_every_replica_finds_the_same_records(cluster: Cluster) -> None:
    topic = _fill(cluster)
    for node in cluster.nodes:
        with SyncConsumer(_servers(cluster), from_replica=node) as consumer:
            assert [record.offset for record in consumer.search(topic, 0, WANTED)] == EXPECTED


def test_a_search_goes_on_at_another_node(fault_cluster: Cluster) -> None:
    topic = _fill(fault_cluster)
    with SyncConsumer(_servers(fault_cluster)) as consumer:
        page = consumer.search_page(topic, 0, WANTED, max_records=100)
        found = [record.offset for record in page.records]
        fault_cluster.kill(fault_cluster.wait_leader(topic, 0))
        while page.cursor is not None:
            page = consumer.search_page(topic, 0, WANTED, cursor=page.cursor, max_records=100)
            found += [record.offset for record in page.records]
    assert found == EXPECTED


def test_iteration_stops_at_the_present_end_although_a_leader_dies(fault_cluster: Cluster) -> None:
    topic = _fill(fault_cluster)
    with SyncConsumer(_servers(fault_cluster), partition_max_bytes=10_000) as consumer:
        consumer.assign([(topic, 0)], end_offset="latest")
        records = iter(consumer)
        found = [next(records).offset for _ in range(100)]
        fault_cluster.kill(fault_cluster.wait_leader(topic, 0))
        found += [record.offset for record in records]
    assert found == list(range(COUNT))


def test_a_search_follows_what_is_written(cluster: Cluster) -> None:
    topic = _fill(cluster)
    servers = _servers(cluster)
    with SyncConsumer(servers, request_timeout_ms=2_000) as consumer, SyncProducer(servers) as producer:
        following = consumer.search(
            topic, 0, RecordFilter(key=b"new"), start=COUNT - 1, end_offset=COUNT + 2, follow=True
        )
        for number in range(2):
            producer.send(topic, b"v", b"new", partition=0).result()
            assert next(following).offset == COUNT + number
        assert list(following) == []
