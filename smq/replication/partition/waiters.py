"""The producers that wait for the answer to a batch, of one partition on one node.

Owns rule 10: when a producer is answered, and with what; and the times of the batches that are timed on their way. It
must never answer before the replica's commit point, or with acks=1 its disk, says so. Only `replica` imports it.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Offset, TsNs
from smq.raft_state.state import PartitionState
from smq.raft_state.topic_config import BatchRules
from smq.records import BatchHeader
from smq.replication.api import Acks, DoneFn, Produced
from smq.replication.host import Host
from smq.replication.monitoring.measures import DUPLICATE, STORED, StageSink
from smq.replication.partition.admission import SendOrder
from smq.replication.ports import Clock
from smq.replication.runtime.deadlines import Deadline


class Stages:
    """How long the parts of a batch's way take, from its append to its answer: one sample at a time, of one partition.
    The next batch after its end that is to be timed is the next sample, so few are timed when many come. A batch that
    is traced has stages of its own. `is_timing` and `end` are read on the hot path: they must not be calls."""

    def __init__(self, clock: Clock, stage: StageSink) -> None:
        self._clock = clock
        self._stage = stage
        self.is_timing = False
        self.end = Offset(-1)  # of the sample; -1: there is none
        self._began_ns = 0  # when it was appended
        self._is_on_disk = self._is_answered = False
        self._majority_ns = 0  # 0: no majority has it yet

    def begin(self, end: Offset) -> None:
        """A batch that ends here has just been appended."""
        self.is_timing, self.end, self._began_ns = True, end, self._clock.monotonic_ns()
        self._is_on_disk = self._is_answered = False
        self._majority_ns = 0

    def note(self, durable_end: Offset, majority_end: Offset) -> None:
        """What this disk has, and what a majority's disks have."""
        now_ns = self._clock.monotonic_ns()
        if not self._is_on_disk and durable_end >= self.end:
            self._is_on_disk = True
            self._stage.observe(now_ns - self._began_ns, "fsync")
        if not self._majority_ns and majority_end >= self.end:
            self._majority_ns = now_ns
            self._stage.observe(now_ns - self._began_ns, "replicate")
        if self._is_answered and self._is_on_disk and self._majority_ns:
            self.drop()

    def answered(self) -> int:
        """The sample is being answered with success: the time, or 0 if it has been before. Give it to `left` when the
        answer leaves. A disk that is slower than the others' is timed until it has the batch, too."""
        if self._is_answered:
            return 0
        now_ns = self._clock.monotonic_ns()
        if self._majority_ns:  # otherwise acks=1: no majority was waited for
            self._stage.observe(now_ns - self._majority_ns, "commit")
        self._is_answered = True
        if self._is_on_disk and self._majority_ns:
            self.drop()
        return now_ns

    def left(self, answered_ns: int) -> None:
        self._stage.observe(self._clock.monotonic_ns() - answered_ns, "answer")

    def drop(self) -> None:
        """Nothing more of the sample is timed: it is over, was answered with an error, or the leadership has ended and
        an election would be measured."""
        self.is_timing, self.end = False, Offset(-1)


TRACED_MAX: Final = 100  # batches per partition; further ones are not followed
WAITERS_MAX: Final = 10_000  # waiting batches per partition: with 1 KB each, 10 MB of records


@dataclass(slots=True, eq=False)
class Waiter:
    """A producer's batch: identified by epoch, base and end, never by an offset alone (rule 10)."""

    epoch: Epoch
    base: Offset
    end: Offset
    ts_ns: TsNs
    acks: Acks
    duplicate: bool
    header: BatchHeader
    done: DoneFn[Produced]
    rules: BatchRules
    deadline: Deadline | None = None
    answered: bool = False
    stages: Stages | None = None  # of a batch that has a trace of its own

    @property
    def success(self) -> Produced:
        last = Offset(self.end - 1)
        return Produced(self.base, last, self.ts_ns, self.epoch, self.duplicate, self.rules.is_append_time)


class WaitedFor(Protocol):
    """The replica, as its waiters see it."""

    @property
    def part(self) -> PartitionState: ...

    @property
    def durable_verified_end(self) -> Offset: ...

    def known_commit_point(self) -> Offset: ...


