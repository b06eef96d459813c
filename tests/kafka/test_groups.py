"""Consumer groups of real clients: sharing, resuming, static members, evictions, and the death of coordinators."""

import json
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import confluent_kafka
import pytest

from smq.clients import SyncAdmin
from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import TIMEOUT_S, RawKafka
from smq.testing.node_process import CLI, wait_for
from tests.kafka.client_adapters import bootstrap as addresses
from tests.kafka.members import LIBRARIES, ConfluentMember, Place, drive, share

NewTopic = Callable[..., str]
RECORDS = 40  # of each partition
CHURN_S = 60.0  # for 50 members to share a generation each, on a busy machine; a quiet one needs five


def write(bootstrap: str, topic: str, partitions: int, first: int = 0, count: int = RECORDS) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for partition in range(partitions):
        for n in range(first, first + count):
            producer.produce(topic, b"%d" % n, partition=partition)
    assert producer.flush(60) == 0


def places(*topics: tuple[str, int]) -> set[Place]:
    return {(topic, p) for topic, count in topics for p in range(count)}


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Any:
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        yield admin


def generation(admin: SyncAdmin, group: str) -> int:
    return admin.describe_group(f"kafka-cg-{group}").summary.generation


# --------------------------------------------------------------------------------------------- each library
@pytest.mark.parametrize("library", LIBRARIES)
def test_group_shares_commits_and_resumes_at_exactly_the_next_record(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic, admin: SyncAdmin, library: str
) -> None:
    topic, join = new_topic(3), LIBRARIES[library]
    write(bootstrap, topic, 3)
    all_places = places((topic, 3))
    one = join(bootstrap, f"share-{library}", [topic])
    drive("one gets all and reads it", [one], lambda: len(one.seen) >= 3 * RECORDS and one.assigned() == all_places)
    assert sorted(one.seen) == sorted((topic, p, o) for p in range(3) for o in range(RECORDS))
    one.commit()
    two = join(bootstrap, f"share-{library}", [topic])
    drive("a late joiner gets a share", [one, two], lambda: share([one, two], all_places))
    one.seen.clear()
    write(bootstrap, topic, 3, first=RECORDS, count=5)
    drive("the rest is read", [one, two], lambda: len(one.seen) + len(two.seen) >= 15)
    assert sorted(one.seen + two.seen) == sorted((topic, p, RECORDS + o) for p in range(3) for o in range(5))
    one.commit()
    two.commit()
    two.close()
    drive("one gets all again", [one], lambda: one.assigned() == all_places)
    one.close()
    described = admin.describe_group(f"kafka-cg-share-{library}")
    assert (described.summary.state, described.members, described.lag) == ("Empty", (), 0)
    write(bootstrap, topic, 3, first=RECORDS + 5, count=1)
    third = join(bootstrap, f"share-{library}", [topic])
    drive("it resumes", [third], lambda: len(third.seen) >= 3)
    assert sorted(third.seen) == [(topic, p, RECORDS + 5) for p in range(3)]
    third.close()


ASSIGNORS = [
    ("confluent", {"partition.assignment.strategy": "range"}),
    ("confluent", {"partition.assignment.strategy": "roundrobin"}),
    ("confluent", {"partition.assignment.strategy": "cooperative-sticky"}),
    ("kafka-python", {"partition_assignment_strategy": "sticky"}),
]


@pytest.mark.parametrize(
    ("library", "settings"), ASSIGNORS, ids=lambda v: v if isinstance(v, str) else next(iter(v.values()))
)
def test_assignors_share_several_topics_uneven_and_partly_subscribed(
    bootstrap: str, new_topic: NewTopic, library: str, settings: dict[str, Any]
) -> None:
    if library == "kafka-python":
        from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

        settings = {"partition_assignment_strategy": [StickyPartitionAssignor]}
    a, b = new_topic(3), new_topic(2)
    group = f"assign-{a}"
    join = LIBRARIES[library]
    both = [join(bootstrap, group, [a, b], **settings) for _ in range(2)]
    drive("the first two share", both, lambda: all(m.assigned() for m in both))
    only_b = join(bootstrap, group, [b], **settings)
    members = [*both, only_b]

    def is_shared() -> bool:
        held = [m.assigned() for m in members]
        is_complete = set().union(*held) == places((a, 3), (b, 2)) and sum(map(len, held)) == 5
        # The sticky assignor may leave a member without a share if the topics are uneven; the others never do.
        return is_complete and all(topic == b for topic, _ in held[2]) and (library != "confluent" or all(held[:2]))

    drive("all partitions are shared", members, is_shared)
    # kafka-python's leader assigns what it has metadata of, at first that of its own topics, and may never ask for more
    # ("No partition metadata for topic"): there the first two stay: one of them leads, and both know both topics.
    leaver = only_b if library == "kafka-python" else both[0]
    leaver.close()
    members.remove(leaver)
    drive("the others take over", members, lambda: sum(len(m.assigned()) for m in members) == 5)
    for member in members:
        member.close()


