"""The keys that administrators' tools call, over a node of which the test decides everything: pages, bounds, pace."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.kafka.api_keys import ApiKey, request_message, response_encoder
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.group_membership import Client
from smq.coordinator.kafka.handlers import HANDLERS, LONG_POLLS
from smq.coordinator.kafka.tools import active_producers, leader_election, topic_partitions
from smq.coordinator.limits import MIB
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.settings import Settings
from smq.raft_state.commands import Command, FenceNode
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import (
    DiskId,
    Epoch,
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
    ProducerEpoch,
    ProducerId,
    Sequence,
    Term,
    TopicId,
    TsNs,
)
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Rejected, Reply
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import ActiveProducer, DoneFn, NodeApi, ReplicaStatus
from smq.replication.ports import Quorum, QuorumReplica
from smq.testing.kafka_client import _filled
from tests.unit.raft_state.support import topic as created
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, register

NO_QUORUM = SmqError(ErrorCode.NO_QUORUM, "no majority")


class Node:
    """Node 1 of three. A requested hand-over happens after `hand_over_s`, if ever."""

    def __init__(self) -> None:
        self.node_id = ME
        self.machine = Machine()
        self.index = 0
        self.failure: SmqError | None = None
        self.described: Quorum | SmqError = NO_QUORUM
        self.held: dict[PartitionId, ReplicaStatus] = {}
        self.known_producers: dict[PartitionId, list[ActiveProducer]] = {}
        self.requested: list[PartitionId] = []
        self.unfit: set[NodeId] = set()
        self.hand_over_s: float | None = 0.0
        self.handing_over = self.handing_over_max = 0
        self.apply(default_init("c"))
        for node in (ME, PEER_A, PEER_B):
            self.apply(register(node))

    @property
    def state(self) -> ClusterState:
        return self.machine.state

    def apply(self, command: Command) -> None:
        self.index += 1
        reply = self.machine.apply(LogIndex(self.index), command).reply
        assert not isinstance(reply, Rejected), reply.message

    def propose(self, command: Command, _timeout_ms: int, done: DoneFn[Reply]) -> None:
        self.index += 1
        reply = self.machine.apply(LogIndex(self.index), command).reply
        done(SmqError(reply.code, reply.message) if isinstance(reply, Rejected) else reply)

    def create(self, name: str, partitions: int = 1, config: tuple[tuple[str, str], ...] = ()) -> None:
        made = created(0, name, partitions, replicas=0 if config else 3)
        self.apply(replace(made, topic_id=TopicId(name.encode().ljust(16, b".")), config=config))

    def part(self, name: str, index: int = 0) -> PartitionState:
        part = self.state.partition_of(name, index)
        assert part is not None
        return part

    def hold(self, name: str, index: int, *, hwm: int, end: int, size: int) -> None:
        pid, at = self.part(name, index).pid, Offset(end)
        self.held[pid] = ReplicaStatus(pid, False, Epoch(0), Offset(0), Offset(hwm), Offset(hwm), at, at, at, size)

    # ---- NodeApi
    def barrier(self, _timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        done(self.failure if self.failure is not None else LogIndex(1))

    def find(self, look_up: Any, timeout_ms: int, done: DoneFn[Any]) -> None:
        self.barrier(timeout_ms, lambda result: done(result if isinstance(result, SmqError) else look_up(self.state)))

    def status(self) -> Any:
        return SimpleNamespace(storage=SimpleNamespace(free_bytes=30, total_bytes=100))

    def replica_statuses(self) -> Iterator[ReplicaStatus]:
        return iter(self.held.values())

    def replica_status(self, partition: PartitionId) -> ReplicaStatus | None:
        return self.held.get(partition)

    def producers(self, partition: PartitionId) -> list[ActiveProducer] | None:
        return self.known_producers.get(partition)

    def describe_quorum(self, _timeout_ms: int, done: DoneFn[Quorum]) -> None:
        done(self.described)

    def request_preferred_leader(self, partition: PartitionId) -> bool:
        part = self.state.partition(partition)
        assert part is not None
        if part.replicas[0] in self.unfit:
            return False
        self.requested.append(partition)
        self.handing_over += 1
        self.handing_over_max = max(self.handing_over, self.handing_over_max)
        if self.hand_over_s is not None:
            asyncio.get_running_loop().call_later(self.hand_over_s, self._hand_over, part)
        return True

    def _hand_over(self, part: PartitionState) -> None:
        self.handing_over -= 1
        part.leader = part.replicas[0]


@pytest.fixture
def node() -> Node:
    return Node()


def ask(node: Node, key: ApiKey, version: int, request: Struct) -> Struct:
    """The answer, which can be encoded in this version."""
    gateway = Gateway(
        calls=NodeCalls(cast(NodeApi, node)),
        groups=cast(GroupCoordinator, None),
        settings=Settings({}),
        request_bytes_max=MIB,
        response_bytes_max=MIB,
        data_dir="/data",
        inflight=InflightBytes(),
    )

    async def call() -> Struct:
        if key in LONG_POLLS:
            return await LONG_POLLS[key](gateway, version, request, Client("client", "/host"))
        return await HANDLERS[key](gateway, version, request)

    answer = asyncio.run(call())
    response_encoder(key, version)(answer)
    return answer


# ------------------------------------------------------------------------------------ DescribeTopicPartitions
def describe(node: Node, *names: str, limit: int = 2_000, cursor: tuple[str, int] | None = None) -> Struct:
    at = None if cursor is None else {"topic_name": cursor[0], "partition_index": cursor[1]}
    request = {"topics": [{"name": name} for name in names], "response_partition_limit": limit, "cursor": at}
    return ask(node, ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request)


def shown(answer: Struct) -> list[tuple[str, list[int]]]:
    return [(t["name"], [p["partition_index"] for p in t["partitions"]]) for t in answer["topics"]]


def next_of(answer: Struct) -> tuple[str, int] | None:
    cursor = answer["next_cursor"]
    return None if cursor is None else (cursor["topic_name"], cursor["partition_index"])


def test_pages_of_all_topics_show_each_partition_once_in_order(node: Node) -> None:
    for name, partitions in (("b", 3), ("a", 2), ("c", 1), ("d", 4)):
        node.create(name, partitions)
    for limit in range(1, 12):
        seen: list[tuple[str, int]] = []
        cursor = None
        for _ in range(11):
            answer = describe(node, limit=limit, cursor=cursor)
            page = [(name, index) for name, indexes in shown(answer) for index in indexes]
            assert len(page) <= limit
            seen += page
            cursor = next_of(answer)
            if cursor is None:
                break
        assert seen == [(n, i) for n, count in (("a", 2), ("b", 3), ("c", 1), ("d", 4)) for i in range(count)]


def test_a_cursor_names_the_first_partition_that_was_left_out(node: Node) -> None:
    node.create("a", 2)
    node.create("b", 2)
    assert next_of(describe(node, limit=1)) == ("a", 1)
    assert next_of(describe(node, limit=2)) == ("b", 0)
    assert next_of(describe(node, limit=4)) is None
    assert shown(describe(node, cursor=("a", 1))) == [("a", [1]), ("b", [0, 1])]
    assert shown(describe(node, cursor=("aa", 7))) == [("b", [0, 1])], "its topic is gone"
    assert shown(describe(node, cursor=("b", 9))) == [("b", [])], "beyond the last partition"
    assert shown(describe(node, cursor=("x", 0))) == []


def test_named_topics_are_shown_with_their_errors(node: Node) -> None:
    node.create("a")
    node.create("ext", config=(("storage", "external"),))
    answer = describe(node, "nowhere", "a", "bad name", "a", "ext")
    assert [(t["name"], t["error_code"]) for t in answer["topics"]] == [
        ("a", KafkaError.NONE),
        ("bad name", KafkaError.INVALID_TOPIC_EXCEPTION),
        ("ext", KafkaError.INVALID_TOPIC_EXCEPTION),
        ("nowhere", KafkaError.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert shown(describe(node)) == [("a", [0])], "external topics are none of Kafka's"


def test_a_partition_is_described_as_in_metadata(node: Node) -> None:
    node.create("a")
    part = node.part("a")
    (partition,) = describe(node, "a")["topics"][0]["partitions"]
    metadata = {"topics": [{"name": "a", "topic_id": bytes(16)}], "allow_auto_topic_creation": False}
    metadata |= {"include_topic_authorized_operations": False, "include_cluster_authorized_operations": False}
    (same,) = ask_metadata(node, metadata)["topics"][0]["partitions"]
    assert partition == same | {"eligible_leader_replicas": [], "last_known_elr": []}
    assert (partition["leader_id"], partition["replica_nodes"]) == (part.leader, part.replicas)


def test_a_topic_names_what_a_client_may_do_with_it(node: Node) -> None:
    """Kafka 4's admin client asks here, and no longer in Metadata, when its caller wants the operations."""
    node.create("a")
    metadata = {"topics": [{"name": "a", "topic_id": bytes(16)}], "allow_auto_topic_creation": False}
    metadata |= {"include_topic_authorized_operations": True, "include_cluster_authorized_operations": False}
    (same,) = ask_metadata(node, metadata)["topics"]
    known, unknown = describe(node, "a", "nowhere")["topics"]
    assert known["topic_authorized_operations"] == same["topic_authorized_operations"]
    assert bin(known["topic_authorized_operations"]).count("1") == 8
    assert "topic_authorized_operations" not in unknown, "encoded as the default, which says that nothing is known"


