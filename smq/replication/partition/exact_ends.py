"""Where partitions end: the questions of this node to their leaders, and its answers as a leader.

Owns rule 25: a partition's end is what its leader knows to be committed, after a read index that began after the
question. Nothing else may report an end as exact, or say that an offset lies beyond it. A question goes to each leader
once for all partitions that it leads, and costs it one read index. A partition without records here (rule 19) needs no
leader: its offsets are in the replicated state. `replicas` makes it; reads and the node's requests ask it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Incarnation, LogIndex, NodeId, PartitionId
from smq.replication.api import Cancel, DoneFn, PartitionEnd
from smq.replication.commands.coalescing import Barriers
from smq.replication.host import Host
from smq.replication.net import wire
from smq.replication.partition.admission import leader_error
from smq.replication.partition.replica import Replica
from smq.replication.ports import Channel
from smq.replication.runtime.deadlines import Deadline

WAITING_MAX: Final = 100_000  # partitions that callers of this node wait for: some 20 MB
ANSWERING_MAX: Final = 100_000  # partitions in other nodes' questions that wait for a read index here: some 6 MB
ATTEMPT_MS: Final = 500  # a question without an answer for this long is repeated, or asked of another leader
QUERY_MS_MAX: Final = 60_000  # no caller waits longer, whatever another node says
RETRY_MS: Final = 50  # after "not the leader" or "not known yet": an election and its first commit take longer
_FINAL: Final = (ErrorCode.OVERLOADED, ErrorCode.SHUTTING_DOWN, ErrorCode.UPGRADE_NEEDED)  # of a read index

Ends = Mapping[PartitionId, PartitionEnd | SmqError]


@dataclass(slots=True, eq=False)
class _Caller:
    missing: dict[PartitionId, None]
    until_ns: int
    done: Callable[[Ends], None]
    at_leader: bool  # only this node is asked
    found: dict[PartitionId, PartitionEnd | SmqError] = field(default_factory=dict)
    deadline: Deadline | None = None


_Asked = dict[PartitionId, list[_Caller]]


@dataclass(slots=True, eq=False)
class _Question:
    """Stays until it is answered, or its callers are done: an answer to it is valid for them, however late it comes."""

    node: NodeId
    asked: _Asked
    deadline: Deadline  # of the attempt
    withdraw: Cancel | None = None  # this node's own read index


class ExactEnds:
    def __init__(self, host: Host, barriers: Barriers, replica: Callable[[PartitionId], Replica | None]) -> None:
        """`replica`: this node's own replica of a partition."""
        self._host = host
        self._barriers = barriers
        self._replica = replica
        self._next_number = 0
        self._questions: dict[int, _Question] = {}  # a partition of a caller is in one at most
        self._unasked: list[tuple[PartitionId, _Caller]] = []  # of this turn: they share one question per leader
        self._refused: list[tuple[PartitionId, _Caller]] = []  # to be asked again soon
        self._callers: dict[_Caller, None] = {}
        self._waiting = 0  # partitions, over all callers
        self._answering = 0  # partitions, over all questions of others
        self._in_answer: set[tuple[NodeId, Incarnation, int]] = set()  # these questions
        self._closed: SmqError | None = None

    # ------------------------------------------------------------------------------------------- callers
    def ask(
        self, pids: Iterable[PartitionId], timeout_ms: int, done: Callable[[Ends], None], *, at_leader: bool = False
    ) -> Cancel:
        """The end of each partition: exact, or OFFSET_NOT_AVAILABLE if it did not become known in time. UNKNOWN_TOPIC
        for one that this node, after a read index, does not have in its state. With `at_leader`, another node's
        partition is NOT_LEADER or LEADER_UNAVAILABLE. Once withdrawn, only an answer that is on its way may come."""
        wanted = dict.fromkeys(pids)
        if not wanted or self._closed is not None or self._waiting + len(wanted) > WAITING_MAX:
            refused = {pid: self._refusal() for pid in wanted}
            self._host.deliver(lambda: done(refused))
            return _nothing
        at_ns = self._host.clock.monotonic_ns() + timeout_ms * 1_000_000
        caller = _Caller(wanted, at_ns, done, at_leader)
        caller.deadline = self._host.deadlines.add(at_ns, partial(self._expire, caller))
        self._callers[caller] = None
        self._waiting += len(wanted)
        if not self._unasked:
            self._host.clock.call_soon(self._flush)
        self._unasked += [(pid, caller) for pid in wanted]
        return partial(self._withdraw, caller)

    def ask_one(self, pid: PartitionId, timeout_ms: int, done: DoneFn[PartitionEnd]) -> Cancel:
        return self.ask([pid], timeout_ms, lambda ends: done(ends[pid]))

    def _withdraw(self, caller: _Caller) -> None:
        """Its partitions are not asked for again, and its room is free."""
        if caller in self._callers:
            self._waiting -= len(caller.missing)
            self._forget(caller)

    def _refusal(self) -> SmqError:
        """A new one each time: raising one adds to its traceback."""
        if self._closed is not None:
            return SmqError(self._closed.code, self._closed.message)
        details = ErrorDetails(retry_after_ms=200)
        return SmqError(ErrorCode.OVERLOADED, f"{self._waiting} partitions wait for their ends", details)

    def _is_missing(self, pid: PartitionId, caller: _Caller) -> bool:
        return caller in self._callers and pid in caller.missing

    def _give(self, caller: _Caller, pid: PartitionId, end: PartitionEnd | SmqError) -> None:
        if self._is_missing(pid, caller):
            del caller.missing[pid]
            self._waiting -= 1
            caller.found[pid] = end
            if not caller.missing:
                self._conclude(caller)

    def _conclude(self, caller: _Caller) -> None:
        self._forget(caller)
        self._host.deliver(lambda: caller.done(caller.found))

    def _forget(self, caller: _Caller) -> None:
        del self._callers[caller]
        if caller.deadline is not None:
            caller.deadline.cancel()

    def _expire(self, caller: _Caller) -> None:
        for pid in list(caller.missing):
            self._give(caller, pid, self._late(pid))

    def _late(self, pid: PartitionId) -> SmqError:
        part = self._host.state.partition(pid)
        leader = part.leader if part is not None and not part.is_external else None
        if leader is None or leader == self._host.node_id:
            why = "this node reached no majority of the cluster in time"
        else:
            why = f"node {leader}, its leader as far as this node knows, did not report it in time"
        details = ErrorDetails(retry_after_ms=100, leader=leader)
        return SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, f"the partition's end is not known: {why}", details)

    def close(self, error: SmqError) -> None:
        """The node is stopping: every caller gets the error, also later ones."""
        self._closed = error
        for caller in list(self._callers):
            for pid in list(caller.missing):
                self._give(caller, pid, self._refusal())

    # ------------------------------------------------------------------------------------------- questions
    def _flush(self) -> None:
        unasked, self._unasked = self._unasked, []
        by_node: dict[NodeId, _Asked] = {}
        for pid, caller in unasked:
            if self._is_missing(pid, caller):
                by_node.setdefault(self._node_to_ask(pid, caller), {}).setdefault(pid, []).append(caller)
        for node, asked in by_node.items():
            for some in _chunks(asked):
                self._question(node, some)

    def _node_to_ask(self, pid: PartitionId, caller: _Caller) -> NodeId:
        part = self._host.state.partition(pid)
        is_here = caller.at_leader or part is None or part.is_external
        return self._host.node_id if is_here or part is None else part.leader

    def _question(self, node: NodeId, asked: _Asked) -> None:
        self._next_number += 1
        number = self._next_number
        question = self._questions[number] = _Question(node, asked, self._attempt_deadline(number))
        if node == self._host.node_id:
            wait_ms = self._time_left_ms(asked)
            question.withdraw = self._barriers.wait(wait_ms, partial(self._on_own_barrier, number))
        else:
            self._send(number, question)

    def _attempt_deadline(self, number: int) -> Deadline:
        at_ns = self._host.clock.monotonic_ns() + ATTEMPT_MS * 1_000_000
        return self._host.deadlines.add(at_ns, partial(self._repeat, number))

    def _send(self, number: int, question: _Question) -> None:
        if not self._host.links.send(question.node, Channel.CONTROL, self._query(number, question.asked)):
            self._ask_again(number)

    def _query(self, number: int, asked: _Asked) -> wire.EndsQuery:
        return wire.EndsQuery(number, self._host.incarnation, self._time_left_ms(asked), tuple(asked))

    def _time_left_ms(self, asked: _Asked) -> int:
        """Of the most patient caller."""
        until_ns = max(caller.until_ns for callers in asked.values() for caller in callers)
        return max(1, (until_ns - self._host.clock.monotonic_ns()) // 1_000_000)

    def _take(self, number: int) -> _Question | None:
        question = self._questions.pop(number, None)
        if question is not None:
            question.deadline.cancel()
            if question.withdraw is not None:
                question.withdraw()
        return question

    def _repeat(self, number: int) -> None:
        """The same question to the same node, whose answer may be on its way. It keeps the callers that still wait, but
        for those whose leader has changed."""
        question = self._questions[number]
        staying: _Asked = {}
        moved: list[tuple[PartitionId, _Caller]] = []
        for pid, callers in question.asked.items():
            for caller in callers:
                if not self._is_missing(pid, caller):
                    continue
                if self._node_to_ask(pid, caller) == question.node:
                    staying.setdefault(pid, []).append(caller)
                else:
                    moved.append((pid, caller))
        if moved:
            self._retry(moved)
        if not staying:
            self._take(number)
            return
        question.asked = staying
        question.deadline = self._attempt_deadline(number)
        if question.node != self._host.node_id:
            self._send(number, question)

    def _ask_again(self, number: int) -> None:
        """What was asked will not be answered."""
        question = self._take(number)
        if question is not None:
            self._retry((pid, caller) for pid, callers in question.asked.items() for caller in callers)

    def _retry(self, refused: Iterable[tuple[PartitionId, _Caller]]) -> None:
        if not self._refused:
            self._host.clock.call_later(RETRY_MS, self._ask_refused)
        self._refused += refused

    def _ask_refused(self) -> None:
        refused, self._refused = self._refused, []
        if not self._unasked:
            self._host.clock.call_soon(self._flush)
        self._unasked += refused

    def _on_own_barrier(self, number: int, result: LogIndex | SmqError) -> None:
        question = self._questions.get(number)
        if question is None:
            return
        if not isinstance(result, SmqError):
            self._on_ends(number, self._own_ends(tuple(question.asked)))
        elif result.code not in _FINAL:
            self._ask_again(number)
        else:
            self._take(number)
            for pid, callers in question.asked.items():
                for caller in callers:
                    self._give(caller, pid, result)

    def _on_ends(self, number: int, ends: Sequence[wire.End]) -> None:
        question = self._take(number)
        if question is None:
            return
        by_pid = {end.partition: end for end in ends}
        refused: list[tuple[PartitionId, _Caller]] = []
        for pid, callers in question.asked.items():
            end = by_pid.get(pid)
            for caller in callers:
                answer = self._answer(end, caller, question.node) if end is not None else None
                if answer is not None:
                    self._give(caller, pid, answer)
                else:
                    refused.append((pid, caller))
        if refused:
            self._retry(refused)

    def _answer(self, end: wire.End, caller: _Caller, node: NodeId) -> PartitionEnd | SmqError | None:
        """None if the question must be repeated."""
        if end.outcome is wire.EndOutcome.KNOWN:
            return PartitionEnd(end.epoch, node, end.log_start, end.lso, end.hwm, end.log_end)
        if node != self._host.node_id:
            return None  # another node's refusal says nothing of the state that this node has applied
        if end.outcome is wire.EndOutcome.NO_PARTITION:
            return SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted")
        part = self._host.state.partition(end.partition)
        if caller.at_leader and end.outcome is wire.EndOutcome.NOT_LEADER and part is not None:
            return leader_error(node, self._host.state, part)
        return None

    # ------------------------------------------------------------------------------------------- as the leader
    def _own_ends(self, pids: Sequence[PartitionId]) -> tuple[wire.End, ...]:
        """For callers that have passed a read index since they were asked."""
        return tuple(map(self._own_end, pids))

    def _own_end(self, pid: PartitionId) -> wire.End:
        part = self._host.state.partition(pid)
        if part is None:
            return wire.End(pid, wire.EndOutcome.NO_PARTITION)
        if part.is_external:
            hwm = part.hwm
            return wire.End(pid, wire.EndOutcome.KNOWN, part.epoch, part.log_start, hwm, hwm, part.next_offset)
        replica = self._replica(pid)
        return end_at_leader(replica) if replica is not None else wire.End(pid, wire.EndOutcome.NOT_LEADER)

    # ------------------------------------------------------------------------------------------- messages
    def on_query(self, peer: NodeId, query: wire.EndsQuery) -> None:
        """Another node asks. Each outcome is of this node's state after a read index of its own."""
        count = len(query.partitions)
        key = (peer, query.incarnation, query.request)
        if key in self._in_answer:
            return  # repeated: the read index for the first began after the question, too
        if self._answering + count > ANSWERING_MAX:
            return  # the asker repeats its question

        def reply(result: LogIndex | SmqError) -> None:
            self._answering -= count
            self._in_answer.discard(key)
            if not isinstance(result, SmqError):
                report = wire.EndsReport(query.request, query.incarnation, self._own_ends(query.partitions))
                self._host.links.send(peer, Channel.CONTROL, report)

        self._answering += count
        self._in_answer.add(key)
        self._barriers.wait(min(query.wait_ms, QUERY_MS_MAX), reply)

    def on_report(self, peer: NodeId, report: wire.EndsReport) -> None:
        question = self._questions.get(report.request)
        if question is not None and question.node == peer and report.incarnation == self._host.incarnation:
            self._on_ends(report.request, report.ends)

    def on_session_close(self, peer: NodeId) -> None:
        for number in [number for number, question in self._questions.items() if question.node == peer]:
            self._ask_again(number)


def end_at_leader(replica: Replica) -> wire.End:
    """Rule 25, but for the read index."""
    part = replica.part
    if replica.leading is None or replica.leading != part.epoch:
        return wire.End(replica.pid, wire.EndOutcome.NOT_LEADER)
    known = replica.known_commit_point()
    if known < part.history[-1].start:
        return wire.End(replica.pid, wire.EndOutcome.NOT_KNOWN)
    log_end = max(replica.log.appended_end, known)
    return wire.End(replica.pid, wire.EndOutcome.KNOWN, part.epoch, part.log_start, replica.stable_end, known, log_end)


def _nothing() -> None:
    """Withdraws a question that was refused."""


def _chunks(asked: _Asked) -> Iterator[_Asked]:
    items = iter(asked.items())
    while some := dict(islice(items, wire.ENDS_MAX)):
        yield some
