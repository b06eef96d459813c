"""Consumer groups of KIP-848 with a real client: librdkafka with `group.protocol=consumer`."""

from functools import partial
from typing import Any

import pytest
from confluent_kafka import admin as kafka_admin

from smq.clients import SyncAdmin
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import TIMEOUT_S
from tests.kafka.client_adapters import bootstrap as addresses
from tests.kafka.members import ConfluentMember, Member, Place, drive, share
from tests.kafka.test_groups import RECORDS, NewTopic, generation, places, write

SESSION, HEARTBEAT = "group.consumer.session.timeout.ms", "group.consumer.heartbeat.interval.ms"


@pytest.fixture(scope="module", autouse=True)
def _quick_sessions(cluster: Cluster) -> None:
    quicken(cluster)


def quicken(cluster: Cluster, session_ms: int = 6_000) -> None:
    """Short sessions and frequent heartbeats: here the coordinator sets them, not the member."""
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        admin.alter_cluster_config(set={SESSION: str(session_ms), HEARTBEAT: "300"})


def join(bootstrap: str, group: str, topics: list[str], **settings: Any) -> Member:
    return ConfluentMember(bootstrap, group, topics, **{"group.protocol": "consumer", **settings})


@pytest.mark.parametrize("assignor", ["uniform", "range"])
def test_members_share_resume_and_leave(bootstrap: str, new_topic: NewTopic, assignor: str) -> None:
    topic = new_topic(6)
    group, everything = f"server-{topic}", places((topic, 6))
    write(bootstrap, topic, 6)
    settings = {"group.remote.assignor": assignor}
    one = join(bootstrap, group, [topic], **settings)
    drive("one gets all and reads it", [one], lambda: len(one.seen) >= 6 * RECORDS and one.assigned() == everything)
    one.commit()
    members = [one, *(join(bootstrap, group, [topic], **settings) for _ in range(2))]
    drive("late joiners get shares", members, lambda: share(members, everything))
    for member in members:
        member.seen.clear()
    write(bootstrap, topic, 6, first=RECORDS, count=5)
    drive("the rest is read once", members, lambda: sum(len(m.seen) for m in members) >= 30)
    seen = [read for m in members for read in m.seen]
    assert sorted(seen) == sorted((topic, p, RECORDS + o) for p in range(6) for o in range(5))
    for member in members:
        member.commit()
    assert described(bootstrap, group) == ("CONSUMER", "STABLE", 3)
    members.pop().close()
    drive("the others take over from one that left", members, lambda: share(members, everything))
    members.pop().close()
    drive("one has all again", members, lambda: members[0].assigned() == everything)
    members[0].close()


def described(bootstrap: str, group: str) -> tuple[str, str, int]:
    client = kafka_admin.AdminClient({"bootstrap.servers": bootstrap})
    found = client.describe_consumer_groups([group])[group].result(TIMEOUT_S)
    return found.type.name, found.state.name, len(found.members)


def test_a_pattern_finds_topics_that_come_later(cluster: Cluster, bootstrap: str, new_topic: NewTopic) -> None:
    first = new_topic(2)
    stem = f"late-{first}"
    member = join(bootstrap, f"pattern-{first}", [f"^{stem}-.*"], **{"topic.metadata.refresh.interval.ms": 1_000})
    drive("nothing matches yet", [member], lambda: not member.assigned())
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        admin.create_topic(f"{stem}-a", partitions=2)
    drive("it is found", [member], lambda: member.assigned() == places((f"{stem}-a", 2)))
    member.close()


def test_killed_coordinators_cause_no_rebalance(fault_cluster: Cluster) -> None:
    """Every node is killed in turn, the coordinator first, while two members read, commit and stay."""
    cluster, topic = fault_cluster, fault_cluster.make_topic(4)
    quicken(cluster, session_ms=20_000)  # librdkafka may wait for 10 s before it connects again
    boot, group = addresses(cluster), f"survivors-{topic}"
    write(boot, topic, 4)
    members = [join(boot, group, [topic]) for _ in range(2)]
    drive("they share", members, lambda: share(members, places((topic, 4))))
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        before, held = generation(admin, group), [m.assigned() for m in members]
        first = admin.describe_group(f"kafka-cg-{group}").coordinator or 1
        for number, node in enumerate([first, *(n for n in cluster.nodes if n != first)], 1):
            cluster.kill(node)
            cluster.restart(node, wait=False)
            write(boot, topic, 4, first=number * RECORDS)
            wanted = 4 * RECORDS * (number + 1)
            drive("they read on", members, partial(_have_read, members, wanted))
            cluster.wait_ready()
        assert (generation(admin, group), [m.assigned() for m in members]) == (before, held)
    for member in members:
        member.commit()
    for member in members:
        member.close()


def _have_read(members: list[Member], count: int) -> bool:
    return len({read for m in members for read in m.seen}) >= count


def test_a_static_member_that_restarts_has_its_partitions_again(
    bootstrap: str, new_topic: NewTopic, cluster: Cluster
) -> None:
    topic = new_topic(4)
    group, settings = f"static-{topic}", {"group.instance.id": "one"}
    members = [join(bootstrap, group, [topic], **settings), join(bootstrap, group, [topic])]
    drive("they share", members, lambda: share(members, places((topic, 4))))
    held: set[Place] = members[0].assigned()
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        before = generation(admin, group)
        members[0].close()
        members[0] = join(bootstrap, group, [topic], **settings)
        drive("it is back", members, lambda: members[0].assigned() == held)
        assert generation(admin, group) == before
    for member in members:
        member.close()
