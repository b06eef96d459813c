"""Groups with members of smq's own client: alone, mixed with Kafka's, and through the death of members and nodes."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import pytest

from smq.clients import SmqError, SyncAdmin, SyncProducer
from smq.testing.cluster import Cluster
from smq.testing.node_process import CLI, wait_for
from tests.kafka.client_adapters import bootstrap as addresses
from tests.kafka.members import LIBRARIES, Member, SmqMember, drive, share
from tests.kafka.test_groups import RECORDS, places, write

NewTopic = Callable[..., str]
PARTITIONS = 6


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[SyncAdmin]:
    with SyncAdmin(cluster.servers) as admin:
        yield admin


def generation(admin: SyncAdmin, group: str) -> int:
    return admin.describe_group(f"kafka-cg-{group}").summary.generation


def all_of(topic: str, end: int, partitions: int = PARTITIONS) -> set[tuple[str, int, int]]:
    return {(topic, p, offset) for p in range(partitions) for offset in range(end)}


# ------------------------------------------------------------------------------------------- mixed with Kafka's
MIXES: list[tuple[str, dict[str, Any], str]] = [
    ("confluent", {"partition.assignment.strategy": "range"}, "range"),
    ("confluent", {"partition.assignment.strategy": "cooperative-sticky"}, "cooperative-sticky"),
    ("kafka-python", {}, "range"),
    ("aiokafka", {}, "roundrobin"),
]


@pytest.mark.parametrize("is_first", [True, False], ids=["smq leads", "the other leads"])
@pytest.mark.parametrize(("library", "settings", "assignor"), MIXES, ids=[f"{m[0]}-{m[2]}" for m in MIXES])
def test_members_of_both_ports_share_a_group_and_lose_no_record(
    cluster: Cluster,
    bootstrap: str,
    new_topic: NewTopic,
    admin: SyncAdmin,
    library: str,
    settings: dict[str, Any],
    assignor: str,
    is_first: bool,
) -> None:
    topic = new_topic(PARTITIONS)
    group = f"mixed-{topic}"
    write(bootstrap, topic, PARTITIONS)

    def native() -> Member:
        return SmqMember(cluster.servers, group, [topic], assignors=[assignor])

    def foreign() -> Member:
        return LIBRARIES[library](bootstrap, group, [topic], **settings)

    one, two = (made() for made in ((native, foreign) if is_first else (foreign, native)))
    members = [one, two]
    drive("both share", members, lambda: share(members, places((topic, PARTITIONS))))
    assert admin.describe_group(f"kafka-cg-{group}").protocol == assignor
    write(bootstrap, topic, PARTITIONS, first=RECORDS, count=1)
    new = all_of(topic, RECORDS + 1) - all_of(topic, RECORDS)
    drive("all is read", members, lambda: {*one.seen, *two.seen} >= all_of(topic, RECORDS + 1))
    assert all(new & {*m.seen} == {at for at in new if at[:2] in m.assigned()} for m in members)  # by its owner
    one.commit()
    two.commit()
    one.seen.clear()
    two.seen.clear()
    one.close()
    drive("the other takes over", [two], lambda: two.assigned() == places((topic, PARTITIONS)))
    write(bootstrap, topic, PARTITIONS, first=RECORDS + 1, count=2)
    new = all_of(topic, RECORDS + 3) - all_of(topic, RECORDS + 1)
    drive("it reads on from the commits of both", [two], lambda: {*two.seen} >= new)
    assert sorted(two.seen) == sorted(new)  # every commit of both was kept: nothing is read again
    two.commit()
    two.close()
    assert admin.describe_group(f"kafka-cg-{group}").lag == 0


# ----------------------------------------------------------------------------------------------- members that end
def test_static_member_is_back_without_a_rebalance(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic, admin: SyncAdmin
) -> None:
    topic = new_topic(PARTITIONS)
    group = f"static-{topic}"
    one, two = (SmqMember(cluster.servers, group, [topic], group_instance_id=f"i{n}") for n in (1, 2))
    drive("both share", [one, two], lambda: share([one, two], places((topic, PARTITIONS))))
    before, held = generation(admin, group), two.assigned()
    two.close()
    again = SmqMember(cluster.servers, group, [topic], group_instance_id="i2")
    drive("it has its partitions again", [one, again], lambda: again.assigned() == held)
    assert generation(admin, group) == before
    assert sorted(m.instance_id or "" for m in admin.describe_group(f"kafka-cg-{group}").members) == ["i1", "i2"]
    one.close()
    again.close()


MEMBER = """
import sys
from smq.clients import SmqError, SyncConsumer

servers, group, topic = sys.argv[1:]
consumer = SyncConsumer(servers, group="kafka-cg-" + group, session_timeout_ms=2_000, heartbeat_interval_ms=200)
consumer.subscribe(topic, on_assigned=lambda ps: print("assigned", len(ps), flush=True))
while True:
    if consumer.getmany(timeout_ms=100):
        print("read", flush=True)
        input()  # it hangs in its processing, and then commits
        try:
            consumer.commit()
        except SmqError as e:
            print(e.code.name, flush=True)
            break
