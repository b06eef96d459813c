"""Batches whose partition has yet to join their transaction, and the batches that came behind them.

A partition joins a transaction when the state counts it as one of its partitions: what AddPartitionsToTxn does, here at
the request of the partition's leader (KIP-890). Owns the way from the leader to JoinTransactions and back. The batches
that a producer sends to the partition meanwhile wait for the first, in their order. While markers of the producer's
last transaction are missing, its next one waits for them, for a second: the decision has been answered, so its producer
has gone on. It must never append, nor judge a batch. The node's requests own it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from smq.raft_state.commands import Joining, JoinTransactions
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionId, ProducerEpoch, ProducerId
from smq.records import BatchCorrupt, BatchHeader, parse_header
from smq.replication.commands.coalescing import SharedCommand
from smq.replication.commands.proposer import Proposer
from smq.replication.host import Host
from smq.replication.ports import Buffer

ENDING_MS_MAX: Final = 1_000  # for markers: then the client asks again, and its connection is free for other answers
_RETRY_MS: Final = 100  # if no completion is applied here that says so, such as after a snapshot
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class _Join:
    item: Joining
    until_ns: int
    ending_until_ns: int
    done: Callable[[SmqError | None], None]


class TransactionJoins:
    def __init__(self, host: Host, proposer: Proposer) -> None:
        self._host = host
        self._shared: SharedCommand[Joining, None] = SharedCommand(
            host, proposer, command_of=lambda items: JoinTransactions(items=items), result_of=lambda _done: None
        )
        # The batches behind each join under way. Empty unless there is one: the hot path looks at nothing else. Bounded
        # by the requests that connections may have in flight, as `_held` is.
        self.behind: dict[tuple[PartitionId, int], list[Callable[[], None]]] = {}
        self._held: list[_Join] = []  # until the markers of their producers' last transactions are written
        self._is_ticking = False

    def start(
        self, pid: PartitionId, header: BatchHeader, timeout_ms: int, done: Callable[[SmqError | None], None]
    ) -> None:
        """Calls `done` once the partition is part of the batch's transaction in this node's state, or with why it is
        not. After that, lets in the batches behind it. Nothing of this producer may be under way for this partition."""
        now_ns = self._host.clock.monotonic_ns()
        item = Joining(pid, ProducerId(header.producer_id), ProducerEpoch(header.producer_epoch))
        join = _Join(item, now_ns + timeout_ms * _NS_PER_MS, now_ns + ENDING_MS_MAX * _NS_PER_MS, done)
        self.behind[pid, header.producer_id] = []
        self._ask(join)

    def hold(self, pid: PartitionId, batch: Buffer, again: Callable[[], None]) -> bool:
        """Whether the batch has to wait behind one of its producer's: then `again` is called in its turn."""
        try:
            behind = self.behind.get((pid, parse_header(batch).producer_id))
        except BatchCorrupt:
            return False
        if behind is not None:
            behind.append(again)
        return behind is not None

    def on_completions(self) -> None:
        """More markers are known to be written."""
        if self._held:
            self._ask_again()

    def close(self, error: SmqError) -> None:
        """The node is stopping."""
        self._shared.close(error)
        held, self._held = self._held, []
        for join in held:
            self._finish(join, error)

    # ------------------------------------------------------------------------------------------------- one join
    def _ask(self, join: _Join) -> None:
        left_ms = (join.until_ns - self._host.clock.monotonic_ns()) // _NS_PER_MS
        self._shared.submit(join.item, max(0, left_ms), partial(self._on_result, join))

    def _on_result(self, join: _Join, result: SmqError | None) -> None:
        is_ending = isinstance(result, SmqError) and result.code is ErrorCode.TRANSACTION_ENDING
        if is_ending and self._host.clock.monotonic_ns() < min(join.until_ns, join.ending_until_ns):
            self._hold(join)
        else:
            self._finish(join, result)

    def _finish(self, join: _Join, result: SmqError | None) -> None:
        behind = self.behind.pop((join.item.partition, join.item.producer_id))
        join.done(result)
        for again in behind:
            again()

    # ---------------------------------------------------------------------------------- while the last one ends
    def _hold(self, join: _Join) -> None:
        self._held.append(join)
        if not self._is_ending(join):  # no longer: the markers were completed before this answer came
            self._ask_again()
        elif not self._is_ticking:
            self._is_ticking = True
            self._host.clock.call_later(_RETRY_MS, self._tick)

    def _is_ending(self, join: _Join) -> bool:
        transaction = self._host.state.transaction_of(join.item.producer_id)
        return transaction is not None and transaction.is_ending

    def _ask_again(self) -> None:
        due = [join for join in self._held if not self._is_ending(join)]
        self._held = [join for join in self._held if self._is_ending(join)]
        for join in due:
            self._ask(join)

    def _tick(self) -> None:
        """Asks for all: the state machine refuses those whose time is not over yet, and `_on_result` ends the rest."""
        self._is_ticking = False
        held, self._held = self._held, []
        for join in held:
            self._ask(join)
