"""Fetch sessions: the protocol's cases, what they may hold, and a client that sees what full fetches show."""

import asyncio
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smq.coordinator.kafka.api_keys import ApiKey, request_message, response_message
from smq.coordinator.kafka.authorization import Access, Refusal, check
from smq.coordinator.kafka.codec import Struct, compile_decoder, compile_encoder
from smq.coordinator.kafka.connection import Connection
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.fetch_sessions import FetchSessions, SessionRefusal
from smq.coordinator.limits import (
    KAFKA_FETCH_SESSION_BYTES_PER_NODE_MAX,
    KAFKA_FETCH_SESSION_PARTITION_BYTES,
    KAFKA_FETCH_SESSION_PARTITIONS_MAX,
    KAFKA_FETCH_SESSION_STALE_S,
    KAFKA_FETCH_SESSIONS_MAX,
)
from smq.coordinator.service.byte_budget import ByteBudget, InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.handlers.acls import Operation, Resource
from smq.replication.monitoring.measures import ProcessMeasures
from tests.unit.coordinator.kafka.gateways import fetch_of, gateway_to
from tests.unit.coordinator.kafka.test_authorization import access_of
from tests.unit.coordinator.kafka.test_fetch_costs import Wire
from tests.unit.coordinator.lagging import TOPIC, TOPIC_ID, LaggingNode, state_with

NO_ID = bytes(16)
BY_NAME, BY_ID = 12, 13
NOT_FOUND, BAD_EPOCH = KafkaError.FETCH_SESSION_ID_NOT_FOUND, KafkaError.INVALID_FETCH_SESSION_EPOCH
Place = tuple[str, int]
Handler = Callable[[Struct], Struct]


def asked(session: int, epoch: int, offsets: dict[Place, int], forgotten: tuple[Place, ...] = ()) -> Struct:
    rest = {"current_leader_epoch": -1, "partition_max_bytes": 1, "log_start_offset": -1}
    return {
        "session_id": session,
        "session_epoch": epoch,
        "topics": [
            {"topic": t, "topic_id": NO_ID, "partitions": [{"partition": p, "fetch_offset": at} | rest]}
            for (t, p), at in offsets.items()
        ],
        "forgotten_topics_data": [{"topic": t, "topic_id": NO_ID, "partitions": [p]} for t, p in forgotten],
    }


def row(number: int, *, code: int = 0, marks: tuple[int, int, int] = (0, 0, 0), records: tuple[bytes, ...] = ()) -> Any:
    names = ("high_watermark", "last_stable_offset", "log_start_offset")
    found = dict(zip(names, marks, strict=True))
    return found | {"partition_index": number, "error_code": code, "records": list(records)}


def nothing_new(request: Struct) -> Struct:
    topics = [topic | {"partitions": [row(p["partition"]) for p in topic["partitions"]]} for topic in request["topics"]]
    return {"error_code": KafkaError.NONE, "session_id": 0, "responses": topics}


def call(
    sessions: FetchSessions, request: Struct, *, handler: Handler = nothing_new, user: str = "", version: int = BY_NAME
) -> Struct:
    try:
        complete = sessions.begin(user, version, request)
    except SessionRefusal as e:
        return e.answer
    answer = handler(request)
    return answer if complete is None else complete(answer)


def heard(answer: Struct) -> list[Place]:
    return [(t["topic"], part["partition_index"]) for t in answer["responses"] for part in t["partitions"]]


def answered(answer: Struct, _request: Struct) -> Struct:
    return answer


def opened(sessions: FetchSessions, *places: Place, user: str = "", version: int = BY_NAME) -> int:
    request = asked(0, 0, dict.fromkeys(places, 0))
    return int(call(sessions, request, user=user, version=version)["session_id"])


def numbered(size: int) -> list[Place]:
    return [("t", number) for number in range(size)]