def ask_metadata(node: Node, request: Struct) -> Struct:
    node.status = lambda: SimpleNamespace(raft_leader=None)  # type: ignore[method-assign]  # all that Metadata reads
    return ask(node, ApiKey.METADATA, 12, request)


def test_a_page_has_a_bound_that_no_request_can_raise(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_partitions, "KAFKA_DESCRIBED_PARTITIONS_MAX", 3)
    node.create("a", 5)
    for limit in (1 << 30, 4):
        answer = describe(node, limit=limit)
        assert (shown(answer), next_of(answer)) == ([("a", [0, 1, 2])], ("a", 3))
    for limit in (0, -5):
        assert shown(describe(node, limit=limit)) == [("a", [0])], "at least one, so that every page makes progress"


def test_a_cursor_before_the_first_partition_is_refused(node: Node) -> None:
    node.create("a")
    answer = describe(node, "a", cursor=("a", -1))
    assert [t["error_code"] for t in answer["topics"]] == [KafkaError.INVALID_REQUEST]


# --------------------------------------------------------------------------------------------- DescribeLogDirs
def log_dirs(node: Node, topics: list[Struct] | None, version: int = 5) -> Struct:
    (found,) = ask(node, ApiKey.DESCRIBE_LOG_DIRS, version, {"topics": topics})["results"]
    return cast(Struct, found)


