"""The changes of groups on their way into Raft: those of one group take effect in the order in which they came.

Owns one queue per group: one change is under way, the others wait for its answer. The proposer may carry a change to
the Raft leader twice, so one that came later could overtake it on the way; and a change without an answer may still
arrive after its caller has given up. Each change names the coordinator's epoch, and how often the group had been
changed when it was proposed (see `raft_state.handlers.fencing`): what arrives late is refused. Every change of a group
goes through here, from any port. Only the coordinator uses it.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from smq.coordinator.limits import GROUP_CHANGES_MAX, GROUP_CHANGES_WAITING_MAX
from smq.raft_state.commands import Coordinated
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.handlers.fencing import FENCED, changes_before
from smq.raft_state.replies import Reply
from smq.replication.api import Cancel, DoneFn, NodeApi
from smq.replication.monitoring.measures import GroupMeasures
from smq.replication.ports import Clock
from smq.replication.runtime.deadlines import Deadline, Deadlines

_NS_PER_MS: Final = 1_000_000
_RETRY_MS: Final = 100  # after a refusal for load: some of the waiting changes have their answers by then


@dataclass(slots=True, eq=False)
class _Change:
    command: Coordinated
    until_ns: int
    done: DoneFn[Reply]
    began_ns: int
    deadline: Deadline | None = None  # until it is under way: from then on the node keeps its time


class Changes:
    """`run_deadlines` is called by a tick. Bounded per group and in total."""

    def __init__(self, node: NodeApi, clock: Clock) -> None:
        self.measures = GroupMeasures()
        self._node = node
        self._clock = clock
        self._deadlines = Deadlines()
        self._queues: dict[str, deque[_Change]] = {}  # the first of each is under way
        self._count = 0

    def submit(self, command: Coordinated, timeout_ms: int, done: DoneFn[Reply]) -> Cancel:
        """Proposes the command after all that came before it for its group. The returned function withdraws it if it
        has not been proposed yet. OVERLOADED if its time is over before its turn comes."""
        queue = self._queues.setdefault(command.subject, deque())
        if len(queue) >= GROUP_CHANGES_WAITING_MAX or self._count >= GROUP_CHANGES_MAX:
            if not queue:
                del self._queues[command.subject]
            done(_overloaded(f"{self._count} changes of groups wait, {len(queue)} of them of this group"))
            return _nothing
        now_ns = self._clock.monotonic_ns()
        change = _Change(command, now_ns + timeout_ms * _NS_PER_MS, done, now_ns)
        queue.append(change)
        self._count += 1
        if len(queue) == 1:
            self._propose(change)
            return _nothing
        change.deadline = self._deadlines.add(change.until_ns, partial(self._expire, change))
        return partial(self._withdraw, change)

    def run_deadlines(self, now_ns: int) -> None:
        self._deadlines.run(now_ns)

    def close(self, error: SmqError) -> None:
        """Answers all that wait. What is under way is answered by the node."""
        for queue in list(self._queues.values()):
            for change in list(queue)[1:]:
                self._remove(change)
                change.done(error)

    # ------------------------------------------------------------------------------------------------ one change
    def _propose(self, change: _Change) -> None:
        command = replace(change.command, changes_seen=changes_before(self._node.state, change.command))
        left_ms = (change.until_ns - self._clock.monotonic_ns()) // _NS_PER_MS
        self._node.propose(command, max(0, left_ms), partial(self._on_reply, change))

    def _on_reply(self, change: _Change, reply: Reply | SmqError) -> None:
        if self._is_overtaken(change, reply):
            self._propose(change)  # an earlier change, whose caller has given up, took effect in between
            return
        self._remove(change)
        self._measure(change, reply)
        self._next(change.command.subject)
        change.done(reply)

    def _measure(self, change: _Change, reply: Reply | SmqError) -> None:
        kind, result = type(change.command).__name__, reply.code.name if isinstance(reply, SmqError) else "done"
        self.measures.changes.add(1, kind, result)
        if result == "done":
            self.measures.change.observe(self._clock.monotonic_ns() - change.began_ns, kind)

    def _is_overtaken(self, change: _Change, reply: Reply | SmqError) -> bool:
        if not isinstance(reply, SmqError) or reply.code is not FENCED or not self._is_current(change.command):
            return False
        return self._clock.monotonic_ns() < change.until_ns

    def _is_current(self, command: Coordinated) -> bool:
        return coordinator_of(self._node.state, command.subject).epoch == command.coordinator_epoch

    def _next(self, group: str) -> None:
        """Proposes the next change that still may be, and answers those before it that may not."""
        refused: list[tuple[_Change, SmqError]] = []
        while queue := self._queues.get(group):
            refusal = self._refusal(queue[0])
            if refusal is None:
                _stop_deadline(queue[0])
                self._propose(queue[0])
                break
            refused.append((queue[0], refusal))
            self._remove(queue[0])
        for change, refusal in refused:
            change.done(refusal)

    def _refusal(self, change: _Change) -> SmqError | None:
        if not self._is_current(change.command):
            return SmqError(FENCED, f"another node coordinates {change.command.subject!r} now")
        return _overloaded_in_time(change) if self._clock.monotonic_ns() > change.until_ns else None

    def _expire(self, change: _Change) -> None:
        self._remove(change)
        change.done(_overloaded_in_time(change))

    def _withdraw(self, change: _Change) -> None:
        if change.deadline is not None:
            self._remove(change)

    def _remove(self, change: _Change) -> None:
        _stop_deadline(change)
        queue = self._queues[change.command.subject]
        queue.remove(change)
        self._count -= 1
        if not queue:
            del self._queues[change.command.subject]


def _stop_deadline(change: _Change) -> None:
    if change.deadline is not None:
        change.deadline.cancel()
        change.deadline = None


def _nothing() -> None:
    """It is under way, or was refused."""


def _overloaded(message: str) -> SmqError:
    return SmqError(ErrorCode.OVERLOADED, message, ErrorDetails(retry_after_ms=_RETRY_MS))


def _overloaded_in_time(change: _Change) -> SmqError:
    return _overloaded(f"the changes of {change.command.subject!r} before this one took all of its time")