@pytest.mark.parametrize(
    ("used", "epoch", "user", "version", "code"),
    [
        (True, 1, "", BY_NAME, KafkaError.NONE),
        (True, 2, "", BY_NAME, BAD_EPOCH),  # the one before it was lost
        (True, -2, "", BY_NAME, BAD_EPOCH),
        (False, 1, "", BY_NAME, NOT_FOUND),  # as after a restart of the node
        (True, 1, "mallory", BY_NAME, NOT_FOUND),
        (True, 1, "", BY_ID, KafkaError.FETCH_SESSION_TOPIC_ID_ERROR),
    ],
)
def test_who_may_go_on_with_a_session(used: bool, epoch: int, user: str, version: int, code: KafkaError) -> None:
    sessions = FetchSessions(ByteBudget(1 << 30))
    number = opened(sessions, ("t", 0), ("t", 1))
    answer = call(sessions, asked(number if used else number ^ 1, epoch, {}), user=user, version=version)
    assert (answer["error_code"], answer["responses"]) == (code, [])
    assert call(sessions, asked(number, 1 + (code is KafkaError.NONE), {}))["error_code"] == KafkaError.NONE


@pytest.mark.parametrize(
    ("request_of", "is_gone"),
    [
        (lambda number: asked(number, -1, {}), True),
        (lambda number: asked(number, 0, {("t", 0): 0}), True),
        (lambda number: asked(number, 1, {}, (("t", 0), ("t", 1))), True),
        (lambda number: asked(number, 1, {}, (("t", 0), ("nowhere", 1))), False),
        (lambda number: asked(number, 1, {("u", 0): 0}, (("t", 0), ("t", 1))), False),
    ],
    ids=["final", "initial", "all-forgotten", "one-forgotten", "exchanged"],
)
def test_when_a_session_ends(request_of: Callable[[int], Struct], is_gone: bool) -> None:
    budget = ByteBudget(1 << 30)
    sessions = FetchSessions(budget)
    number = opened(sessions, ("t", 0), ("t", 1))
    assert call(sessions, request_of(number))["session_id"] != number or not is_gone
    assert (call(sessions, asked(number, 2, {}))["error_code"] == NOT_FOUND) is is_gone
    ended = call(sessions, asked(number, -1, {}))
    assert (ended["session_id"], ended["error_code"]) == (0, KafkaError.NONE)


def test_another_user_does_not_end_a_session() -> None:
    sessions = FetchSessions(ByteBudget(1 << 30))
    number = opened(sessions, ("t", 0), user="alice")
    call(sessions, asked(number, -1, {}), user="mallory")
    assert call(sessions, asked(number, 1, {}), user="alice")["error_code"] == KafkaError.NONE


def test_one_fetch_of_a_session_at_a_time() -> None:
    sessions = FetchSessions(ByteBudget(1 << 30))
    number = opened(sessions, ("t", 0))
    first = asked(number, 1, {})
    complete = sessions.begin("", BY_NAME, first)
    assert complete is not None
    for epoch in (1, 2):
        assert call(sessions, asked(number, epoch, {("t", 9): 0}))["error_code"] == BAD_EPOCH
    assert complete(nothing_new(first))["error_code"] == KafkaError.NONE
    assert call(sessions, asked(number, 2, {}))["error_code"] == KafkaError.NONE


def test_epochs_begin_again_at_one() -> None:
    sessions = FetchSessions(ByteBudget(1 << 30))
    number = opened(sessions, ("t", 0))
    sessions._sessions[number].epoch = 2**31 - 1
    for epoch in (2**31 - 1, 1, 2):
        assert call(sessions, asked(number, epoch, {}))["error_code"] == KafkaError.NONE


@pytest.mark.parametrize(
    ("part", "is_told"),
    [
        (row(0), [False, False]),
        (row(0, marks=(1, 0, 0)), [True, False]),
        (row(0, marks=(0, 1, 0)), [True, False]),
        (row(0, marks=(0, 0, 1)), [True, False]),
        (row(0, records=(b"r",)), [True, True]),
        (row(0, code=KafkaError.NOT_LEADER_OR_FOLLOWER), [True, True]),
        (row(0) | {"preferred_read_replica": 2}, [True, True]),
    ],
)
def test_what_a_client_is_told(part: Struct, is_told: list[bool]) -> None:
    sessions = FetchSessions(ByteBudget(1 << 30))
    number = opened(sessions, ("t", 0))
    answer = {"error_code": 0, "session_id": 0, "responses": [{"topic": "t", "topic_id": NO_ID, "partitions": [part]}]}
    told = [call(sessions, asked(number, e, {}), handler=partial(answered, answer))["responses"] != [] for e in (1, 2)]
    assert told == is_told
    if part["error_code"]:  # and when it is over
        assert heard(call(sessions, asked(number, 3, {}))) == [("t", 0)]
    assert heard(call(sessions, asked(number, 3 + bool(part["error_code"]), {("t", 1): 0})))[-1] == ("t", 1)