class Waiters:
    """Bounded by WAITERS_MAX, which the replica checks by `len` before it takes a batch in."""

    def __init__(self, host: Host, replica: WaitedFor, send_order: SendOrder) -> None:
        self._host = host
        self._send_order = send_order
        self._replica = replica
        self._results = host.measures.produced.by_labels
        self._stored = 0  # of what `settle` answers: one addition to an attribute instead of look-ups per batch
        self._stages = Stages(host.clock, host.measures.stage)
        self._traced: list[Stages] = []
        # Both ascend by epoch and by end: at an epoch's end, all beyond it are answered. Repeated batches wait
        # separately, because they may name any epoch.
        self._new: deque[Waiter] = deque()
        self._new_at_leader: deque[Waiter] = deque()  # acks=1
        self._repeated: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._new) + len(self._new_at_leader) + len(self._repeated)

    @property
    def wait_for_disk(self) -> bool:
        """Whether more on this node's disk may settle any of them."""
        return bool(self._new_at_leader or self._repeated)

    def add(self, waiter: Waiter, timeout_ms: int, trace: StageSink | None = None) -> None:
        """A batch that is in the log. Its stages go to the trace, if there is one: its own, or the histogram of all,
        which takes one batch at a time."""
        at_ns = self._host.clock.monotonic_ns() + timeout_ms * 1_000_000
        waiter.deadline = self._host.deadlines.add(at_ns, partial(self._expire, waiter))
        if waiter.duplicate:
            self._repeated.append(waiter)
            self.settle()
        else:
            (self._new_at_leader if waiter.acks is Acks.LEADER else self._new).append(waiter)
            if trace is not None:
                self._time(waiter, trace)

    def _time(self, waiter: Waiter, trace: StageSink) -> None:
        if trace is self._host.measures.stage:
            if not self._stages.is_timing:
                self._stages.begin(waiter.end)
        elif len(self._traced) < TRACED_MAX:
            waiter.stages = Stages(self._host.clock, trace)
            waiter.stages.begin(waiter.end)
            self._traced.append(waiter.stages)

    def answer_now(self, waiter: Waiter, result: Produced) -> None:
        """A batch that need not wait."""
        self._results[DUPLICATE if waiter.duplicate else STORED] += 1
        self._host.deliver(partial(waiter.done, result))

    def note_progress(self, majority_end: Offset) -> None:
        """More may be on this disk, or on a majority's."""
        if self._stages.is_timing:
            self._stages.note(self._replica.durable_verified_end, majority_end)
        if self._traced:
            for stages in self._traced:
                stages.note(self._replica.durable_verified_end, majority_end)
            self._traced = [stages for stages in self._traced if stages.is_timing]

    def settle_all(self) -> None:
        """As `settle`, when the epoch has changed: those beyond its end fail, although earlier ones stay open."""
        for stages in (self._stages, *self._traced):
            stages.drop()
        self._traced.clear()
        for waiters in (self._new, self._new_at_leader):
            for waiter in waiters:
                verdict = None if waiter.answered else self._verdict(waiter)
                if verdict is not None:
                    self._answer(waiter, verdict)
        self._new = deque(w for w in self._new if not w.answered)
        self._new_at_leader = deque(w for w in self._new_at_leader if not w.answered)
        self.settle()

    def settle(self) -> None:
        """Rule 10: success iff the commit point has passed the end within the batch's own epoch; failure iff beyond
        its epoch."""
        for waiters in (self._new, self._new_at_leader):
            while waiters:
                verdict = None if waiters[0].answered else self._verdict(waiters[0])
                if verdict is not None:
                    self._answer(waiters[0], verdict)
                elif not waiters[0].answered:
                    break
                waiters.popleft()
        for waiter in self._repeated:
            verdict = self._verdict(waiter)
            if verdict is not None:
                self._answer(waiter, verdict)
        if self._repeated:
            self._repeated = [w for w in self._repeated if not w.answered]
        if self._stored:
            self._results[STORED] += self._stored
            self._stored = 0

    def close(self, error: SmqError) -> None:
        """Answers all of them with the error."""
        for waiter in [*self._new, *self._new_at_leader, *self._repeated]:
            self._answer(waiter, error)
        self._new.clear()
        self._new_at_leader.clear()
        self._repeated.clear()

    def _verdict(self, waiter: Waiter) -> Produced | SmqError | None:
        part = self._replica.part
        epoch_end = epoch_end_of(part, waiter.epoch)
        if epoch_end is not None and waiter.end > epoch_end:
            if waiter.epoch < part.history[0].epoch:
                return SmqError(ErrorCode.TIMED_OUT, "the epoch of the append has been forgotten")
            return SmqError(ErrorCode.APPEND_LOST, f"epoch {waiter.epoch} ended at {epoch_end}")
        # With one replica, as in Kafka, the producer then finds its record below the high water mark.
        may_precede_mark = waiter.acks is Acks.LEADER and len(part.replicas) > 1
        is_acked = may_precede_mark and waiter.end <= self._replica.durable_verified_end
        if is_acked or waiter.end <= self._replica.known_commit_point():
            return waiter.success
        return None

    def _expire(self, waiter: Waiter) -> None:
        if not waiter.answered:
            self._answer(waiter, SmqError(ErrorCode.TIMED_OUT, "no majority of replicas stored it in time"))

    def _answer(self, waiter: Waiter, result: Produced | SmqError) -> None:
        if waiter.answered:
            return
        waiter.answered = True
        if waiter.deadline is not None:
            waiter.deadline.cancel()
        if isinstance(result, SmqError):
            self._send_order.expect(self._replica.part.pid, waiter.header)  # it is not known to stay
            self._host.measures.produced.add(1, result.code.name)
        elif waiter.duplicate:
            self._results[DUPLICATE] += 1
        else:
            self._stored += 1
        if waiter.stages is not None:
            self._note_answer(waiter.stages, result)
        elif waiter.end == self._stages.end:
            self._note_answer(self._stages, result)
        done = waiter.done
        self._host.deliver(lambda: done(result))

    def _note_answer(self, stages: Stages, result: Produced | SmqError) -> None:
        """Of a batch that is timed."""
        if isinstance(result, SmqError):
            stages.drop()
        elif (answered_ns := stages.answered()) > 0:
            self._host.deliver(partial(stages.left, answered_ns))


def epoch_end_of(part: PartitionState, epoch: Epoch) -> Offset | None:
    """The end of an epoch: None for the current one and later ones, -1 for one that has been pruned."""
    if epoch < part.history[0].epoch:
        return Offset(-1)
    for entry in part.history:
        if entry.epoch > epoch:
            return entry.start
    return None
