"""The engine around its turns: sessions, the end, and changes made outside a turn."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from smq.raft_state.ids import DiskId, LogIndex, NodeId
from smq.raft_state.replies import Applied, Done
from smq.replication.net.disk_marks import MARKS, START_BYTES, Mark
from smq.replication.ports import Buffer, Op, Put, Table
from smq.replication.raft.applier import LONG_BYTES
from smq.replication.raft.messages import (
    NO_ANSWER,
    REGULAR,
    Append,
    AppendReply,
    Confirm,
    Message,
    RequestVote,
    TermNotice,
    decode,
    encode,
)
from smq.replication.raft.raft import Raft as Engine
from smq.replication.raft.timing import RaftTiming
from tests.unit.replication.raft.test_turn_results import Raft, chunk, sent, success

ME, A, B = NodeId(1), NodeId(2), NodeId(3)
DISK, OTHER_DISK = DiskId(b"d" * 16), DiskId(b"o" * 16)
REQUEST = RequestVote(term=5, last_index=9, last_term=4, disk=DISK, is_admitted=True)


class Desk:
    """Node 1 of three, its loop and its disk, which a test moves on. Stands for Clock, Disk and StateMachine in turn,
    with only what the engine uses here."""

    def __init__(self) -> None:
        self.durable_seq = 0
        self.sent: list[str] = []
        self.rows: dict[bytes, Buffer] = {}  # of Raft's meta table, as submitted
        self._calls: deque[Callable[[], None]] = deque()
        self._writes: deque[Callable[[], None] | None] = deque()
        self.engine = Engine(
            node_id=ME,
            peers=[A, B],
            clock=self,  # type: ignore[arg-type]  # a part of the port
            rng=Random(1),
            disk=self,  # type: ignore[arg-type]  # a part of the port
            machine=self,  # type: ignore[arg-type]  # a part of the port
            send=self._send,
            flush=lambda: self.sent.append("flush"),
            timing=RaftTiming(),
            disk_id=lambda: DISK,
            registered_disk=lambda _node: DISK,
            born_disk=lambda _node: None,
            on_leader_change=lambda: None,
            on_fatal=self._raise,
        )
        for _ in self.engine.start():
            pass
        self.engine.on_session_open(A)
        self.turn()
        self.sync()

    def monotonic_ns(self) -> int:
        return 1_000_000_000

    def call_soon(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def get(self, _table: Table, _key: bytes) -> bytes | None:
        return None

    def scan(self, *_range: object, **_limits: object) -> list[tuple[bytes, bytes]]:
        return []

    def submit(self, ops: Sequence[Op], done: Callable[[], None] | None = None) -> int:
        self.rows |= {op.key: op.value for op in ops if isinstance(op, Put) and op.table is Table.RAFT_META}
        self._writes.append(done)
        return self.submitted_seq

    @property
    def submitted_seq(self) -> int:
        return self.durable_seq + len(self._writes)

    def _send(self, peer: NodeId, parts: Sequence[Buffer]) -> None:
        self.sent.append(f"{type(decode(memoryview(b''.join(parts)))).__name__} to {peer}")

    def apply(self, index: LogIndex, _command: bytes) -> Applied:
        self.sent.append(f"entry {index} applied")
        return Applied(reply=Done())

    def settle(self) -> bool:
        return True

    def _raise(self, error: BaseException) -> None:
        raise error

    def receive(self, peer: NodeId, message: Message) -> None:
        self.engine.on_message(peer, memoryview(b"".join(encode(message))))

    def turn(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def sync(self) -> None:
        while self._writes:
            self.durable_seq += 1
            if (done := self._writes.popleft()) is not None:
                done()

    def reconnect(self, peer: NodeId) -> None:
        self.engine.on_session_close(peer)
        self.engine.on_session_open(peer)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_what_was_not_read_of_a_session_goes_with_it(desk: Desk) -> None:
    desk.receive(A, REQUEST)
    desk.receive(B, TermNotice(term=2))
    desk.reconnect(A)
    desk.turn()
    assert desk.engine.term == 2


def test_what_a_session_waits_for_goes_with_it(desk: Desk) -> None:
    desk.receive(A, REQUEST)
    desk.turn()
    desk.reconnect(A)
    desk.turn()
    desk.sync()
    assert desk.sent == []
    desk.receive(A, Append(term=5, number=1, commit=1, prev_index=1, prev_term=0, entries=[]))
    desk.turn()
    assert desk.sent == ["AppendReply to 2"]


def test_answers_leave_before_the_state_machine_does_its_share_of_the_turn(desk: Desk) -> None:
    long, short = (bytes([REGULAR]) + b"x" * size for size in (LONG_BYTES, 1))
    desk.receive(A, Append(term=5, number=1, commit=1, prev_index=1, prev_term=0, entries=[(5, short), (5, long)]))
    desk.turn()
    desk.sync()
    desk.sent.clear()
    desk.receive(A, Append(term=5, number=NO_ANSWER, commit=3, prev_index=3, prev_term=5, entries=[]))
    desk.receive(A, Confirm(term=5, number=1))
    desk.turn()
    assert desk.sent == ["Confirmed to 2", "entry 2 applied", "flush", "entry 3 applied"]


def test_what_a_disk_reported_in_a_session_is_doubted_no_longer_than_that(desk: Desk) -> None:
    desk.engine.marks.receive(A, Mark(A, OTHER_DISK, b"s" * START_BYTES, 0, 0), ())
    assert desk.engine.voters.counts(A, DISK) is False
    desk.reconnect(A)
    assert desk.engine.voters.counts(A, DISK) is True


def test_after_its_end_nothing_leaves(desk: Desk) -> None:
    desk.receive(A, REQUEST)
    desk.turn()
    desk.engine.stop()
    desk.sync()
    desk.receive(A, REQUEST)
    desk.turn()
    assert desk.sent == []


def test_a_row_is_rewritten_immediately(desk: Desk) -> None:
    desk.engine.rewrite_row(Table.RAFT_LOG, (1).to_bytes(8))
    assert desk.submitted_seq == desk.durable_seq + 1


def test_the_row_of_the_vote_is_rewritten_with_the_term_and_the_vote(desk: Desk) -> None:
    desk.receive(A, REQUEST)
    desk.turn()
    desk.sync()
    voted = desk.rows[b"vote"]
    desk.rows.clear()
    desk.engine.rewrite_row(Table.RAFT_META, b"vote")
    assert desk.submitted_seq == desk.durable_seq + 1
    assert desk.rows[b"vote"] == voted


def test_what_other_disks_reported_is_stored_without_waiting_for_another_write(desk: Desk) -> None:
    desk.receive(A, REQUEST)
    desk.turn()
    desk.sync()
    desk.rows.clear()
    desk.engine.marks.receive(A, Mark(A, DISK, b"s" * START_BYTES, 3, 7), ())
    assert desk.rows == {}
    desk.engine.flush_marks()
    assert MARKS.pack(desk.engine.marks.known) in desk.rows[b"marks"]
    assert len(desk.engine.marks.known) == 1
    desk.rows.clear()
    desk.engine.flush_marks()
    assert desk.rows == {}, "there is nothing new"
    desk.engine.marks.receive(A, Mark(A, DISK, b"s" * START_BYTES, 3, 8), ())
    desk.engine.stop()
    desk.engine.flush_marks()
    assert desk.rows == {}, "the engine has ended"


def test_rule_18_an_acknowledgement_counts_only_in_its_session() -> None:
    """After the next one there may be another disk."""
    raft = Raft()
    first = raft.elected()
    raft.turn((A, success(1, 2, 1)))
    raft.core.session_closed(A)
    raft.core.session_opened(A)
    raft.persist(first)
    raft.turn()
    assert raft.core.commit_index == 1
    raft.turn((A, success(1, 2, 9)))
    assert raft.core.commit_index == 2


def test_a_snapshot_is_not_assembled_from_two_sessions() -> None:
    raft = Raft()
    whole = chunk()
    raft.turn((A, replace(whole, data=whole.data[:4])))
    raft.core.session_closed(A)
    raft.core.session_opened(A)
    ready = raft.turn((A, replace(whole, offset=4, data=whole.data[4:])))
    reply = sent(ready, AppendReply)[-1].message
    assert isinstance(reply, AppendReply)
    assert reply.reset
    assert not raft.core.is_installing