def test_static_member_is_back_without_a_rebalance(bootstrap: str, new_topic: NewTopic, admin: SyncAdmin) -> None:
    topic = new_topic(4)
    group = f"static-{topic}"
    one, two = (
        ConfluentMember(bootstrap, group, [topic], **{"group.instance.id": f"i{n}", "session.timeout.ms": 20_000})
        for n in (1, 2)
    )
    drive("both share", [one, two], lambda: share([one, two], places((topic, 4))))
    before, held = generation(admin, group), two.assigned()
    two.close()  # a static member does not leave
    again = ConfluentMember(bootstrap, group, [topic], **{"group.instance.id": "i2", "session.timeout.ms": 20_000})
    drive("it has its partitions again", [one, again], lambda: again.assigned() == held)
    assert generation(admin, group) == before
    assert sorted(m.instance_id or "" for m in admin.describe_group(f"kafka-cg-{group}").members) == ["i1", "i2"]
    one.close()
    again.close()


# --------------------------------------------------------------------------------------------- by raw requests
class RawMember:
    """A member by hand, at the coordinator. `join` waits for its generation."""

    def __init__(self, cluster: Cluster, group: str, session_ms: int = 2_000) -> None:
        self.group, self.session_ms, self.member_id, self.generation = group, session_ms, "", -1
        self.raw = self._connect(cluster)

    def _connect(self, cluster: Cluster) -> RawKafka:
        for node in cluster.alive():
            raw = RawKafka(node.kafka)
            found = raw.call(ApiKey.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=[self.group])["coordinators"][0]
            raw.close()
            if found["error_code"] == KafkaError.NONE:
                return RawKafka(f"{found['host']}:{found['port']}")
        raise AssertionError("no coordinator is known")

    def start_again(self, cluster: Cluster) -> None:
        """As a new member, at the present coordinator."""
        self.raw.close()
        self.member_id, self.raw = "", self._connect(cluster)

    def join(self, version: int = 9, metadata: bytes = b"m") -> KafkaError:
        while True:
            body = self.raw.call(
                ApiKey.JOIN_GROUP,
                version,
                group_id=self.group,
                session_timeout_ms=self.session_ms,
                rebalance_timeout_ms=5_000,
                member_id=self.member_id,
                protocol_type="consumer",
                protocols=[{"name": "range", "metadata": metadata}],
            )
            code = KafkaError(body["error_code"])
            if code is KafkaError.MEMBER_ID_REQUIRED:
                self.member_id = body["member_id"]
                continue
            if code is KafkaError.NONE:
                self.member_id, self.generation = body["member_id"], body["generation_id"]
                self.leads = body["leader"] == self.member_id
                self.all_ids = [m["member_id"] for m in body["members"]]
            return code

    def sync(self, version: int = 5, assignment: bytes = b"a") -> tuple[KafkaError, bytes]:
        given = [{"member_id": m, "assignment": assignment} for m in self.all_ids] if self.leads else []
        fields = {"protocol_type": "consumer", "protocol_name": "range"} if version >= 5 else {}
        body = self.call(ApiKey.SYNC_GROUP, version, assignments=given, **fields)
        return KafkaError(body["error_code"]), bytes(body["assignment"])

    def call(self, key: ApiKey, version: int, **fields: Any) -> Any:
        fields = {"group_id": self.group, "generation_id": self.generation, "member_id": self.member_id} | fields
        return self.raw.call(key, version, **fields)

    def beat(self, version: int = 4) -> KafkaError:
        return KafkaError(self.call(ApiKey.HEARTBEAT, version)["error_code"])

    def leave(self, version: int = 5) -> KafkaError:
        if version < 3:
            return KafkaError(self.call(ApiKey.LEAVE_GROUP, version)["error_code"])
        body = self.call(ApiKey.LEAVE_GROUP, version, members=[{"member_id": self.member_id}])
        return KafkaError(body["error_code"] or body["members"][0]["error_code"])

    def commit(self, topic: str, offset: int, version: int = 8, **fields: Any) -> KafkaError:
        requested = [{"partition_index": 0, "committed_offset": offset, "committed_metadata": None}]
        body = self.call(
            ApiKey.OFFSET_COMMIT,
            version,
            topics=[{"name": topic, "partitions": requested}],
            **{"generation_id_or_member_epoch": self.generation} | fields,
        )
        return KafkaError(body["topics"][0]["partitions"][0]["error_code"])


