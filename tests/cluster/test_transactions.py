"""Transactions of the Python producer on three nodes: consume-transform-produce once, through the deaths of nodes."""

import contextlib

import pytest
from click.testing import CliRunner

from smq.clients import InvalidTransactionState, SmqError, SyncAdmin, SyncConsumer, SyncProducer
from smq.coordinator.cli.root import cli
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.pages import claimed

ROUNDS = 24


def read(cluster: Cluster, topic: str) -> list[bytes | None]:
    with SyncConsumer(cluster.servers) as consumer:
        consumer.assign(topic, end_offset="latest")
        return [record.value for record in consumer]


@pytest.mark.timeout(300)
def test_each_input_is_transformed_once_through_kills(fault_cluster: Cluster) -> None:
    """Of the leader of an output, and of whichever node comes next."""
    source, target = fault_cluster.make_topic(), fault_cluster.make_topic(3)
    with SyncProducer(fault_cluster.servers) as plain:
        plain.send_many(source, [b"%d" % n for n in range(2 * ROUNDS)])
    down, aborted = 0, 0
    with (
        SyncProducer(fault_cluster.servers, transactional_id=f"copy of {source}") as producer,
        SyncConsumer(fault_cluster.servers, group=f"group of {source}") as consumer,
    ):
        round_ = position = 0
        while position < 2 * ROUNDS:
            round_ += 1
            consumer.assign([(source, 0)], position)
            record = next(iter(consumer))
            producer.begin()
            try:
                producer.send(target, b"copy of %s" % (record.value or b""), partition=round_ % 3)
                if round_ in (8, 16):
                    down = fault_cluster.wait_leader(target, 0) if round_ == 8 else down % 3 + 1
                    fault_cluster.kill(down)
                elif round_ in (12, 20):
                    fault_cluster.restart(down)
                producer.send_offsets(f"group of {source}", {(source, 0): record.offset + 1})
                if round_ % 5 == 0:
                    aborted += 1
                    producer.abort()
                    continue
                producer.commit()
            except SmqError:
                try:
                    producer.abort()
                    continue
                except InvalidTransactionState:
                    pass  # the commit had no answer, and was made
            position = record.offset + 1
    assert aborted
    expected = sorted(b"copy of %d" % n for n in range(2 * ROUNDS))
    wait_for("readers get every copy", lambda: sorted(v or b"" for v in read(fault_cluster, target)) == expected, 60)
    with SyncConsumer(fault_cluster.servers, group=f"group of {source}") as consumer:
        consumer.assign(source, "RESUME_OR_EARLIEST", end_offset="latest")
        assert list(consumer) == [], "the group is at the end"


def test_a_reader_of_the_command_line_commits_past_the_ends_of_transactions(cluster: Cluster) -> None:
    """It committed 1 more than the last record that it wrote, and was behind for ever: here 1, of 4."""
    topic, partitions = cluster.make_topic(4), range(4)
    with SyncProducer(cluster.servers, transactional_id=f"aborts in {topic}") as producer:
        with producer.transaction():
            producer.send(topic, b"kept", partition=0)
        with contextlib.suppress(ZeroDivisionError), producer.transaction():
            producer.send(topic, b"dropped", partition=0).result()
            raise ZeroDivisionError
    arguments = ["consume", topic, "--group", topic, "--commit"]
    for options, expected in ((["-n", "1"], {0: 1, 1: 0, 2: 0, 3: 0}), ([], {0: 4, 1: 0, 2: 0, 3: 0})):
        done = CliRunner(env={"SMQ_BOOTSTRAP": cluster.servers}).invoke(cli, [*arguments, *options])
        assert done.exit_code == 0, done.output
        with SyncAdmin(cluster.servers) as admin:
            found = admin.fetch_offsets(topic, [(topic, p) for p in partitions])
        assert {p: found[topic, p].offset for p in partitions} == expected


def test_the_block_of_the_clients_page_copies_each_record_once(cluster: Cluster) -> None:
    [block] = claimed("docs/clients.md", __file__)
    block = block.replace("127.0.0.1:7401", cluster.servers)
    with SyncAdmin(cluster.servers) as admin:
        for topic in ("events", "copies"):
            admin.create_topic(topic, 1)
    with SyncProducer(cluster.servers) as producer:
        producer.send_many("events", [b"one", b"two"])
    for _ in range(2):  # the second run goes on where the first has committed
        exec(compile(block, "docs/clients.md", "exec"), {})
    assert read(cluster, "copies") == [b"one", b"two"]