def test_the_data_directory_is_described_with_what_this_node_holds(node: Node) -> None:
    node.create("b", 2)
    node.create("a", 1)
    node.hold("b", 1, hwm=5, end=3, size=70)
    node.hold("b", 0, hwm=5, end=9, size=80)
    node.hold("a", 0, hwm=0, end=0, size=0)
    found = log_dirs(node, None)
    assert (found["log_dir"], found["total_bytes"], found["usable_bytes"]) == ("/data", 100, 30)
    assert [
        (t["name"], [(p["partition_index"], p["partition_size"], p["offset_lag"]) for p in t["partitions"]])
        for t in found["topics"]
    ] == [("a", [(0, 0, 0)]), ("b", [(0, 80, 0), (1, 70, 2)])]


@pytest.mark.parametrize("version", range(1, 6))
def test_only_the_requested_partitions_are_shown_once_each(node: Node, version: int) -> None:
    node.create("a", 2)
    node.hold("a", 1, hwm=0, end=0, size=7)
    requested = [{"topic": "a", "partitions": [1, 1, 0, 9]}, {"topic": "nowhere", "partitions": [0]}]
    (topic,) = log_dirs(node, requested, version)["topics"]
    assert [p["partition_index"] for p in topic["partitions"]] == [1], "0 is not held here"
    assert log_dirs(node, [], version)["topics"] == []


# -------------------------------------------------------------------------------------------- DescribeProducers
def producers_of(node: Node, *wanted: tuple[str, list[int]]) -> list[Struct]:
    topics = [{"name": name, "partition_indexes": indexes} for name, indexes in wanted]
    answer = ask(node, ApiKey.DESCRIBE_PRODUCERS, 0, {"topics": topics})
    return [partition for topic in answer["topics"] for partition in topic["partitions"]]


