"""Fetch sessions (KIP-227): a consumer of many partitions says only what is different from its last request, and hears
only of those that have changed.

Owns the sessions of a node, their bounds, and which of them makes room for another. A session only completes requests
and shortens answers: between the two, rights are checked and records are read as for any other fetch. It belongs to a
user, not to a connection. It may end at any time, and its client then begins with a full request. `connection` asks it.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.limits import (
    KAFKA_FETCH_SESSION_BYTES_PER_NODE_MAX,
    KAFKA_FETCH_SESSION_PARTITION_BYTES,
    KAFKA_FETCH_SESSION_PARTITIONS_MAX,
    KAFKA_FETCH_SESSION_STALE_S,
    KAFKA_FETCH_SESSIONS_MAX,
)
from smq.coordinator.service.byte_budget import ByteBudget
from smq.replication.monitoring.measures import Counter, ProcessMeasures

BY_ID_VERSION: Final = 13
_INITIAL, _FINAL = 0, -1  # the epochs of full requests: one wants a session, the other ends it
_NUMBER_MAX: Final = 2**31 - 1  # of epochs and of sessions
_ROW: Final = ("partition", "current_leader_epoch", "fetch_offset", "partition_max_bytes")  # what a fetch needs of it
_Key: TypeAlias = tuple[str, bytes, int]  # topic and id, of which the request's version has one, and the partition


class SessionRefusal(Exception):
    """There is no such session, or it is elsewhere. `answer` says so; the client begins with a full request."""

    def __init__(self, code: KafkaError) -> None:
        super().__init__(code.name)
        self.answer: Struct = {"throttle_time_ms": 0, "error_code": code, "session_id": 0, "responses": []}


@dataclass(slots=True)
class _Place:
    row: Struct  # what the client asks for; replaced, not changed: a fetch may be using it
    told: tuple[int, int, int] | None = None  # the marks that it heard last; None: it has to hear of it in any case


class _Session:
    """The partitions in the order of their turns: those that gave records last come last."""

    __slots__ = ("began_s", "by_id", "epoch", "owner", "places", "used_s")

    def __init__(self, owner: str, now_s: float, *, by_id: bool) -> None:
        self.owner = owner
        self.by_id = by_id
        self.began_s = self.used_s = now_s
        # Of the next request. None while one is under way: its answer has to be known before the next one's.
        self.epoch: int | None = 1
        self.places: dict[_Key, _Place] = {}

    def ask(self, topics: list[Struct]) -> None:
        for topic in topics:
            for part in topic["partitions"]:
                key = (topic["topic"], topic["topic_id"], part["partition"])
                row = {name: part[name] for name in _ROW}
                if (place := self.places.get(key)) is None:
                    self.places[key] = _Place(row)
                else:
                    place.row = row

    def forget(self, topics: list[Struct]) -> None:
        for topic in topics:
            for number in topic["partitions"]:
                self.places.pop((topic["topic"], topic["topic_id"], number), None)

    @property
    def topics(self) -> list[Struct]:
        """As a full request lists them."""
        out: list[Struct] = []
        last: tuple[str, bytes] | None = None
        for (name, topic_id, _), place in self.places.items():
            if (name, topic_id) != last:
                last = (name, topic_id)
                out.append({"topic": name, "topic_id": topic_id, "partitions": []})
            out[-1]["partitions"].append(place.row)
        return out

    def tells(self, topic: Struct, part: Struct) -> bool:
        """Whether the client has to hear of this part of an answer, which it then has heard."""
        key = (topic["topic"], topic["topic_id"], part["partition_index"])
        marks = (part["high_watermark"], part["last_stable_offset"], part["log_start_offset"])
        is_plain = part["error_code"] == KafkaError.NONE and part.get("preferred_read_replica", -1) == -1
        place = self.places[key]
        is_known, place.told = place.told == marks, marks if is_plain else None
        if part["records"]:
            self.places[key] = self.places.pop(key)  # the others have their turn first
            return True
        return not (is_plain and is_known)


class FetchSessions:
    """Bounded by their number, and by their bytes, which count in `budget`, too. Without room a client gets no session
    and goes on with full requests. As in Kafka, a new session takes the room of one that was not used for a while, or
    that is not young any more and has fewer partitions."""

    def __init__(
        self, budget: ByteBudget, changes: Counter | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget
        self._changes = changes or ProcessMeasures().fetch_sessions
        self._now_s = now_s
        self._sessions: dict[int, _Session] = {}  # by id; the one that was used last comes last
        self._bytes = 0

    def begin(self, owner: str, version: int, request: Struct) -> Callable[[Struct], Struct] | None:
        """Completes the request to what the client wants in all. The result makes of its answer what the client has to
        hear; None: all of it. SessionRefusal."""
        by_id = version >= BY_ID_VERSION
        found = self._sessions.get(request["session_id"])
        session = found if found is not None and found.owner == owner else None
        if request["session_epoch"] in (_INITIAL, _FINAL):
            if session is not None:
                self._end(request["session_id"], "closed")
            is_wanted = request["session_epoch"] == _INITIAL
            # The list as it is now: what the user has no right to is taken from the request, but not from the session.
            return partial(self._open, owner, by_id, request["topics"]) if is_wanted else None
        if session is None:
            raise SessionRefusal(KafkaError.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != request["session_epoch"]:
            raise SessionRefusal(KafkaError.INVALID_FETCH_SESSION_EPOCH)
        if session.by_id != by_id:
            raise SessionRefusal(KafkaError.FETCH_SESSION_TOPIC_ID_ERROR)
        return self._go_on(session, request)

    def _go_on(self, session: _Session, request: Struct) -> Callable[[Struct], Struct] | None:
        number, before = request["session_id"], len(session.places)
        session.ask(request["topics"])
        session.forget(request["forgotten_topics_data"])
        grown = len(session.places) - before
        self._count(grown)
        request["topics"] = session.topics
        if not session.places:
            self._end(number, "closed")
            return None
        session.epoch = None
        session.used_s = self._now_s()
        self._sessions[number] = self._sessions.pop(number)
        if grown > 0 and not self._makes_room(0, len(session.places)):
            self._end(number, "evicted")
            raise SessionRefusal(KafkaError.FETCH_SESSION_ID_NOT_FOUND)
        return partial(_changes_for, session, number, request["session_epoch"])

    def _open(self, owner: str, by_id: bool, topics: list[Struct], answer: Struct) -> Struct:
        """The answer to a full request, with a new session if there is room."""
        count = sum(len(topic["partitions"]) for topic in topics)
        if count == 0 or self._budget.is_full or not self._makes_room(count, count, slots=1):
            return answer
        number, session = self._new_id(), _Session(owner, self._now_s(), by_id=by_id)
        session.ask(topics)
        for topic in answer["responses"]:
            for part in topic["partitions"]:
                session.tells(topic, part)
        self._sessions[number] = session
        self._count(len(session.places))
        self._changes.add(1, "opened")
        return answer | {"session_id": number}

    def _makes_room(self, more: int, size: int, *, slots: int = 0) -> bool:
        """For this many more partitions, of a session that will have `size` of them."""
        if size > KAFKA_FETCH_SESSION_PARTITIONS_MAX:
            return False
        more_bytes = more * KAFKA_FETCH_SESSION_PARTITION_BYTES
        while (
            len(self._sessions) + slots > KAFKA_FETCH_SESSIONS_MAX
            or self._bytes + more_bytes > KAFKA_FETCH_SESSION_BYTES_PER_NODE_MAX
        ):
            if (evicted := self._least_wanted(size)) is None:
                return False
            self._end(evicted, "evicted")
        return True

    def _least_wanted(self, size: int) -> int | None:
        """What may make room for a session of `size` partitions."""
        stale_s = self._now_s() - KAFKA_FETCH_SESSION_STALE_S
        for number, unused in self._sessions.items():
            if unused.used_s < stale_s:
                return number
            break  # the others were used later
        old = [(len(each.places), number) for number, each in self._sessions.items() if each.began_s < stale_s]
        smallest, number = min(old, default=(size, 0))
        return number if smallest < size else None

    def _new_id(self) -> int:
        while (number := 1 + secrets.randbelow(_NUMBER_MAX)) in self._sessions:
            pass
        return number

    def _end(self, number: int, change: str) -> None:
        self._count(-len(self._sessions.pop(number).places))
        self._changes.add(1, change)

    def _count(self, partitions: int) -> None:
        size = partitions * KAFKA_FETCH_SESSION_PARTITION_BYTES
        self._bytes += size
        if size < 0:
            self._budget.release(-size)
        else:
            self._budget.take(size)


def _changes_for(session: _Session, number: int, epoch: int, answer: Struct) -> Struct:
    """What the client of a session has not heard yet."""
    session.epoch = 1 if epoch == _NUMBER_MAX else epoch + 1
    changed: list[Struct] = []
    for topic in answer["responses"]:
        parts = [part for part in topic["partitions"] if session.tells(topic, part)]
        if parts:
            changed.append(topic | {"partitions": parts})
    return answer | {"session_id": number, "responses": changed}
