"""Many that come at about the same time share one round: a command, a read index, a message.

Owns the coalescing: one round at a time, and later arrivals share the next. Everything that coalesces uses `Coalescer`.
`SharedCalls` adds to it what callers need who wait for an answer: a deadline each, and a further round after a second
without one. Reports of replicas (`partition.proposals`) and commit points for followers (`partition.high_water_mark`)
have no callers: a report is of the present moment, and a lost one is made again.

It must never propose an item after its caller's deadline, answer before the command is applied here, give a definite
error to a caller whose item may have been applied by an earlier command, nor judge an item: the state machine does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

from smq.raft_state.commands import Command
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import LogIndex
from smq.raft_state.limits import ASSIGN_ITEMS_MAX
from smq.raft_state.replies import Done, ExternalHwm, OffsetsAssigned, Rejected, Reply, Results
from smq.replication.api import Cancel, DoneFn
from smq.replication.commands.proposer import Proposer, rejection
from smq.replication.host import Host
from smq.replication.ports import Clock
from smq.replication.runtime.deadlines import Deadline

WAITING_MAX: Final = 20_000  # callers per node and kind of command: as many as may wait for other proposals
_NEXT_MS: Final = 1_000  # after this time without an answer, another round begins: for those that came meanwhile
_UNKNOWN_OUTCOME: Final = (ErrorCode.TIMED_OUT, ErrorCode.NO_QUORUM)

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")
ItemResult: TypeAlias = Done | OffsetsAssigned | ExternalHwm


class Coalescer(Generic[Key]):
    """One round at a time, for what is due when it begins. With a pace, rounds have at least that distance."""

    def __init__(
        self, clock: Clock, begin: Callable[[dict[Key, None]], None], *, pace_ms: int = 0, is_immediate: bool = False
    ) -> None:
        """`begin` takes out of what is due as much as one round has room for. Each round ends with a call of `end`, or
        of `retry`; also one that has found nothing to do. `is_immediate`: the first begins in the call that adds."""
        self._clock = clock
        self._begin = begin
        self._is_paced = pace_ms > 0
        self._schedule = partial(clock.call_later, pace_ms) if pace_ms else clock.call_soon
        self._is_immediate = is_immediate
        self.due: dict[Key, None] = {}  # in the order of arrival
        self._is_busy = False
        self._is_scheduled = False

    def add(self, key: Key) -> None:
        """For a round that begins when the current callback has ended, which may bring more, or after the present
        one."""
        self.due[key] = None
        if self._is_immediate:
            self._go_on()
        elif not self._is_busy and not self._is_scheduled:
            self._is_scheduled = True
            self._schedule(self._run)

    def put_back(self, keys: Iterable[Key]) -> None:
        """Before all others."""
        self.due = {**dict.fromkeys(keys), **self.due}
        self._go_on()

    def end(self) -> None:
        self._is_busy = False
        self._go_on()

    def retry(self, keys: Iterable[Key], after_ms: int) -> None:
        """The round has ended, and these are due again."""
        self._is_busy = False
        self.due.update(dict.fromkeys(keys))
        self._is_scheduled = True
        self._clock.call_later(after_ms, self._run)

    def _go_on(self) -> None:
        if not self.due or self._is_busy or self._is_scheduled:
            return
        if self._is_paced:
            self._is_scheduled = True
            self._schedule(self._run)
        else:
            self._run()

    def _run(self) -> None:
        self._is_scheduled = False
        self._is_busy = True
        self._begin(self.due)


def _answered(_result: object) -> None:
    """In the place of a caller's own, which may hold a request of megabytes."""


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
            done = self.done
            self.withdraw()
            done(result)

    def withdraw(self) -> None:
        self.answered = True
        self.done = _answered
        if self.deadline is not None:
            self.deadline.cancel()