def test_rights_are_those_of_each_fetch() -> None:
    """Of all partitions of the session, whichever the request names."""
    sessions = FetchSessions(ByteBudget(1 << 30))
    read_one, read_both = (
        access_of(*((Operation.READ, Resource.TOPIC, topic) for topic in topics)) for topics in ("a", "ab")
    )

    def fetched(request: Struct, access: Any) -> tuple[int, dict[Place, int]]:
        complete = sessions.begin("alice", BY_NAME, request)
        try:
            rights = check(access, ApiKey.FETCH, BY_NAME, request)
            answer = nothing_new(request)
            answer = answer if rights is None else rights(answer)
        except Refusal as e:
            answer = e.answer
        assert complete is not None
        answer = complete(answer)
        codes = [part["error_code"] for topic in answer["responses"] for part in topic["partitions"]]
        return answer["session_id"], dict(zip(heard(answer), codes, strict=True))

    denied = KafkaError.TOPIC_AUTHORIZATION_FAILED
    a, b = ("a", 0), ("b", 0)
    number, codes = fetched(asked(0, 0, {a: 0, b: 0}), read_one)
    assert codes == {a: KafkaError.NONE, b: denied}
    rest = [
        (read_one, {b: denied}),
        (read_both, {b: KafkaError.NONE}),
        (read_both, {}),
        (access_of(), {a: denied, b: denied}),
    ]
    for epoch, (access, expected) in enumerate(rest, start=1):
        assert fetched(asked(number, epoch, {}), access) == (number, expected)


async def test_a_connection_checks_the_rights_to_what_its_session_asks_for() -> None:
    """The request itself names nothing."""
    node, wire = LaggingNode(), Wire()
    node.state = state_with((TOPIC, TOPIC_ID))
    connection = Connection(
        gateway_to(NodeCalls(node.api), InflightBytes()), on_open=lambda _: None, on_close=lambda _: None
    )
    connection.connection_made(cast(Any, wire))

    async def fetched(session: int, epoch: int, offsets: dict[Place, int], access: Access) -> Struct:
        connection._access = access
        fields = fetch_of(TOPIC, b"") | asked(session, epoch, offsets)
        body = b"".join(compile_encoder(request_message(ApiKey.FETCH), BY_NAME)(fields))
        frame = struct.pack(">hhihB", ApiKey.FETCH, BY_NAME, 7, -1, 0) + body
        connection.data_received(struct.pack(">i", len(frame)) + frame)
        for _ in range(50):
            await asyncio.sleep(0)
        answer = b"".join(map(bytes, wire.writes.pop()))
        return compile_decoder(response_message(ApiKey.FETCH), BY_NAME)(memoryview(answer), 9)

    allowed, denied = access_of((Operation.READ, Resource.TOPIC, TOPIC)), access_of()
    number = (await fetched(0, 0, {(TOPIC, 0): 0}, allowed))["session_id"]
    assert number
    assert (await fetched(number, 1, {}, allowed))["responses"] == []
    answer = await fetched(number, 2, {}, denied)
    assert answer["session_id"] == number
    assert [part["error_code"] for part in answer["responses"][0]["partitions"]] == [
        KafkaError.TOPIC_AUTHORIZATION_FAILED
    ]
    assert heard(await fetched(number, 3, {}, allowed)) == [(TOPIC, 0)]
    assert (await fetched(number, 9, {}, allowed))["error_code"] == BAD_EPOCH


# ------------------------------------------------------------------------------------------------------ bounds
@pytest.mark.parametrize(
    ("size", "after_s", "newcomer", "is_evicted"),
    [
        (2, 0, 3, False),  # young
        (2, KAFKA_FETCH_SESSION_STALE_S + 1, 1, True),  # stale
        (2, -1, 3, True),  # in use, and smaller
        (2, -1, 2, False),  # in use, and as large
    ],
)
def test_which_session_makes_room(
    monkeypatch: pytest.MonkeyPatch, size: int, after_s: int, newcomer: int, is_evicted: bool
) -> None:
    """A negative time: they were used to the end."""
    monkeypatch.setattr("smq.coordinator.kafka.fetch_sessions.KAFKA_FETCH_SESSIONS_MAX", 3)
    now, changes, budget = [0.0], ProcessMeasures().fetch_sessions, ByteBudget(1 << 30)
    sessions = FetchSessions(budget, changes, lambda: now[0])
    numbers = [opened(sessions, *numbered(each)) for each in (size + 3, size, size + 1)]
    now[0] += abs(after_s)
    if after_s < 0:
        now[0] += KAFKA_FETCH_SESSION_STALE_S
        for number in numbers:
            call(sessions, asked(number, 1, {}))
    assert (opened(sessions, *numbered(newcomer)) != 0) is is_evicted
    gone = [number for number in numbers if number not in sessions._sessions]
    assert gone == [numbers[1] if after_s < 0 else numbers[0]] * is_evicted
    assert changes.by_labels.get(("evicted",), 0) == is_evicted
    held = sum(len(each.places) for each in sessions._sessions.values())
    assert budget.used_bytes == held * KAFKA_FETCH_SESSION_PARTITION_BYTES