"""


def test_member_that_is_killed_is_replaced_and_one_that_freezes_cannot_commit(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic
) -> None:
    topic = new_topic(PARTITIONS)
    group = f"dies-{topic}"
    survivor = SmqMember(cluster.servers, group, [topic])
    drive("one has all", [survivor], lambda: survivor.assigned() == places((topic, PARTITIONS)))

    def join() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", MEMBER, cluster.servers, group, topic]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        drive("the other has a share", [survivor], lambda: len(survivor.assigned()) == PARTITIONS // 2)
        assert other.stdout is not None
        assert other.stdout.readline() == b"assigned 3\n"
        return other

    killed = join()
    killed.send_signal(SIGKILL)
    killed.communicate()
    drive("the survivor has all", [survivor], lambda: survivor.assigned() == places((topic, PARTITIONS)))
    frozen = join()
    write(bootstrap, topic, PARTITIONS, count=1)
    assert frozen.stdout is not None
    assert frozen.stdout.readline() == b"read\n"
    frozen.send_signal(SIGSTOP)
    drive("the survivor has all again", [survivor], lambda: survivor.assigned() == places((topic, PARTITIONS)))
    drive("it has read what the other did not commit", [survivor], lambda: {*survivor.seen} >= all_of(topic, 1))
    survivor.commit()
    frozen.send_signal(SIGCONT)
    out, _ = frozen.communicate(b"\n", timeout=60)
    assert out == b"UNKNOWN_MEMBER\n"
    survivor.close()


# ------------------------------------------------------------------------------------------------- nodes that die
def test_killed_coordinators_cause_no_rebalance_and_lose_no_commit(fault_cluster: Cluster) -> None:
    """Every node is killed in turn, the coordinator first, while two members read, commit and stay."""
    cluster, topic = fault_cluster, fault_cluster.make_topic(PARTITIONS)
    group = f"kept-{topic}"
    one, two = (SmqMember(cluster.servers, group, [topic], session_timeout_ms=15_000) for _ in range(2))
    drive("both share", [one, two], lambda: share([one, two], places((topic, PARTITIONS))))
    write(addresses(cluster), topic, PARTITIONS)
    with SyncAdmin(cluster.servers) as admin:
        described = admin.describe_group(f"kafka-cg-{group}")
        before, first = described.summary.generation, described.coordinator or 1
        for number, node in enumerate([first, *(n for n in cluster.nodes if n != first)], 1):
            cluster.kill(node)
            cluster.restart(node, wait=False)
            write(addresses(cluster), topic, PARTITIONS, first=RECORDS + 5 * (number - 1), count=5)
            for member in (one, two):
                what = f"a commit in round {number}"
                drive(what, [member], partial(reads_on_and_commits, member, len(member.seen)))
            cluster.wait_ready()
        end = RECORDS + 5 * len(cluster.nodes)
        drive("all is read", [one, two], lambda: {*one.seen, *two.seen} == all_of(topic, end))
        one.commit()
        two.commit()
        after = admin.describe_group(f"kafka-cg-{group}")
        assert (after.summary.generation, len(after.members), after.lag) == (before, 2, 0)
        assert len(one.seen) + len(two.seen) == PARTITIONS * end  # and nothing twice
    one.close()
    two.close()


def reads_on_and_commits(member: SmqMember, seen: int) -> bool:
    """False if it has not happened yet, whatever the nodes go through: try again."""
    if len(member.seen) <= seen:
        return False
    try:
        member.commit()
    except SmqError as e:
        if not e.code.is_retriable:
            raise
        return False
    return True


# ------------------------------------------------------------------------------------------------ the command line
def test_two_followers_share_a_topic_and_commit_as_they_end(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic, admin: SyncAdmin, tmp_path: Path
) -> None:
    topic = new_topic(2)
    group = f"followers-{topic}"
    options = ["--commit", "--output", "%p %o", "--bootstrap", cluster.servers]
    command = [*CLI, "consume", topic, "-f", "-g", group, *options]
    outputs = [tmp_path / "one", tmp_path / "two"]

    def owners() -> list[int]:
        try:
            return sorted(len(m.partitions) for m in admin.describe_group(group).members)
        except SmqError:
            return []  # no member has joined yet

    both = []
    for output in outputs:
        with output.open("wb") as out:
            both.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
    wait_for("each has a partition", lambda: owners() == [1, 1])
    write(bootstrap, topic, 2, count=3)
    lines = [[f"{p} {offset}" for offset in range(3)] for p in range(2)]
    wait_for("each writes its own", lambda: sorted(o.read_text().splitlines() for o in outputs) == lines)
    for process in both:
        process.send_signal(SIGTERM)
        assert process.wait(60) == 0
    assert sorted(o.read_text().splitlines() for o in outputs) == lines
    described = admin.describe_group(group)
    assert (described.members, described.lag) == ((), 0)


def test_a_follower_passes_over_what_its_filter_does_not_want(
    cluster: Cluster, new_topic: NewTopic, admin: SyncAdmin, tmp_path: Path
) -> None:
    """A member filters what it fetches, with the meaning that a search has."""
    topic, both, one = new_topic(1), [("a", b"1"), ("a", b"2")], [("a", b"2")]
    group, output = f"followers-{topic}", tmp_path / "output"
    options = ["--key-prefix", "k", "--header", "a=1", "--header", "a=2", "--output", "%v"]
    records = [(b"k1", b"first", both), (b"k2", b"one", one), (b"x", b"other", both), (b"k", b"last", both)]
    with SyncProducer(cluster.servers) as producer:
        for key, value, headers in records:
            producer.send(topic, value, key, headers, partition=0).result()
    with output.open("wb") as out:
        command = [*CLI, "consume", topic, "-f", "-g", group, "--commit", *options, "-n", "2"]
        ended = subprocess.run([*command, "--bootstrap", cluster.servers], stdout=out, timeout=60, check=False)
    assert (ended.returncode, output.read_text().splitlines()) == (0, ["first", "last"])
    described = admin.describe_group(group)
    assert (described.members, described.lag) == ((), 0)
