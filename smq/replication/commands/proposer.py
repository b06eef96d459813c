"""Carries commands to the Raft leader, wherever it is, and brings their replies back.

Owns the retries of proposals: every command either has a request id, under which the state machine answers a repetition
as it did the first, or is harmless when repeated. So an attempt with an unknown outcome is simply made again, until the
caller's deadline. It must never propose anything after that, because the caller may have gone on, and never report
success before this node has applied the command. A read index is requested in the same way: from the leader, without a
command. Every part that proposes uses it.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from smq.raft_state.command_codec import (
    CodecError,
    FeatureNotEnabled,
    decode_command,
    decode_reply,
    encode_command,
    encode_reply,
)
from smq.raft_state.command_table import cache_of
from smq.raft_state.commands import Command, Request
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NO_REQUEST, LogIndex, NodeId, Offset, RequestId
from smq.raft_state.replies import Done, Rejected, Reply
from smq.raft_state.state import ClusterState
from smq.replication.api import DoneFn
from smq.replication.monitoring.measures import NodeMeasures
from smq.replication.net import wire
from smq.replication.net.links import Links
from smq.replication.ports import Channel, Clock, Committed, ProposalLost, Rng
from smq.replication.raft.raft import Raft
from smq.replication.runtime.deadlines import Deadline, Deadlines

PENDING_MAX: Final = 20_000  # pending proposals per node: each is a waiting caller, a few hundred bytes
COMMAND_BYTES_MAX: Final = 1 << 20  # one Raft entry; the largest, an advance of 10,000 partitions, is half of it
_READ: Final = Done()  # the reply once a read index has been applied
_RETRY_MS: Final = 20  # after a definite "not leader": the election that it waits for takes hundreds and more


@dataclass(slots=True, eq=False)
class _Pending:
    command: bytes | None  # None: a read index is requested
    done: DoneFn[Reply]
    until_ns: int  # the caller's deadline; `deadline` is checked by a tick, and so later
    send_until_ns: int  # not sent after this; earlier than `until_ns` if callers who share a command differ
    deadline: Deadline | None = None
    sent_to: NodeId | None = None  # the current attempt's node; None while it waits for a leader
    began_ns: int = 0
    attempt: int = 0  # answers of older attempts are ignored
    was_sent: bool = False  # once it may have reached a log, a timeout is indefinite
    sends: int = 0  # how often it may have reached a log
    renewed: Callable[[], bytes] | None = (
        None  # the command with its present age, if only this node can have proposed it
    )
    numbers: list[int] = field(default_factory=list)  # request numbers given to the Raft leader


def rejection(reply: Rejected) -> SmqError:
    """The exception for the caller of a rejected command."""
    lo = None if reply.lo < 0 else Offset(reply.lo)
    hi = None if reply.hi < 0 else Offset(reply.hi)
    return SmqError(reply.code, reply.message, ErrorDetails(lo=lo, hi=hi))


class Proposer:
    """Proposals of this node, and of others when this node leads Raft."""

    def __init__(
        self,
        *,
        node_id: NodeId,
        engine: Raft,
        clock: Clock,
        rng: Rng,
        deadlines: Deadlines,
        links: Links,
        deliver: Callable[[Callable[[], None]], None],
        state: Callable[[], ClusterState],
        known_level: int,
        raft_leader: Callable[[], NodeId | None],
        measures: NodeMeasures | None = None,
    ) -> None:
        self._measures = measures if measures is not None else NodeMeasures()
        self._state = state
        self._known_level = known_level
        self._raft_leader = raft_leader
        self._node_id = node_id
        self._engine = engine
        self._clock = clock
        self._rng = rng
        self._deadlines = deadlines
        self._links = links
        self._deliver = deliver
        # Starts at a random number, so that an answer to this node's previous process is never taken for one to this.
        self._next_number = int.from_bytes(rng.randbytes(7), "big")
        self._by_number: dict[int, _Pending] = {}
        self._pending: dict[_Pending, None] = {}
        self._unapplied: list[tuple[LogIndex, int, _Pending, Reply]] = []  # heap: committed, not yet applied here
        self._tie = 0
        self._retry_scheduled = False
        self._closed: SmqError | None = None  # for all callers, once the node is stopping

    # ------------------------------------------------------------------------------------------- callers
    def propose(
        self, command: Command, timeout_ms: int, done: DoneFn[Reply], *, send_until_ns: int | None = None
    ) -> None:
        """`send_until_ns`: if it would have to be sent after this (monotonic), its outcome is unknown."""
        is_ours = False
        if isinstance(command, Request) and command.request_id == NO_REQUEST:
            is_ours = True
            command = replace(command, request_id=RequestId(self._rng.randbytes(16)), is_from_node=True)
        try:
            data = self._encoded(command)
        except CodecError as e:
            code = ErrorCode.FEATURE_NOT_ENABLED if isinstance(e, FeatureNotEnabled) else ErrorCode.INVALID_REQUEST
            self._finish_with(done, SmqError(code, str(e)))
            return
        renewed = partial(self._encoded, command) if is_ours else None
        until_ns = self._until_ns(timeout_ms)
        send_until_ns = until_ns if send_until_ns is None else min(send_until_ns, until_ns)
        self._begin(_Pending(data, done, until_ns, send_until_ns, renewed=renewed))

    def read_index(self, timeout_ms: int, done: DoneFn[Reply]) -> None:
        """`done` is called once this node has applied everything that was committed on any node at this call."""
        until_ns = self._until_ns(timeout_ms)
        self._begin(_Pending(None, done, until_ns, until_ns))

    def _until_ns(self, timeout_ms: int) -> int:
        return self._clock.monotonic_ns() + timeout_ms * 1_000_000

    def _begin(self, pending: _Pending) -> None:
        if self._closed is not None:
            closed = SmqError(self._closed.code, self._closed.message)  # its own: raising one adds to its traceback
            self._finish_with(pending.done, closed)
            return
        if len(self._pending) >= PENDING_MAX:
            details = ErrorDetails(retry_after_ms=100)
            error = SmqError(ErrorCode.OVERLOADED, f"{PENDING_MAX} proposals are waiting", details)
            self._finish_with(pending.done, error)
            return
        pending.began_ns = self._clock.monotonic_ns()
        pending.deadline = self._deadlines.add(pending.until_ns, lambda: self._expire(pending))
        self._pending[pending] = None
        self._attempt(pending)

    def _encoded(self, command: Command) -> bytes:
        """With the age of its request: a retry that is too late to be recognised is refused. FeatureNotEnabled if a
        node of the cluster may not know the command: it would stop at it."""
        state = self._state()
        if isinstance(command, Request):
            command = replace(command, replies_before=cache_of(state, command).counted)
        data = encode_command(command, state.feature_level)
        if len(data) > COMMAND_BYTES_MAX:
            raise CodecError(f"the request makes a command of {len(data)} bytes, the limit is {COMMAND_BYTES_MAX}")
        return data

    def _attempt(self, pending: _Pending) -> None:
        if self._clock.monotonic_ns() > pending.send_until_ns:
            self._expire(pending)  # what woke this node, after a pause perhaps, came before its tick
            return
        pending.attempt += 1
        pending.sent_to = None
        leader = self._engine.leader
        if self._engine.is_leader:
            pending.sent_to = self._node_id
            pending.was_sent = True
            pending.sends += 1
            attempt = pending.attempt
            if pending.command is None:
                self._engine.read_index(lambda outcome: self._on_local_read(pending, attempt, outcome))
            else:
                self._engine.propose(pending.command, lambda outcome: self._on_local(pending, attempt, outcome))
        elif leader is not None and leader != self._node_id:
            self._next_number = (self._next_number + 1) & 0xFFFF_FFFF_FFFF_FFFF
            number, command = self._next_number, pending.command
            message = wire.ReadIndex(number) if command is None else wire.Propose(number, command)
            if self._links.send(leader, Channel.CONTROL, message):
                pending.sent_to = leader
                pending.was_sent = True
                pending.sends += 1
                pending.numbers.append(self._next_number)
                self._by_number[self._next_number] = pending

    def _on_local(self, pending: _Pending, attempt: int, outcome: Committed | ProposalLost) -> None:
        if pending not in self._pending or attempt != pending.attempt:
            return
        if isinstance(outcome, Committed):
            self._conclude(pending, outcome.applied.reply)
        else:
            pending.sent_to = None
            self._schedule_retry()

    def _on_local_read(self, pending: _Pending, attempt: int, outcome: LogIndex | ProposalLost) -> None:
        if pending not in self._pending or attempt != pending.attempt:
            return
        if isinstance(outcome, ProposalLost):
            pending.sent_to = None
            self._schedule_retry()
        else:
            self._conclude_at(outcome, pending, _READ)

    def _expire(self, pending: _Pending) -> None:
        if pending in self._pending:
            self._conclude(pending, self.late())

    def late(self) -> SmqError:
        """For a caller whose deadline has passed: the command may have been committed all the same."""
        if self._raft_leader() is None:
            return SmqError(ErrorCode.NO_QUORUM, "no Raft leader is known and heard")
        return SmqError(ErrorCode.TIMED_OUT, "the Raft leader did not answer in time")

    def _conclude(self, pending: _Pending, result: Reply | SmqError) -> None:
        if isinstance(result, Rejected) and result.code is ErrorCode.REQUEST_EXPIRED and self._renew(pending):
            return
        del self._pending[pending]
        for number in pending.numbers:
            self._by_number.pop(number, None)
        if pending.deadline is not None:
            pending.deadline.cancel()
        self._count(pending, result)
        self._finish_with(pending.done, rejection(result) if isinstance(result, Rejected) else result)

    def _count(self, pending: _Pending, result: Reply | SmqError) -> None:
        """A command that the state machine rejects is committed all the same, and so is timed."""
        is_lost, took_ns = isinstance(result, SmqError), self._clock.monotonic_ns() - pending.began_ns
        if pending.command is not None:
            code = result.code.name if isinstance(result, SmqError | Rejected) else "committed"
            self._measures.proposals.add(1, code)
        if not is_lost:
            (self._measures.proposal if pending.command is not None else self._measures.read_index).observe(took_ns)

    def _renew(self, pending: _Pending) -> bool:
        """If a request was proposed once, by this node alone, its refusal means that it never ran: this node's state
        was old when it accepted the request, or very many others came first. So it may be proposed as a new one."""
        if pending.renewed is None or pending.sends > 1:
            return False
        pending.command = pending.renewed()
        pending.sends = 0
        pending.sent_to = None
        self._schedule_retry()
        return True

    def _finish_with(self, done: DoneFn[Reply], result: Reply | SmqError) -> None:
        self._deliver(lambda: done(result))

    def close(self, error: SmqError) -> None:
        """The node is stopping: every waiting caller is answered. A command that was sent may still be committed."""
        self._closed = error
        for pending in list(self._pending):
            lost = SmqError(ErrorCode.TIMED_OUT, error.message) if pending.was_sent else error
            self._conclude(pending, lost)

    # ------------------------------------------------------------------------------------------- events
    def _schedule_retry(self) -> None:
        if not self._retry_scheduled:
            self._retry_scheduled = True
            self._clock.call_later(_RETRY_MS, self._retry)

    def _retry(self) -> None:
        self._retry_scheduled = False
        for pending in [p for p in self._pending if p.sent_to is None]:
            self._attempt(pending)

    def on_leader_change(self) -> None:
        """Attempts that went elsewhere are made again at the new leader."""
        leader = self._engine.leader
        if leader is not None:
            for pending in [p for p in self._pending if p.sent_to != leader]:
                self._attempt(pending)

    def on_session_close(self, peer: NodeId) -> None:
        for pending in self._pending:
            if pending.sent_to == peer:
                pending.sent_to = None

    def on_session_open(self, peer: NodeId) -> None:
        if peer == self._engine.leader:
            self._retry()

    def on_applied(self, index: LogIndex) -> None:
        while self._unapplied and self._unapplied[0][0] <= index:
            _, _, pending, reply = heapq.heappop(self._unapplied)
            if pending in self._pending:
                self._conclude(pending, reply)

    # ------------------------------------------------------------------------------------------- messages
    def on_propose(self, peer: NodeId, message: wire.Propose) -> None:
        """Another node's proposal: this node may be the Raft leader. CodecError if it does not decode."""
        decode_command(message.command, self._known_level)  # what does not decode must never enter the log

        def reply_with(outcome: Committed | ProposalLost) -> None:
            if isinstance(outcome, Committed):
                reply = encode_reply(outcome.applied.reply, self._state().feature_level)
                answer = wire.Proposed(message.request, wire.COMMITTED, outcome.index, reply)
            else:
                code = wire.NOT_LEADER if outcome is ProposalLost.NOT_LEADER else wire.UNKNOWN
                answer = wire.Proposed(message.request, code, LogIndex(0), b"")
            self._links.send(peer, Channel.CONTROL, answer)

        self._engine.propose(message.command, reply_with)

    def on_read_index(self, peer: NodeId, message: wire.ReadIndex) -> None:
        """Another node reads: this node may be the Raft leader."""

        def reply_with(outcome: LogIndex | ProposalLost) -> None:
            if isinstance(outcome, ProposalLost):
                answer = wire.Proposed(message.request, wire.NOT_LEADER, LogIndex(0), b"")
            else:
                answer = wire.Proposed(message.request, wire.COMMITTED, outcome, encode_reply(_READ))
            self._links.send(peer, Channel.CONTROL, answer)

        self._engine.read_index(reply_with)

    def on_proposed(self, message: wire.Proposed) -> None:
        pending = self._by_number.pop(message.request, None)
        if pending is None:
            return
        if message.outcome != wire.COMMITTED:
            if message.request == pending.numbers[-1]:
                pending.sent_to = None
                self._schedule_retry()
            return
        try:
            reply = decode_reply(message.reply, self._known_level)
        except CodecError as e:  # it was carried out or refused: only the answer is lost
            unreadable = f"this node cannot read the Raft leader's reply: {e}"
            self._conclude(pending, SmqError(ErrorCode.TIMED_OUT, unreadable))
            return
        self._conclude_at(message.index, pending, reply)

    def _conclude_at(self, index: LogIndex, pending: _Pending, reply: Reply) -> None:
        """Now, or when this node has applied the index."""
        if index <= self._engine.applied_index:
            self._conclude(pending, reply)
        else:
            self._tie += 1
            heapq.heappush(self._unapplied, (index, self._tie, pending, reply))