def test_the_session_that_was_used_least_recently_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.coordinator.kafka.fetch_sessions.KAFKA_FETCH_SESSIONS_MAX", 2)
    now = [0.0]
    sessions = FetchSessions(ByteBudget(1 << 30), now_s=lambda: now[0])
    first, second = opened(sessions, ("t", 0)), opened(sessions, ("t", 0))
    now[0] += KAFKA_FETCH_SESSION_STALE_S + 1
    call(sessions, asked(first, 1, {}))
    third = opened(sessions, ("t", 0))
    codes = [call(sessions, asked(*session, {}))["error_code"] for session in ((first, 2), (second, 1), (third, 1))]
    assert codes == [KafkaError.NONE, NOT_FOUND, KafkaError.NONE]


def test_sessions_are_bounded_by_number_bytes_and_what_one_may_ask_for() -> None:
    whole = numbered(KAFKA_FETCH_SESSION_PARTITIONS_MAX)
    sessions = FetchSessions(ByteBudget(1 << 30))
    assert all(opened(sessions, ("t", 0)) for _ in range(KAFKA_FETCH_SESSIONS_MAX))
    assert opened(sessions, ("t", 0)) == 0
    budget = ByteBudget(1 << 30)
    sessions = FetchSessions(budget)
    assert opened(sessions, *whole, ("u", 0)) == 0
    number = opened(sessions, *whole)
    assert call(sessions, asked(number, 1, {("u", 0): 0}))["error_code"] == NOT_FOUND
    assert budget.used_bytes == 0
    opened_count = sum(opened(sessions, *whole) != 0 for _ in range(9))
    assert opened_count * len(whole) * KAFKA_FETCH_SESSION_PARTITION_BYTES == budget.used_bytes
    assert 0 < budget.used_bytes <= KAFKA_FETCH_SESSION_BYTES_PER_NODE_MAX
    full = ByteBudget(1)
    full.take(1)
    assert opened(FetchSessions(full), ("t", 0)) == 0


def test_a_partition_takes_no_more_than_it_is_counted_for() -> None:
    sessions = FetchSessions(ByteBudget(1 << 30))
    number = opened(sessions, ("t", 0))
    size = 500
    tracemalloc.start()
    for at in range(size):  # each request brings its own copy of the longest name
        place = (str(at).rjust(249, "t"), 1_000 + at)
        marks = ((1 << 40) + at, (1 << 40) + at + 1, (1 << 40) + at + 2)
        topic = {"topic": place[0], "topic_id": NO_ID, "partitions": [row(place[1], marks=marks)]}
        answer = {"error_code": 0, "session_id": 0, "responses": [topic]}
        call(sessions, asked(number, 1 + at, {place: (1 << 50) + at}), handler=partial(answered, answer))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= size * KAFKA_FETCH_SESSION_PARTITION_BYTES


# ------------------------------------------------------------------------------------- against full fetches
class World:
    """What a node has: of each partition its marks, or the error of it. An answer has records of one partition."""

    def __init__(self) -> None:
        self.marks: dict[Place, tuple[int, int, int]] = {}
        self.codes: dict[Place, int] = {}

    def shown(self, place: Place) -> object:
        code = self.codes.get(place, 0)
        return code or self.marks.get(place, (0, 0, 0))

    def answer(self, request: Struct) -> Struct:
        topics, is_full = [], False
        for topic in request["topics"]:
            parts = []
            for asked_for in topic["partitions"]:
                place, at = (topic["topic"], asked_for["partition"]), asked_for["fetch_offset"]
                code, marks = self.codes.get(place, 0), self.marks.get(place, (0, 0, 0))
                has_records = not code and not is_full and at < marks[0]
                is_full = is_full or has_records
                records = (b"%s %d at %d" % (place[0].encode(), place[1], at),) if has_records else ()
                parts.append(row(place[1], code=code, marks=(-1, -1, -1) if code else marks, records=records))
            topics.append(topic | {"partitions": parts})
        return {"error_code": KafkaError.NONE, "session_id": 0, "responses": topics}