def writers(count: int) -> list[ActiveProducer]:
    return [
        ActiveProducer(ProducerId(n), ProducerEpoch(2), Sequence(n + 7), TsNs(5_000_000_000 + n)) for n in range(count)
    ]


def test_producers_are_described_by_their_last_batch(node: Node) -> None:
    node.create("a")
    node.known_producers[node.part("a").pid] = writers(2)
    (found,) = producers_of(node, ("a", [0]))
    assert [
        (p["producer_id"], p["producer_epoch"], p["last_sequence"], p["last_timestamp"], p["current_txn_start_offset"])
        for p in found["active_producers"]
    ] == [(0, 2, 7, 5_000, -1), (1, 2, 8, 5_000, -1)]


def test_partitions_without_an_answer_say_why(node: Node) -> None:
    node.create("a", 2)
    node.create("ext", config=(("storage", "external"),))
    node.known_producers[node.part("a", 1).pid] = []
    found = producers_of(node, ("a", [0, 1, 5]), ("nowhere", [0]), ("bad name", [0]), ("ext", [0]))
    assert [p["error_code"] for p in found] == [
        KafkaError.NOT_LEADER_OR_FOLLOWER,
        KafkaError.NONE,
        KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
        KafkaError.INVALID_TOPIC_EXCEPTION,
        KafkaError.INVALID_TOPIC_EXCEPTION,
    ]
    assert "are on nodes" in found[0]["error_message"]


def test_the_answer_has_a_bound_however_often_a_partition_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_producers, "KAFKA_DESCRIBED_PRODUCERS_MAX", 5)
    node.create("a")
    node.known_producers[node.part("a").pid] = writers(2)
    found = producers_of(node, ("a", [0, 0, 0]))
    assert [len(p["active_producers"]) for p in found] == [2, 2, 0]
    assert [p["error_code"] for p in found] == [KafkaError.NONE, KafkaError.NONE, KafkaError.POLICY_VIOLATION]
    assert "fewer partitions" in found[2]["error_message"]


# --------------------------------------------------------------------------------------------------- DescribeQuorum
def quorum_of(node: Node, *wanted: tuple[str, int], version: int = 2) -> Struct:
    topics = [{"topic_name": name, "partitions": [{"partition_index": index}]} for name, index in wanted]
    return ask(node, ApiKey.DESCRIBE_QUORUM, version, {"topics": topics})


@pytest.mark.parametrize("version", range(3))
def test_raft_is_shown_as_kafkas_metadata_partition(node: Node, version: int) -> None:
    leader = QuorumReplica(node=ME, disk=DiskId(b"d" * 16), end=9, heard_ms=-1, caught_up_ms=50)
    unknown = QuorumReplica(node=PEER_A, disk=DiskId(b""), end=-1, heard_ms=-1, caught_up_ms=-1)
    node.described = Quorum(leader=ME, term=Term(3), committed_end=8, voters=(leader, unknown), observers=())
    answer = quorum_of(node, ("__cluster_metadata", 0), version=version)
    (partition,) = answer["topics"][0]["partitions"]
    assert (partition["leader_id"], partition["leader_epoch"], partition["high_watermark"]) == (ME, 3, 8)
    assert [(v["replica_id"], v["log_end_offset"]) for v in partition["current_voters"]] == [(ME, 9), (PEER_A, -1)]
    assert [n["node_id"] for n in answer["nodes"]] == [ME, PEER_A]


