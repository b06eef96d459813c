"""Requests about groups and transactions at a coordinator whose changes get no answer: clients get theirs in time, and
ask again. A client without an answer drops the connection, and with it everything else that is under way on it."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import pytest

from smq.coordinator.groups.member_requests import Joined, Outcome, Sync, Synced
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.cluster_view import PREFIX
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.handlers import HANDLERS
from smq.coordinator.limits import MIB
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_members import Memberships
from smq.coordinator.service.settings import Settings
from smq.raft_state.commands import Command
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex
from smq.raft_state.replies import Reply
from smq.raft_state.state import ClusterState
from smq.replication.api import DoneFn, NodeApi
from smq.testing.virtual.loop import SimLoop
from tests.unit.coordinator.groups.world import GROUP, Client, FakeNode, World, converge

T = TypeVar("T")

LATE: Final = SmqError(ErrorCode.TIMED_OUT, "no answer came")
FRANZ_GO_MS: Final = 10_000  # of requests that do not name a time-out of their own
LIBRDKAFKA_LATE_MS: Final = 3_000  # of JoinGroup beyond the rebalance time-out, of SyncGroup beyond the session's
LIBRDKAFKA_LEAVE_MS: Final = 5_500  # and half a second of its own
ASKED_AGAIN: Final = {  # by Java, librdkafka and franz-go, whatever the request
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}
# OffsetFetch has no row for the second one in librdkafka, and ends Java's consumer.
FETCHED_AGAIN: Final = ASKED_AGAIN - {KafkaError.COORDINATOR_NOT_AVAILABLE}


class Silence:
    """The coordinator's node: look-ups take as long as they may, and changes longer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = SimLoop(world.clock)  # type: ignore[abstract]  # it has what a loop without sockets needs
        node: Any = self.node
        node.propose, node.barrier, node.find = self.propose, self.barrier, self.find
        self.calls = NodeCalls(cast(NodeApi, node))
        self.members = Memberships(self.calls, world.coordinator)

    @property
    def node(self) -> FakeNode:
        return self.world.nodes[self.world.owner]

    def propose(self, _command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        self.world.clock.call_later(timeout_ms, lambda: done(LATE))

    def barrier(self, timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        self.world.clock.call_later(timeout_ms, lambda: done(LATE))

    def find(self, look_up: Callable[[ClusterState], Any], timeout_ms: int, done: DoneFn[Any]) -> None:
        self.world.clock.call_later(timeout_ms - 1, lambda: done(look_up(self.world.machine.state)))

    def answer(self, ask: Callable[[], Awaitable[T]], within_ms: int) -> T:
        answers: list[Any] = []

        async def wait() -> T:
            return await ask()

        self.world.clock.call_soon(lambda: self.loop.run(wait(), answers.append))
        self.world.run(within_ms)
        assert answers, "the client has dropped the connection"
        return cast(T, answers[0])

    def name(self, prefix: str = "") -> str:
        """Of a group or a transactional id that this node coordinates."""
        names = (f"name-{n}" for n in range(1000))
        state = self.world.machine.state
        return next(name for name in names if coordinator_of(state, prefix + name).node == self.node.node_id)


@pytest.fixture
def silence() -> Silence:
    return Silence(World())


def _offsets(*topics: str) -> list[Struct]:
    part = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": None}
    return [{"name": name, "topic_id": b"", "partitions": [part]} for name in topics]


_PRODUCER: Final = {"producer_id": 1, "producer_epoch": 0}
_OLD: Final = {f"v3_and_below_{name}": value for name, value in _PRODUCER.items()}
_MEMBER: Final = {"member_id": "", "group_instance_id": None, "generation_id": -1, "generation_id_or_member_epoch": -1}
_PART: Final = {"name": "t", "topic_id": b"", "partition_indexes": [0], "partitions": [0]}
REQUESTS: Final = (
    (ApiKey.OFFSET_COMMIT, 9, _MEMBER | {"topics": _offsets("t", "nowhere")}),
    (ApiKey.OFFSET_FETCH, 7, {"require_stable": False, "topics": [_PART]}),
    (ApiKey.TXN_OFFSET_COMMIT, 3, _MEMBER | _PRODUCER | {"topics": _offsets("t")}),
    (ApiKey.ADD_PARTITIONS_TO_TXN, 3, _OLD | {"v3_and_below_topics": [_PART]}),
    (ApiKey.ADD_OFFSETS_TO_TXN, 3, _PRODUCER),
    (ApiKey.END_TXN, 3, _PRODUCER | {"committed": True}),
    (ApiKey.INIT_PRODUCER_ID, 4, _PRODUCER | {"transaction_timeout_ms": 60_000}),
)


def codes_in(answer: Any) -> set[KafkaError]:
    if isinstance(answer, list):
        return {code for item in answer for code in codes_in(item)}
    if not isinstance(answer, dict):
        return set()
    own = {code for name, code in answer.items() if name.endswith("error_code")}
    return own | {code for item in answer.values() for code in codes_in(item)}


@pytest.mark.parametrize(("key", "version", "fields"), REQUESTS, ids=lambda value: getattr(value, "name", ""))
def test_a_request_is_answered_before_its_client_gives_up(
    silence: Silence, key: ApiKey, version: int, fields: Struct
) -> None:
    gateway = Gateway(
        calls=silence.calls,
        groups=silence.world.coordinator,
        settings=Settings({}),
        request_bytes_max=MIB,
        response_bytes_max=MIB,
        data_dir="/data",
        inflight=InflightBytes(),
    )
    group, transactional_id = silence.name(PREFIX), silence.name()
    names = {"group_id": group, "transactional_id": transactional_id}
    request = names | {"v3_and_below_transactional_id": transactional_id} | fields
    answer = silence.answer(lambda: HANDLERS[key](gateway, version, request), FRANZ_GO_MS - 1_000)
    codes = codes_in(answer) - {KafkaError.NONE, KafkaError.UNKNOWN_TOPIC_OR_PARTITION}
    assert codes
    assert codes <= (FETCHED_AGAIN if key is ApiKey.OFFSET_FETCH else ASKED_AGAIN)


def test_a_join_is_answered_before_its_client_gives_up(silence: Silence) -> None:
    member = Client(silence.world, "a", rebalance_ms=1_000)
    silence.world.coordinator.join(member.request(), lambda joined: setattr(member, "member_id", joined.member_id))
    joined: Joined = silence.answer(lambda: silence.members.join(member.request()), 1_000 + LIBRDKAFKA_LATE_MS)
    assert joined.outcome is Outcome.UNCERTAIN


def test_a_leave_is_answered_before_its_client_gives_up() -> None:
    world = World()
    member = Client(world, "a")
    converge(world, member)
    silence = Silence(world)
    assert silence.answer(lambda: silence.members.leave(GROUP, [member.who]), LIBRDKAFKA_LEAVE_MS) == [
        Outcome.UNCERTAIN
    ]


def test_a_member_that_has_waited_too_long_for_its_assignment_finds_the_same_generation_again() -> None:
    world = World()
    members = [Client(world, name, session_ms=10_000, rebalance_ms=60_000) for name in "ab"]
    converge(world, *members)
    (follower,) = [member for member in members if member.joined[-1].leader != member.member_id]
    silence = Silence(world)
    sync = Sync(group=GROUP, who=follower.who, generation=follower.generation)
    synced: Synced = silence.answer(lambda: silence.members.sync(sync), 10_000 + LIBRDKAFKA_LATE_MS)
    assert synced.outcome is Outcome.UNCERTAIN
    generation = follower.generation
    follower.ask()
    assert (follower.outcome, follower.generation) == (Outcome.OK, generation)