def subscription(topic: str) -> bytes:
    """As consumers encode theirs: version, topics, no user data."""
    return b"\0\0" + b"\0\0\0\1" + len(topic).to_bytes(2, "big") + topic.encode() + b"\xff" * 4


@pytest.mark.parametrize("version", range(10))
def test_every_version_of_the_group_keys_is_served(cluster: Cluster, new_topic: NewTopic, version: int) -> None:
    def of(key: ApiKey) -> int:
        return max(SERVED[key].versions.lo, min(version, SERVED[key].versions.hi))

    topic = new_topic()
    member = RawMember(cluster, f"versions-{version}", session_ms=30_000)
    assert member.join(of(ApiKey.JOIN_GROUP)) is KafkaError.NONE
    assert member.sync(of(ApiKey.SYNC_GROUP)) == (KafkaError.NONE, b"a")
    assert member.beat(of(ApiKey.HEARTBEAT)) is KafkaError.NONE
    assert member.commit(topic, 7, version=of(ApiKey.OFFSET_COMMIT)) is KafkaError.NONE
    described = member.raw.call(ApiKey.DESCRIBE_GROUPS, of(ApiKey.DESCRIBE_GROUPS), groups=[member.group, "unknown"])
    found, missing = described["groups"]
    assert (found["group_state"], found["protocol_data"], len(found["members"])) == ("Stable", "range", 1)
    assert found["members"][0]["client_host"] == "/127.0.0.1"
    assert missing["group_state"] in ("Dead", "")
    listed = member.raw.call(ApiKey.LIST_GROUPS, of(ApiKey.LIST_GROUPS), states_filter=["stable"], types_filter=[])
    assert member.group in {g["group_id"] for g in listed["groups"]}
    delete = of(ApiKey.DELETE_GROUPS)
    refused = member.raw.call(ApiKey.DELETE_GROUPS, delete, groups_names=[member.group])["results"][0]
    assert refused["error_code"] == KafkaError.NON_EMPTY_GROUP
    assert member.leave(of(ApiKey.LEAVE_GROUP)) is KafkaError.NONE
    gone = member.raw.call(ApiKey.DELETE_GROUPS, delete, groups_names=[member.group])["results"][0]
    assert gone["error_code"] == KafkaError.NONE
    member.raw.close()