class SharedCalls(ABC, Generic[Item, Result]):
    """The callers of one kind of round. Every item may be sent again: a repetition changes nothing.

    A round lives as long as its most patient caller, so a slow one answers, however late. The proposer repeats it at
    another leader. A further one each second is for callers that came since: no slow command is sent twice. A read may
    be: its callers wait for the further rounds, too, and the first answer is theirs.
    """

    waiting_max: int | None = None  # callers
    items_max: int | None = None  # of one round
    has_effect = True  # so it is not sent after a caller's deadline, and an outcome that is unknown stays so

    def __init__(self, host: Host, proposer: Proposer) -> None:
        self._host = host
        self._proposer = proposer
        # A command waits for the end of the turn, which may bring more callers; a lone reader does not.
        self._rounds = Coalescer[_Caller[Item, Result]](host.clock, self._begin, is_immediate=not self.has_effect)
        self._sent = 0  # callers whose round is under way, with those that have been answered meanwhile
        self._newest: list[_Caller[Item, Result]] = []  # the callers of the round for which the next waits
        self._next: Deadline | None = None  # when the next begins all the same
        self._is_closed = False

    @abstractmethod
    def _send(self, items: Sequence[Item], timeout_ms: int, send_until_ns: int, done: DoneFn[Reply]) -> None:
        """Not sent, nor sent again, after `send_until_ns` (monotonic)."""

    @abstractmethod
    def _results(self, reply: Reply, count: int) -> Sequence[Result | SmqError] | None:
        """One for each item; None if the reply makes no sense."""

    def submit(self, item: Item, timeout_ms: int, done: DoneFn[Result]) -> Cancel:
        if self.waiting_max is not None and len(self._rounds.due) + self._sent >= self.waiting_max:
            details = ErrorDetails(retry_after_ms=100)
            error = SmqError(ErrorCode.OVERLOADED, f"{self.waiting_max} callers share this node's commands", details)
            self._host.deliver(lambda: done(error))
            return _nothing
        caller = _Caller[Item, Result](item, done, self._host.clock.monotonic_ns() + timeout_ms * 1_000_000)
        caller.deadline = self._host.deadlines.add(caller.until_ns, partial(self._expire, caller))
        self._rounds.add(caller)
        return partial(self._withdraw, caller)

    def _withdraw(self, caller: _Caller[Item, Result]) -> None:
        self._rounds.due.pop(caller, None)
        caller.withdraw()

    def _expire(self, caller: _Caller[Item, Result]) -> None:
        self._rounds.due.pop(caller, None)
        caller.answer(self._proposer.late())

    def _begin(self, due: dict[_Caller[Item, Result], None]) -> None:
        now_ns = self._host.clock.monotonic_ns()
        batch: list[_Caller[Item, Result]] = []
        while due and (self.items_max is None or len(batch) < self.items_max):
            caller = next(iter(due))
            if self.has_effect and caller.until_ns < now_ns:
                self._expire(caller)
            else:
                del due[caller]
                batch.append(caller)
        if not batch:
            self._rounds.end()
            return
        self._newest = batch
        self._sent += len(batch)
        self._next = self._host.deadlines.add(now_ns + _NEXT_MS * 1_000_000, self._on_slow)
        ends_ns = [caller.until_ns for caller in batch]
        first_ns = min(ends_ns)  # once one has gone on, the others share a new command
        left_ms = (max(ends_ns) - now_ns) // 1_000_000 + 1
        self._send([caller.item for caller in batch], left_ms, first_ns, partial(self._on_reply, batch))

    def _on_slow(self) -> None:
        slow = self._newest
        self._newest, self._next = [], None
        if not self.has_effect:
            self._put_back(slow)
        self._rounds.end()

    def _put_back(self, batch: list[_Caller[Item, Result]]) -> None:
        """Those with time left share the next."""
        self._rounds.put_back(caller for caller in batch if not caller.answered)

    def _on_reply(self, batch: list[_Caller[Item, Result]], reply: Reply | SmqError) -> None:
        self._sent -= len(batch)
        results = self._results(reply, len(batch)) if not isinstance(reply, SmqError) else None
        if isinstance(reply, SmqError) and reply.code in _UNKNOWN_OUTCOME and not self._is_closed:
            for caller in batch if self.has_effect else ():
                caller.doubt = reply
            self._put_back(batch)
        elif results is not None:
            for caller, result in zip(batch, results, strict=True):
                caller.answer(result)
        else:
            error = reply if isinstance(reply, SmqError) else SmqError(ErrorCode.INTERNAL, f"unexpected reply {reply}")
            for caller in batch:
                caller.fail(error)
        if batch is self._newest and self._next is not None:
            self._next.cancel()
            self._newest, self._next = [], None
            self._rounds.end()

    def close(self, error: SmqError) -> None:
        """The node is stopping. The proposer answers callers whose round is under way: if a command was sent, its
        outcome is unknown."""
        self._is_closed = True
        waiting = list(self._rounds.due)
        self._rounds.due.clear()
        for caller in waiting:
            caller.fail(error)


def _nothing() -> None:
    """Withdraws a call that has ended."""


class SharedCommand(SharedCalls[Item, Result]):
    """Callers that share Raft entries."""

    waiting_max = WAITING_MAX
    items_max = ASSIGN_ITEMS_MAX

    def __init__(
        self,
        host: Host,
        proposer: Proposer,
        *,
        command_of: Callable[[tuple[Item, ...]], Command],
        result_of: Callable[[ItemResult], Result],
    ) -> None:
        super().__init__(host, proposer)
        self._command_of = command_of
        self._result_of = result_of

    def _send(self, items: Sequence[Item], timeout_ms: int, send_until_ns: int, done: DoneFn[Reply]) -> None:
        self._proposer.propose(self._command_of(tuple(items)), timeout_ms, done, send_until_ns=send_until_ns)

    def _results(self, reply: Reply, count: int) -> list[Result | SmqError] | None:
        if not isinstance(reply, Results) or len(reply.items) != count:
            return None
        return [rejection(item) if isinstance(item, Rejected) else self._result_of(item) for item in reply.items]


class Barriers(SharedCalls[None, LogIndex]):
    """Linearizable read points: a read index answers those that came before it began. Callers are bounded by their
    requests."""

    has_effect = False

    def wait(self, timeout_ms: int, done: DoneFn[LogIndex]) -> Cancel:
        return self.submit(None, timeout_ms, done)

    def _send(self, items: Sequence[None], timeout_ms: int, send_until_ns: int, done: DoneFn[Reply]) -> None:
        self._proposer.read_index(max(timeout_ms, _NEXT_MS), done)

    def _results(self, reply: Reply, count: int) -> list[LogIndex | SmqError]:
        return [self._host.engine.applied_index] * count