@pytest.mark.parametrize("wanted", [("t", 0), ("__cluster_metadata", 1)], ids=["another topic", "another partition"])
def test_nothing_but_raft_has_a_quorum(node: Node, wanted: tuple[str, int]) -> None:
    (topic,) = quorum_of(node, wanted)["topics"]
    assert topic["partitions"][0]["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def test_without_a_raft_leader_the_error_is_one_that_clients_retry(node: Node) -> None:
    assert quorum_of(node, ("__cluster_metadata", 0))["error_code"] == KafkaError.REQUEST_TIMED_OUT


# --------------------------------------------------------------------------------------------------- ElectLeaders
PREFERRED, UNCLEAN = 0, 1


def moved(node: Node, name: str, partitions: int) -> None:
    """A topic of which no partition is led by its first replica."""
    node.create(name, partitions)
    for index in range(partitions):
        part = node.part(name, index)
        part.leader = part.replicas[1]


def elect(
    node: Node, wanted: dict[str, list[int]] | None, *, kind: int = PREFERRED, timeout_ms: int = 5_000, version: int = 2
) -> dict[tuple[str, int], int]:
    named = None if wanted is None else [{"topic": t, "partitions": indexes} for t, indexes in wanted.items()]
    request = {"election_type": kind, "topic_partitions": named, "timeout_ms": timeout_ms}
    answer = ask(node, ApiKey.ELECT_LEADERS, version, request)
    return {
        (topic["topic"], p["partition_id"]): p["error_code"]
        for topic in answer["replica_election_results"]
        for p in topic["partition_result"]
    }


@pytest.mark.parametrize("version", range(3))
def test_a_leadership_goes_to_the_preferred_replica(node: Node, version: int) -> None:
    moved(node, "a", 2)
    node.create("b")
    codes = elect(node, {"a": [1, 1], "b": [0], "nowhere": [0]}, version=version)
    assert codes == {
        ("a", 1): KafkaError.NONE,
        ("b", 0): KafkaError.ELECTION_NOT_NEEDED,
        ("nowhere", 0): KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert node.requested == [node.part("a", 1).pid]
    assert node.part("a", 1).leader == node.part("a", 1).replicas[0]


def test_of_all_partitions_only_those_that_moved_are_reported(node: Node) -> None:
    moved(node, "a", 2)
    node.create("b", 5)
    node.create("ext", config=(("storage", "external"),))
    assert elect(node, None) == {("a", 0): KafkaError.NONE, ("a", 1): KafkaError.NONE}


def test_a_preferred_replica_that_is_not_fit_is_not_elected(node: Node) -> None:
    moved(node, "a", 1)
    node.unfit.add(node.part("a").replicas[0])
    assert elect(node, {"a": [0]}) == {("a", 0): KafkaError.PREFERRED_LEADER_NOT_AVAILABLE}


def test_hand_overs_are_few_at_a_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "KAFKA_ELECTIONS_MAX", 3)
    monkeypatch.setattr(leader_election, "KAFKA_ELECTION_POLL_MS", 1)
    moved(node, "a", 20)
    node.hand_over_s = 0.002
    assert set(elect(node, None).values()) == {KafkaError.NONE}
    assert node.handing_over_max == 3
    assert sorted(node.requested) == sorted(node.part("a", i).pid for i in range(20))


def test_a_hand_over_that_does_not_happen_is_requested_again_until_the_time_is_over(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_election, "KAFKA_ELECTION_RETRY_MS", 30)
    moved(node, "a", 2)
    node.hand_over_s = None
    codes = elect(node, None, timeout_ms=200)
    assert codes == {("a", 0): KafkaError.REQUEST_TIMED_OUT, ("a", 1): KafkaError.REQUEST_TIMED_OUT}
    assert len(node.requested) > 2


def test_an_unclean_election_never_happens(node: Node) -> None:
    node.create("a")
    node.create("b")
    part = node.part("b")
    node.apply(FenceNode(node=part.leader, incarnation=INCARNATION))
    codes = elect(node, {"a": [0], "b": [0], "c": [0]}, kind=UNCLEAN)
    has_moved = node.part("a").leader == part.leader
    assert codes == {
        ("a", 0): KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE if has_moved else KafkaError.ELECTION_NOT_NEEDED,
        ("b", 0): KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        ("c", 0): KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert node.requested == []


def test_a_failure_of_the_whole_request_is_reported_for_each_partition(node: Node) -> None:
    moved(node, "a", 1)
    node.failure = NO_QUORUM
    assert elect(node, {"a": [0]}) == {("a", 0): KafkaError.REQUEST_TIMED_OUT}
    assert elect(node, {"a": [0]}, version=0) == {("a", 0): KafkaError.REQUEST_TIMED_OUT}
    node.failure = None
    assert elect(node, {"a": [0]}, kind=7) == {("a", 0): KafkaError.INVALID_REQUEST}
    assert node.requested == []


# --------------------------------------------------------------------------------------------------------- lists
@pytest.mark.parametrize(
    ("version", "types", "found"),
    [
        (0, [], []),
        (1, [], [("a", 2), ("1", 4), ("2", 4), ("3", 4)]),
        (1, [2, 2], [("a", 2)]),
        (1, [4], [("1", 4), ("2", 4), ("3", 4)]),
        (1, [8, 16, 32], []),
    ],
)
def test_config_resources_are_listed_by_type(
    node: Node, version: int, types: list[int], found: list[tuple[str, int]]
) -> None:
    node.create("a")
    node.create("ext", config=(("storage", "external"),))
    answer = ask(node, ApiKey.LIST_CONFIG_RESOURCES, version, {"resource_types": types})
    assert answer["error_code"] == KafkaError.NONE
    assert [(r["resource_name"], r["resource_type"]) for r in answer["config_resources"]] == found


def test_a_type_without_configuration_is_not_listed(node: Node) -> None:
    answer = ask(node, ApiKey.LIST_CONFIG_RESOURCES, 1, {"resource_types": [2, 3]})
    assert (answer["error_code"], answer["config_resources"]) == (KafkaError.UNSUPPORTED_VERSION, [])


def test_nothing_is_reassigned(node: Node) -> None:
    node.create("a")
    for topics in (None, [{"name": "a", "partition_indexes": [0]}]):
        answer = ask(node, ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, {"topics": topics, "timeout_ms": 1})
        assert (answer["error_code"], answer["topics"]) == (KafkaError.NONE, [])


def component(entity: str, match_type: int = 2, match: str | None = None) -> Struct:
    return {"entity_type": entity, "match_type": match_type, "match": match}


def altered_quotas(node: Node, *entries: tuple[Struct, Struct], **fields: Any) -> list[KafkaError]:
    """Of each entry the entity, by kind, and its quotas; None removes one."""
    given = [
        {
            "entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity.items()],
            "ops": [{"key": k, "value": v or 0.0, "remove": v is None} for k, v in values.items()],
        }
        for entity, values in entries
    ]
    request = {"entries": given, "validate_only": False} | fields
    answer = ask(node, ApiKey.ALTER_CLIENT_QUOTAS, 1, request)
    return [KafkaError(entry["error_code"]) for entry in answer["entries"]]


def described_quotas(node: Node, *components: Struct, strict: bool = False) -> list[tuple[Struct, Struct]]:
    request = {"components": list(components), "strict": strict}
    answer = ask(node, ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, request)
    assert answer["error_code"] is KafkaError.NONE
    return [
        (
            {part["entity_type"]: part["entity_name"] for part in entry["entity"]},
            {value["key"]: value["value"] for value in entry["values"]},
        )
        for entry in answer["entries"]
    ]


PRODUCED, PERCENT, MUTATIONS = "producer_byte_rate", "request_percentage", "controller_mutation_rate"
JOB_OF_ALICE = ({"client-id": "job", "user": "alice"}, {PRODUCED: 1024.0})
EACH_JOB = ({"client-id": None}, {PERCENT: 12.5})
ALICE = ({"user": "alice"}, {MUTATIONS: 0.001, PRODUCED: 2048.0})
ADDRESS = ({"ip": "10.0.0.1"}, {"connection_creation_rate": 5.0})


def test_quotas_are_changed_by_entity_and_found_by_filters(node: Node) -> None:
    assert described_quotas(node) == []
    assert altered_quotas(node, JOB_OF_ALICE, EACH_JOB, ALICE, validate_only=True) == [KafkaError.NONE] * 3
    assert described_quotas(node) == []
    mapped = ({"ip": "::ffff:10.0.0.1"}, ADDRESS[1])
    assert altered_quotas(node, JOB_OF_ALICE, EACH_JOB, ALICE, mapped) == [KafkaError.NONE] * 4
    for components, strict, found in (
        ((), False, [EACH_JOB, JOB_OF_ALICE, ADDRESS, ALICE]),
        ((component("user", 0, "alice"),), False, [JOB_OF_ALICE, ALICE]),
        ((component("user", 0, "alice"),), True, [ALICE]),
        ((component("client-id"),), False, [EACH_JOB, JOB_OF_ALICE]),
        ((component("client-id", 1),), False, [EACH_JOB]),
        ((component("client-id", 0, "job"), component("user")), True, [JOB_OF_ALICE]),
        ((component("ip"),), False, [ADDRESS]),
        ((component("user", 1),), False, []),
    ):
        assert described_quotas(node, *components, strict=strict) == found
    removal = {"user": "alice"}, {PRODUCED: None, PERCENT: None, MUTATIONS: 2.5}
    assert altered_quotas(node, removal) == [KafkaError.NONE]
    assert described_quotas(node, component("user"), strict=True) == [({"user": "alice"}, {MUTATIONS: 2.5})]


def test_a_bad_quota_is_refused_alone_and_whole(node: Node) -> None:
    bad = [
        ({"user": "u"}, {PERCENT: 1.0, PRODUCED: 0.5}),
        ({"user": "u"}, {PERCENT: 1.0, PRODUCED: 0.0}),
        ({"user": "u"}, {PERCENT: 1.0, "records": 1.0}),
        ({"user": "u"}, {PERCENT: float("nan")}),
        ({"user": "u"}, {PERCENT: float("inf")}),
        ({"user": "u"}, {PERCENT: 1e300}),
        ({"user": "u"}, {PERCENT: 0.0001}),
        ({"user": ""}, {PERCENT: 1.0}),
        ({"ip": "example.org"}, ADDRESS[1]),
        ({"ip": "10.0.0.1"}, {PERCENT: 1.0}),
        ({"ip": "10.0.0.1", "user": "u"}, ADDRESS[1]),
        ({}, {PERCENT: 1.0}),
    ]
    codes = altered_quotas(node, *bad, ALICE, ({"planet": "x"}, {PERCENT: 1.0}))
    assert codes == [KafkaError.INVALID_REQUEST] * len(bad) + [KafkaError.NONE, KafkaError.UNSUPPORTED_VERSION]
    assert described_quotas(node) == [ALICE]


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ([component("user"), component("user")], KafkaError.INVALID_REQUEST),
        ([component("")], KafkaError.INVALID_REQUEST),
        ([component("ip"), component("user")], KafkaError.INVALID_REQUEST),
        ([component("user", 3)], KafkaError.INVALID_REQUEST),
        ([component("user", 0)], KafkaError.INVALID_REQUEST),
        ([component("planet")], KafkaError.UNSUPPORTED_VERSION),
    ],
)
@pytest.mark.parametrize("version", range(2))
def test_a_filter_of_quotas_that_makes_no_sense_is_refused(
    node: Node, version: int, components: list[Struct], code: KafkaError
) -> None:
    answer = ask(node, ApiKey.DESCRIBE_CLIENT_QUOTAS, version, {"components": components, "strict": False})
    assert (answer["error_code"], answer["entries"]) == (code, None)