def test_errors_are_kafkas_own(cluster: Cluster, new_topic: NewTopic) -> None:
    topic, other = new_topic(), new_topic()
    member = RawMember(cluster, f"errors-{topic}", session_ms=30_000)
    assert member.join(metadata=subscription(topic)) is KafkaError.NONE
    assert member.commit(topic, 1) is KafkaError.REBALANCE_IN_PROGRESS
    member.sync()
    assert member.commit(topic, 1, generation_id_or_member_epoch=9) is KafkaError.ILLEGAL_GENERATION
    assert member.commit(topic, 1, member_id="ghost") is KafkaError.UNKNOWN_MEMBER_ID
    assert member.commit(topic, 1, member_id="", generation_id_or_member_epoch=-1) is KafkaError.UNKNOWN_MEMBER_ID
    assert member.commit(topic, 1, group_instance_id="i") is KafkaError.UNKNOWN_MEMBER_ID
    assert member.commit(topic, 1) is KafkaError.NONE
    assert member.commit(other, 1) is KafkaError.NONE
    assert member.call(ApiKey.HEARTBEAT, 4, generation_id=9)["error_code"] == KafkaError.ILLEGAL_GENERATION
    assert member.call(ApiKey.HEARTBEAT, 4, group_id="")["error_code"] == KafkaError.INVALID_GROUP_ID
    requested = [{"name": t, "partitions": [{"partition_index": 0}]} for t in (topic, other, "no-such-topic")]
    deleted = member.raw.call(ApiKey.OFFSET_DELETE, 0, group_id=member.group, topics=requested)
    assert [t["partitions"][0]["error_code"] for t in deleted["topics"]] == [
        KafkaError.GROUP_SUBSCRIBED_TO_TOPIC,
        KafkaError.NONE,
        KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    elsewhere = next(n for n in cluster.nodes.values() if not n.kafka.endswith(str(member.raw.socket.getpeername()[1])))
    stranger = RawKafka(elsewhere.kafka)
    beat = stranger.call(ApiKey.HEARTBEAT, 4, group_id=member.group, generation_id=1, member_id=member.member_id)
    assert beat["error_code"] == KafkaError.NOT_COORDINATOR
    stranger.close()
    member.leave()
    member.raw.close()


def test_member_that_goes_silent_is_evicted_and_the_survivor_gets_its_share(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic
) -> None:
    topic = new_topic(2)
    survivor = ConfluentMember(bootstrap, f"silent-{topic}", [topic], **{"partition.assignment.strategy": "range"})
    drive("one gets all", [survivor], lambda: survivor.assigned() == places((topic, 2)))
    silent = RawMember(cluster, f"silent-{topic}", session_ms=5_000)
    codes: list[KafkaError] = []
    joined = threading.Thread(target=lambda: codes.append(silent.join(metadata=subscription(topic))))
    joined.start()
    drive("the other has joined", [survivor], lambda: not joined.is_alive())
    assert codes == [KafkaError.NONE]
    drive("the other has a share", [survivor], lambda: len(survivor.assigned()) == 1)
    silent.raw.close()
    drive("the survivor has all again", [survivor], lambda: survivor.assigned() == places((topic, 2)))
    survivor.close()


def test_churn_of_50_members_leaves_nothing_behind(cluster: Cluster, admin: SyncAdmin) -> None:
    """They come, share a generation, and go: some by leaving, some by closing the connection, some by silence."""
    members = [RawMember(cluster, "churn", session_ms=1_500) for _ in range(50)]
    seen: set[int] = set()  # those that have shared a generation
    until = time.monotonic() + CHURN_S

    def share_one(n: int) -> None:
        """Once it is seen, a member stays until all are, or until its generation ends. Every fifth is silent. (It must
        not stay first: the last generation does not end by itself.)"""
        member = members[n]
        if member.join() is not KafkaError.NONE:
            raise ConnectionError("another id, perhaps another coordinator")
        if member.sync()[0] is KafkaError.NONE:
            seen.add(n)
        while n % 5 and len(seen) < 50 and time.monotonic() < until and member.beat() is KafkaError.NONE:
            time.sleep(0.05)

    def live(n: int) -> None:
        member, shared = members[n], 0
        while (shared < 4 or n not in seen) and time.monotonic() < until:
            try:
                share_one(n)
                shared += 1
            except OSError:  # a time-out of the connection, too
                time.sleep(0.05)
                member.start_again(cluster)
        if n % 3 == 0:
            member.leave()
        member.raw.close()

    threads = [threading.Thread(target=live, args=(n,), daemon=True) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + 3 * TIMEOUT_S - time.monotonic()))  # the last requests may have to time out
    assert seen == set(range(50))

    def is_empty() -> bool:
        return [(g.state, g.members) for g in admin.list_groups() if g.name == "kafka-cg-churn"] == [("Empty", 0)]

    wait_for("the group is empty after its last member", is_empty)


