"""Requests of many callers that share Raft entries: those that come while a command is in flight share the next.

Owns the coalescing (the next command begins with the answer, or after a second without one) and each caller's deadline.
Every item may be proposed again: a repetition changes nothing. It must never propose an item after its caller's
deadline, answer before the command is applied here, give a definite error to a caller whose item may have been applied
by an earlier command, nor judge an item: the state machine does. `partition.external_offsets` and
`partition.transaction_joins` use it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

from smq.raft_state.commands import Command
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.limits import ASSIGN_ITEMS_MAX
from smq.raft_state.replies import Done, ExternalHwm, OffsetsAssigned, Rejected, Reply, Results
from smq.replication.api import DoneFn
from smq.replication.commands.proposer import Proposer, rejection
from smq.replication.host import Host
from smq.replication.runtime.deadlines import Deadline

WAITING_MAX: Final = 20_000  # callers per node: as many as may wait for other proposals
_NEXT_MS: Final = 1_000  # after this time without an answer, another command begins: for those that came meanwhile
_UNKNOWN_OUTCOME: Final = (ErrorCode.TIMED_OUT, ErrorCode.NO_QUORUM)

Item = TypeVar("Item")
Result = TypeVar("Result")
ItemResult: TypeAlias = Done | OffsetsAssigned | ExternalHwm


@dataclass(slots=True, eq=False)
class _Caller(Generic[Item, Result]):
    item: Item
    done: DoneFn[Result]
    until_ns: int  # `deadline` is checked by a tick, and so later
    deadline: Deadline | None = None
    answered: bool = False
    doubt: SmqError | None = None  # the outcome of an earlier command for it, which may yet be carried out

    def fail(self, error: SmqError) -> None:
        self.answer(error if self.doubt is None else self.doubt)

    def answer(self, result: Result | SmqError) -> None:
        if not self.answered:
            self.answered = True
            if self.deadline is not None:
                self.deadline.cancel()
            self.done(result)


class SharedCommand(Generic[Item, Result]):
    """The callers of one kind of command, bounded by WAITING_MAX.

    A command lives as long as its most patient caller, so a slow commit answers, however late. The proposer repeats it
    at another leader. A further one each second is for callers that came since: nothing slow is proposed twice.
    """

    def __init__(
        self,
        host: Host,
        proposer: Proposer,
        *,
        command_of: Callable[[tuple[Item, ...]], Command],
        result_of: Callable[[ItemResult], Result],
    ) -> None:
        self._host = host
        self._proposer = proposer
        self._command_of = command_of
        self._result_of = result_of
        self._waiting: deque[_Caller[Item, Result]] = deque()
        self._sent = 0  # callers whose command is in flight, with those that have been answered meanwhile
        self._newest: list[_Caller[Item, Result]] = []  # the callers of the newest command
        self._next: Deadline | None = None  # when another command may begin; None if it may now
        self._is_closed = False
        self._is_scheduled = False

    def submit(self, item: Item, timeout_ms: int, done: DoneFn[Result]) -> None:
        if len(self._waiting) + self._sent >= WAITING_MAX:
            details = ErrorDetails(retry_after_ms=100)
            error = SmqError(ErrorCode.OVERLOADED, f"{WAITING_MAX} callers share this node's commands", details)
            self._host.deliver(lambda: done(error))
            return
        caller = _Caller[Item, Result](item, done, self._host.clock.monotonic_ns() + timeout_ms * 1_000_000)
        caller.deadline = self._host.deadlines.add(caller.until_ns, partial(self._expire, caller))
        self._waiting.append(caller)
        if self._next is None and not self._is_scheduled:
            self._is_scheduled = True  # after the current callback: it may bring more
            self._host.clock.call_soon(self._launch)

    def _expire(self, caller: _Caller[Item, Result]) -> None:
        caller.answer(self._proposer.late())

    def _launch(self) -> None:
        self._is_scheduled = False
        self._end_pause()
        now_ns = self._host.clock.monotonic_ns()
        batch: list[_Caller[Item, Result]] = []
        while self._waiting and len(batch) < ASSIGN_ITEMS_MAX:
            caller = self._waiting.popleft()
            if caller.answered:
                continue
            if caller.until_ns < now_ns:
                self._expire(caller)
            else:
                batch.append(caller)
        if batch:
            self._newest = batch
            self._sent += len(batch)
            self._next = self._host.deadlines.add(now_ns + _NEXT_MS * 1_000_000, self._launch)
            command = self._command_of(tuple(caller.item for caller in batch))
            ends_ns = [caller.until_ns for caller in batch]
            first_ns = min(ends_ns)  # once one has gone on, the others share a new command
            left_ms = (max(ends_ns) - now_ns) // 1_000_000 + 1
            on_reply = partial(self._on_reply, batch)
            self._proposer.propose(command, left_ms, on_reply, send_until_ns=first_ns)

    def _end_pause(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _on_reply(self, batch: list[_Caller[Item, Result]], reply: Reply | SmqError) -> None:
        self._sent -= len(batch)
        if batch is self._newest:
            self._newest = []
            self._end_pause()
        if isinstance(reply, SmqError) and reply.code in _UNKNOWN_OUTCOME and not self._is_closed:
            for caller in reversed(batch):  # those with time left share the next command
                caller.doubt = reply
                self._waiting.appendleft(caller)
        elif isinstance(reply, Results) and len(reply.items) == len(batch):
            for caller, result in zip(batch, reply.items, strict=True):
                caller.answer(rejection(result) if isinstance(result, Rejected) else self._result_of(result))
        else:
            error = reply if isinstance(reply, SmqError) else SmqError(ErrorCode.INTERNAL, f"unexpected reply {reply}")
            for caller in batch:
                caller.fail(error)
        if self._waiting and self._next is None and not self._is_scheduled:
            self._launch()

    def close(self, error: SmqError) -> None:
        """The node is stopping. The proposer answers callers whose command is in flight: if it was sent, its outcome is
        unknown."""
        self._is_closed = True
        while self._waiting:
            self._waiting.popleft().fail(error)