def upsertion(name: str, mechanism: int = 1, *, iterations: int = 4_096, size: int | None = None) -> Struct:
    salted = b"p" * (size if size is not None else {2: 64}.get(mechanism, 32))
    return {
        "name": name,
        "mechanism": mechanism,
        "iterations": iterations,
        "salt": b"salt",
        "salted_password": salted,
    }


def deletion(name: str, mechanism: int = 1) -> Struct:
    return {"name": name, "mechanism": mechanism}


def altered(node: Node, *upsertions: Struct, deletions: tuple[Struct, ...] = ()) -> dict[str, KafkaError]:
    request = {"deletions": list(deletions), "upsertions": list(upsertions)}
    results = ask(node, ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, request)["results"]
    return {result["user"]: KafkaError(result["error_code"]) for result in results}


def described_users(node: Node, *names: str) -> dict[str, KafkaError | dict[int, int]]:
    users = [{"name": name} for name in names] or None
    answer = ask(node, ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": users})
    assert answer["error_code"] is KafkaError.NONE
    return {
        result["user"]: KafkaError(result["error_code"])
        if result["error_code"]
        else {info["mechanism"]: info["iterations"] for info in result["credential_infos"]}
        for result in answer["results"]
    }


def test_users_are_changed_and_shown_without_their_keys(node: Node) -> None:
    assert described_users(node) == {}
    assert altered(node, upsertion("b", 2), upsertion("a"), upsertion("a", 2, iterations=16_384)) == {
        "a": KafkaError.NONE,
        "b": KafkaError.NONE,
    }
    assert described_users(node) == {"a": {1: 4_096, 2: 16_384}, "b": {2: 4_096}}
    kept = node.state.users["a"].credentials[0]
    assert b"p" * 32 not in (kept.stored_key, kept.server_key, kept.salt)  # what is kept cannot log in
    assert described_users(node, "a", "b", "c", "b") == {
        "a": {1: 4_096, 2: 16_384},
        "b": KafkaError.DUPLICATE_RESOURCE,
        "c": KafkaError.RESOURCE_NOT_FOUND,
    }
    assert altered(node, upsertion("a"), deletions=(deletion("a", 2), deletion("b", 2))) == {
        "a": KafkaError.NONE,
        "b": KafkaError.NONE,
    }
    assert described_users(node) == {"a": {1: 4_096}}


@pytest.mark.parametrize(
    ("upsertions", "deletions", "code"),
    [
        ([upsertion("a", 3)], [], KafkaError.UNSUPPORTED_SASL_MECHANISM),
        ([], [deletion("a", 0)], KafkaError.UNSUPPORTED_SASL_MECHANISM),
        ([upsertion("a", iterations=4_095)], [], KafkaError.UNACCEPTABLE_CREDENTIAL),
        ([upsertion("a", iterations=16_385)], [], KafkaError.UNACCEPTABLE_CREDENTIAL),
        ([upsertion("a", size=31)], [], KafkaError.UNACCEPTABLE_CREDENTIAL),
        ([upsertion("")], [], KafkaError.UNACCEPTABLE_CREDENTIAL),
        ([upsertion("a"), upsertion("a")], [], KafkaError.DUPLICATE_RESOURCE),
        ([upsertion("a")], [deletion("a")], KafkaError.DUPLICATE_RESOURCE),
        ([], [deletion("a", 2)], KafkaError.RESOURCE_NOT_FOUND),
        ([upsertion("a")], [deletion("a", 2)], KafkaError.RESOURCE_NOT_FOUND),
    ],
)
def test_a_bad_change_of_a_user_is_refused_and_costs_no_other_user_anything(
    node: Node, upsertions: list[Struct], deletions: list[Struct], code: KafkaError
) -> None:
    altered(node, upsertion("a", iterations=5_000))
    name = (upsertions or deletions)[0]["name"]
    found = altered(node, *upsertions, upsertion("b"), deletions=tuple(deletions))
    assert found == {name: code, "b": KafkaError.NONE}
    assert described_users(node) == {"a": {1: 5_000}, "b": {1: 4_096}}


# -------------------------------------------------------------------------------------------------- refused changes
@pytest.mark.parametrize("version", range(3))
def test_the_feature_keeps_its_level(node: Node, version: int) -> None:
    for feature, level, code in (
        ("transaction.version", 2, KafkaError.NONE),
        ("transaction.version", 1, KafkaError.INVALID_UPDATE_VERSION),
        ("metadata.version", 2, KafkaError.INVALID_UPDATE_VERSION),
    ):
        updates = [{"feature": feature, "max_version_level": level}]
        answer = ask(node, ApiKey.UPDATE_FEATURES, version, {"feature_updates": updates})
        found = answer if version == 2 else answer["results"][0]
        assert found["error_code"] == code
        assert (answer["error_code"], len(answer["results"])) == ((code, 0) if version == 2 else (KafkaError.NONE, 1))


@pytest.mark.parametrize("version", range(2))
@pytest.mark.parametrize(
    "wrong",
    [
        {"group_id": ""},
        {"instance_id": ""},
        {"rack_id": ""},
        {"member_epoch": -3},
        {"member_epoch": -2},
        {"member_id": "", "member_epoch": 3},
        {"rebalance_timeout_ms": -1},
        {"topic_partitions": None},
        {"subscribed_topic_names": None},
    ],
    ids=str,
)
def test_a_heartbeat_of_a_consumer_group_that_says_too_little_is_refused(
    node: Node, version: int, wrong: dict[str, Any]
) -> None:
    beat = {
        "group_id": "g",
        "member_id": "m",
        "member_epoch": 0,
        "rebalance_timeout_ms": 1_000,
        "subscribed_topic_names": ["t"],
        "topic_partitions": [],
    }
    fields = request_message(ApiKey.CONSUMER_GROUP_HEARTBEAT).fields
    answer = ask(node, ApiKey.CONSUMER_GROUP_HEARTBEAT, version, _filled(beat | wrong, fields, version))
    assert answer["error_code"] == KafkaError.INVALID_REQUEST
    assert answer["error_message"]