# --------------------------------------------------------------------------------------------- the command line
def test_command_line_shows_and_deletes_groups(cluster: Cluster, bootstrap: str, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    write(bootstrap, topic, 2)
    group = f"kafka-cg-cli-{topic}"
    member = ConfluentMember(bootstrap, f"cli-{topic}", [topic])
    drive("it has joined", [member], lambda: len(member.assigned()) == 2)

    def smq(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*CLI, "group", *arguments, "--bootstrap", cluster.nodes[2].grpc]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    found = json.loads(smq("describe", group, "--json").stdout)
    assert {(p["partition"], p["offset"], p["lag"]) for p in found["positions"]} == {
        (0, None, RECORDS),
        (1, None, RECORDS),
    }
    assert [sorted(map(tuple, m["partitions"])) for m in found["members"]] == [[(topic, 0), (topic, 1)]]
    text = smq("describe", group).stdout
    assert "Stable, generation " in text
    refused = smq("delete", group)
    assert refused.returncode != 0
    assert "GROUP_NOT_EMPTY" in refused.stderr
    member.close()
    cluster.nodes[1].raw.commit(group, topic, 0, 10)
    cluster.nodes[1].raw.commit(group, topic, 1, RECORDS + 5)  # beyond the end: no negative lag
    lags = {p["partition"]: p["lag"] for p in json.loads(smq("describe", group, "--json").stdout)["positions"]}
    assert lags == {0: RECORDS - 10, 1: 0}
    assert group in smq("list").stdout
    assert smq("delete", group).returncode == 0
    assert "UNKNOWN_GROUP" in smq("describe", group).stderr


def test_commit_without_a_member_is_refused_while_the_group_has_members(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic
) -> None:
    topic = new_topic()
    member = ConfluentMember(bootstrap, f"held-{topic}", [topic])
    drive("it has joined", [member], lambda: bool(member.assigned()))
    with pytest.raises(SmqError) as refused:
        cluster.nodes[1].raw.commit(f"kafka-cg-held-{topic}", topic, 0, 3)
    assert refused.value.code is ErrorCode.UNKNOWN_MEMBER
    member.close()


# --------------------------------------------------------------------------------------------- nodes that die
def test_killed_coordinators_cause_no_rebalance_and_lose_no_commit(fault_cluster: Cluster) -> None:
    """Every node is killed in turn, the coordinator first, while two members read, commit and stay."""
    cluster, topic = fault_cluster, fault_cluster.make_topic(4)
    group = f"kept-{topic}"
    boot = addresses(cluster)
    write(boot, topic, 4)
    settings = {"session.timeout.ms": 15_000}
    one, two = ConfluentMember(boot, group, [topic], **settings), ConfluentMember(boot, group, [topic], **settings)
    drive("both share", [one, two], lambda: share([one, two], places((topic, 4))))
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        described = admin.describe_group(f"kafka-cg-{group}")
        before, first = described.summary.generation, described.coordinator or 1
        for number, node in enumerate([first, *(n for n in cluster.nodes if n != first)], 1):
            cluster.kill(node)
            cluster.restart(node, wait=False)
            write(boot, topic, 4, first=number * RECORDS, count=5)
            for member in (one, two):
                drive(f"a commit in round {number}", [member], partial(_reads_on_and_commits, member, len(member.seen)))
            cluster.wait_ready()
            for (_, partition), offset in (one.committed | two.committed).items():
                for at in cluster.nodes.values():
                    assert (at.raw.committed(f"kafka-cg-{group}", topic, partition) or 0) >= offset
        end = RECORDS + 5 * len(cluster.nodes)
        drive("all is read", [one, two], lambda: _is_read_up([one, two], admin, group, [end] * 4))
        assert {*one.seen, *two.seen} == {(topic, p, offset) for p in range(4) for offset in range(end)}
        after = admin.describe_group(f"kafka-cg-{group}")
        assert (after.summary.generation, len(after.members)) == (before, 2)
    assert one.assigned() | two.assigned() == places((topic, 4))
    one.close()
    two.close()


def _reads_on_and_commits(member: ConfluentMember, seen: int) -> bool:
    """False if it has not happened yet, whatever the nodes go through: try again."""
    return len(member.seen) > seen and _commits(member)


def _commits(member: ConfluentMember) -> bool:
    try:
        member.commit()
    except confluent_kafka.KafkaException:
        return False  # nothing is new, or no node answers
    return True


def _is_read_up(members: list[ConfluentMember], admin: SyncAdmin, group: str, ends: list[int]) -> bool:
    for member in members:
        _commits(member)
    return [at.offset for at in admin.describe_group(f"kafka-cg-{group}").positions] == ends
