"""Reading for consumers: fetches and long polls.

Owns rule 13: a batch is served only from the valid, committed part of this node's log, and a node says
OFFSET_OUT_OF_RANGE only once the leader has reported where the log ends, because the reader may know more of it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset
from smq.replication.api import Aborted, Cancel, DoneFn, Fetched, PartitionEnd, StoredBatch
from smq.replication.host import Host
from smq.replication.log.aborted import with_batches
from smq.replication.log.stored_batch import ENVELOPE_BYTES, BatchDamaged, StoredValue
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.older_state import check_state
from smq.replication.partition.repair import READ_AGAIN, Outcome, Repairs, repair_error
from smq.replication.partition.replica import Replica
from smq.replication.ports import DataDamaged, GiveUp
from smq.replication.runtime.deadlines import Deadline

_log = structlog.get_logger("smq.reads")

REPAIRS_PER_POLL_MAX: Final = 4  # one repairs a batch, unless LMDB's tree hides the new bytes
READ_MS_MAX: Final = 5_000  # how long a reader waits for this node's disk: another replica may be faster
END_MS_MAX: Final = 5_000  # how long OFFSET_OUT_OF_RANGE waits for the leader to confirm it


@dataclass(slots=True, eq=False)
class Poll:
    """One fetch under way."""

    replica: Replica
    offset: Offset
    max_bytes: int  # 0: only reports that there is something
    deadline_ns: int
    done: DoneFn[Fetched]
    is_committed: bool = False  # nothing from the last stable offset on
    began_ns: int = 0
    has_waited: bool = False  # for more records
    repairs: int = 0  # those that it has waited for
    awaits_repair: bool = False
    withdraw_question: Cancel | None = None  # for the exact end, while it is asked
    end_known: Offset = Offset(0)  # the log's end according to the leader: beyond it, it is asked again
    reading: Deadline | None = None  # of the read under way
    give_up_read: GiveUp | None = None
    parked: bool = False
    finished: bool = False
    deadline: Deadline | None = None

    @property
    def end(self) -> Offset:
        """Of what the replica can serve to it."""
        replica = self.replica
        return min(replica.readable_end, replica.stable_end) if self.is_committed else replica.readable_end


def read_failure(error: Exception) -> SmqError:
    """The reader's error for an exception. An unforeseen one is logged and answered as INTERNAL: if it ended the node,
    the reader's next attempt would end the next node."""
    if isinstance(error, SmqError):
        return error
    if isinstance(error, DataDamaged):
        return SmqError(ErrorCode.DATA_DAMAGED, str(error))
    _log.error("a read failed", exc_info=error)
    return SmqError(ErrorCode.INTERNAL, f"the read failed: {error!r}")