class Client:
    """Sends what is different from its last request, and applies what it hears."""

    def __init__(self) -> None:
        self.wants: dict[Place, int] = {}
        self.sent: dict[Place, int] = {}
        self.view: dict[Place, object] = {}
        self.session = self.epoch = 0

    def fetch(self, sessions: FetchSessions, world: World) -> bool:
        """Whether the answer was one."""
        is_full = self.epoch == 0
        changed = self.wants if is_full else {p: at for p, at in self.wants.items() if self.sent.get(p) != at}
        gone = () if is_full else tuple(p for p in self.sent if p not in self.wants)
        answer = call(sessions, asked(self.session, self.epoch, dict(changed), gone), handler=world.answer)
        self.sent = dict(self.wants)
        if answer["error_code"]:
            self.epoch = 0
            return False
        self.session = answer["session_id"]
        self.epoch = self.epoch + 1 if self.session else 0
        self.view = {} if is_full else {p: seen for p, seen in self.view.items() if p in self.wants}
        for topic in answer["responses"]:
            for part in topic["partitions"]:
                place = (topic["topic"], part["partition_index"])
                marks = (part["high_watermark"], part["last_stable_offset"], part["log_start_offset"])
                self.view[place] = part["error_code"] or marks
                for record in part["records"]:
                    assert record == b"%s %d at %d" % (place[0].encode(), place[1], self.wants[place])
                    self.wants[place] += 1
        return True


PLACES = [("a", 0), ("a", 1), ("b", 0)]
STEPS = st.one_of(
    st.tuples(st.just("marks"), st.sampled_from(PLACES), st.tuples(*[st.integers(0, 3)] * 3)),
    st.tuples(st.just("code"), st.sampled_from(PLACES), st.sampled_from([0, 3, 6, 29])),
    st.tuples(st.just("want"), st.sampled_from(PLACES), st.integers(0, 3)),
    st.tuples(st.just("forget"), st.sampled_from(PLACES), st.none()),
    st.tuples(st.sampled_from(["restart", "others", "later", "fetch"]), st.none(), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_a_client_of_a_session_sees_what_full_fetches_show(steps: list[tuple[str, Any, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("smq.coordinator.kafka.fetch_sessions.KAFKA_FETCH_SESSIONS_MAX", 1)
        budget, now, world, client = ByteBudget(1 << 30), [0.0], World(), Client()
        sessions = FetchSessions(budget, now_s=lambda: now[0])
        for step, place, value in [*steps, ("fetch", None, None)]:
            if step == "marks":
                world.marks[place] = value
            elif step == "code":
                world.codes[place] = value
            elif step == "want":
                client.wants[place] = value
            elif step == "forget":
                client.wants.pop(place, None)
            elif step == "restart":
                sessions = FetchSessions(budget := ByteBudget(1 << 30), now_s=lambda: now[0])
            elif step == "others":
                opened(sessions, *numbered(9), user="other")
            elif step == "later":
                now[0] += KAFKA_FETCH_SESSION_STALE_S + 1
            elif client.fetch(sessions, world) or client.fetch(sessions, world):
                assert client.view == {wanted: world.shown(wanted) for wanted in client.wants}
            else:
                pytest.fail("a full fetch never fails")
            held = sum(len(each.places) for each in sessions._sessions.values())
            assert budget.used_bytes == held * KAFKA_FETCH_SESSION_PARTITION_BYTES


def test_partitions_with_records_take_turns() -> None:
    sessions, world, client = FetchSessions(ByteBudget(1 << 30)), World(), Client()
    for place in PLACES:
        world.marks[place], client.wants[place] = (9, 9, 0), 0
    for turn in count(1):
        assert client.fetch(sessions, world)
        assert max(client.wants.values()) - min(client.wants.values()) <= 1
        if turn == 9:
            break
    assert set(client.wants.values()) == {3}