class Reads:
    """All fetches of a node. Parked polls are bounded by the node's `fetch_waiters_max`."""

    def __init__(self, host: Host, ends: ExactEnds, repairs: Repairs) -> None:
        self._host = host
        self._repairs = repairs
        self._ends = ends
        self._parked: dict[bytes, dict[Poll, None]] = {}
        self._parked_count = 0
        # Polls that have waited for the disk, the exact end or a repair, until they end; bounded by the requests
        self._away: dict[bytes, dict[Poll, None]] = {}

    # -------------------------------------------------------------------------------------- fetch
    def fetch(self, poll: Poll) -> None:
        """Answers now, or parks the poll until the replica has more."""
        try:
            self._try(poll)
        except Exception as e:  # noqa: BLE001  # a read changes nothing, so the node survives any exception
            self._fail(poll, e)

    def _fail(self, poll: Poll, error: Exception) -> None:
        if isinstance(error, BatchDamaged):
            self._note_away(poll)
            poll.awaits_repair = True
            self._repairs.request(poll.replica, error, partial(self._after_repair, poll, error))
        else:
            self.finish(poll, read_failure(error))

    def _try(self, poll: Poll) -> None:
        replica = poll.replica
        part = replica.part
        if poll.withdraw_question is not None or poll.awaits_repair:
            return  # a wake-up, or its deadline: the answer, or the repair's end, looks at everything again
        if replica.log.segments.is_newer_than(part.compactions):
            check_state(self._host, replica)
        if poll.offset < part.log_start or poll.offset > max(replica.log_end, poll.end_known):
            self._ask_end(poll)
            return
        if poll.is_committed:
            replica.log.check_aborted()
        if not poll.max_bytes:
            self._conclude(poll, [], is_enough=poll.offset < poll.end)
            return
        end = poll.end
        found = replica.log.read_memory(poll.offset, end, poll.max_bytes) if poll.offset < end else []
        if found is None:
            self._read_later(poll, end)
        else:
            self._take(poll, end, found)

    def _take(self, poll: Poll, end: Offset, found: list[StoredValue]) -> None:
        # Without `v.batch`: a call per batch.
        batches = [
            StoredBatch(v.base, Offset(v.end - 1), v.ts_ns, memoryview(v.value)[ENVELOPE_BYTES:])
            for v in found
            if v.end <= end
        ]
        self._conclude(poll, batches, is_enough=bool(batches))

    def _conclude(self, poll: Poll, batches: list[StoredBatch], *, is_enough: bool) -> None:
        if is_enough or self._host.clock.monotonic_ns() >= poll.deadline_ns:
            self.finish(poll, self._fetched(poll, batches))
        else:
            self._park(poll)

    # -------------------------------------------------------------------------------------- from the disk
    def _read_later(self, poll: Poll, end: Offset) -> None:
        """Reads batches that are not in memory. The loop goes on; a poll has at most one read under way."""
        if poll.reading:
            return  # a wake-up, or its deadline: the read's end looks at everything again
        give_up = poll.replica.log.read_later(poll.offset, end, poll.max_bytes, partial(self._on_read, poll, end))
        if give_up is None:
            details = ErrorDetails(retry_after_ms=200)
            raise SmqError(ErrorCode.OVERLOADED, "too many reads wait for this node's disk", details)
        self._note_away(poll)
        poll.give_up_read = give_up
        at_ns = self._host.clock.monotonic_ns() + READ_MS_MAX * 1_000_000
        poll.reading = self._host.deadlines.add(at_ns, partial(self._give_up, poll))

    def _on_read(self, poll: Poll, end: Offset, found: list[StoredValue] | DataDamaged | None) -> None:
        poll.give_up_read = None
        self._unread(poll)
        if poll.finished:
            return
        try:
            if isinstance(found, DataDamaged):
                raise found
            if found is not None:
                self._take(poll, end, found)
            if not poll.finished and (found is None or poll.end > end):
                self._try(poll)  # the log was cut meanwhile, or has grown beyond what was read and is not enough
        except Exception as e:  # noqa: BLE001  # as in `fetch`
            self._fail(poll, e)

    def _unread(self, poll: Poll) -> None:
        """No read of this poll is under way any more: one that waits for its turn leaves the queue."""
        if poll.reading is not None:
            poll.reading.cancel()
            poll.reading = None
        if poll.give_up_read is not None:
            poll.give_up_read()
            poll.give_up_read = None

    def _give_up(self, poll: Poll) -> None:
        message = "this node's disk takes too long to read: read from another replica, or try again"
        self.finish(poll, SmqError(ErrorCode.NODE_NOT_READY, message, ErrorDetails(retry_after_ms=200)))

    def _after_repair(self, poll: Poll, damage: BatchDamaged, outcome: Outcome) -> None:
        """A repaired batch is read as if nothing had happened. Below the log start, the leader is asked."""
        poll.awaits_repair = False
        if poll.finished:
            return
        if outcome not in READ_AGAIN:
            self.finish(poll, repair_error(damage, outcome))
        elif poll.repairs < REPAIRS_PER_POLL_MAX:
            poll.repairs += 1
            self.fetch(poll)
        else:
            self.finish(poll, repair_error(damage, Outcome.INEFFECTIVE))

    def _fetched(self, poll: Poll, batches: list[StoredBatch]) -> Fetched:
        replica = poll.replica
        known, stable = replica.known_commit_point(), replica.stable_end
        aborted: list[Aborted] = []
        if poll.is_committed and batches:
            overlapping = replica.log.aborted.within(poll.offset, Offset(batches[-1].last_offset + 1))
            aborted = with_batches(overlapping, batches)
        return Fetched(batches, replica.part.log_start, known, stable, replica.readable_end, aborted)

    def _ask_end(self, poll: Poll) -> None:
        self._note_away(poll)
        left_ns = poll.deadline_ns - self._host.clock.monotonic_ns()
        timeout_ms = max(END_MS_MAX, left_ns // 1_000_000)
        answer = partial(self._on_end, poll)
        poll.withdraw_question = self._ends.ask_one(poll.replica.pid, int(timeout_ms), answer)

    def _on_end(self, poll: Poll, end: PartitionEnd | SmqError) -> None:
        poll.withdraw_question = None
        if poll.finished:
            return
        if isinstance(end, SmqError):
            self.finish(poll, end)
        elif end.log_start <= poll.offset <= end.log_end:
            poll.end_known = end.log_end
            self.fetch(poll)
        else:
            details = ErrorDetails(lo=end.log_start, hi=end.hwm)
            message = f"offset {poll.offset} is outside [{end.log_start}, {end.hwm}]"
            self.finish(poll, SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, message, details))

    # -------------------------------------------------------------------------------------- parking
    def _park(self, poll: Poll) -> None:
        if poll.parked:
            return
        if self._parked_count >= self._host.config.fetch_waiters_max:
            details = ErrorDetails(retry_after_ms=200)
            raise SmqError(ErrorCode.OVERLOADED, f"{self._parked_count} long polls are waiting on this node", details)
        poll.parked = poll.has_waited = True
        self._parked_count += 1
        self._parked.setdefault(poll.replica.pid, {})[poll] = None
        poll.deadline = self._host.deadlines.add(poll.deadline_ns, partial(self._expire, poll))

    def _unpark(self, poll: Poll) -> None:
        if poll.parked:
            poll.parked = False
            self._parked_count -= 1
            polls = self._parked[poll.replica.pid]
            del polls[poll]
            if not polls:
                del self._parked[poll.replica.pid]
            if poll.deadline is not None:
                poll.deadline.cancel()

    def _expire(self, poll: Poll) -> None:
        if not poll.finished:
            poll.deadline_ns = 0
            self.fetch(poll)

    def wake(self, replica: Replica) -> None:
        """More may be readable, or the log start may have moved."""
        polls = self._parked.get(replica.pid)
        if not polls:
            return
        start = replica.part.log_start
        for poll in [p for p in polls if p.offset < p.end or p.offset < start]:
            self.fetch(poll)

    def fail_all(self, pid: bytes, error: SmqError) -> None:
        """The partition or the node is going away. A reader that waits for the disk must not look again: the rows are
        being deleted, and would be taken for damaged."""
        for poll in {**self._parked.get(pid, {}), **self._away.get(pid, {})}:
            self.finish(poll, error)

    def finish(self, poll: Poll, result: Fetched | SmqError) -> None:
        if poll.finished:
            return
        self.cancel(poll)
        self._count(poll, result)
        done = poll.done
        self._host.deliver(lambda: done(result))

    def _count(self, poll: Poll, result: Fetched | SmqError) -> None:
        measures = self._host.measures
        if isinstance(result, SmqError):
            measures.fetches.add(1, result.code.name)
            return
        measures.fetches.add(1, "data" if result.batches else "empty")
        measures.fetch.observe(self._host.clock.monotonic_ns() - poll.began_ns, "yes" if poll.has_waited else "no")
        if result.batches:
            size = sum(len(batch.data) for batch in result.batches)
            measures.fetched_batches.amount += len(result.batches)
            measures.fetched_records.amount += result.batches[-1].last_offset + 1 - result.batches[0].base_offset
            measures.fetched_bytes.amount += size
            poll.replica.traffic.fetched_bytes += size

    def cancel(self, poll: Poll) -> None:
        """Its caller waits no longer."""
        poll.finished = True
        self._unpark(poll)
        self._unread(poll)
        if poll.withdraw_question is not None:
            poll.withdraw_question()
            poll.withdraw_question = None
        away = self._away.get(poll.replica.pid)
        if away is not None:
            away.pop(poll, None)
            if not away:
                del self._away[poll.replica.pid]

    def _note_away(self, poll: Poll) -> None:
        self._away.setdefault(poll.replica.pid, {})[poll] = None
