"""The ends of transactions in the logs that this node leads: control batches, and the reports that they are written.

Owns the way from a decision in the replicated state to the partition's log. The state names, per partition, the
producers whose last transaction is decided and whose log does not say so yet. The leader appends a control batch if its
log has the transaction open, whichever node led when it wrote, and reports it once it is committed. If its log
has nothing open, there is nothing to append: no batch of that transaction can come any more, because the leader has
applied the decision, and the next leader's log begins with a part of this log. Doing it again changes nothing, so a new
leader simply begins again. It must never decide anything. `replicas` owns it.
"""

from collections.abc import Callable
from heapq import nsmallest
from typing import Final

from smq.raft_state.commands import Command, CompleteTransactions, WrittenMarker
from smq.raft_state.replies import Reply
from smq.raft_state.state import TransactionPhase, TransactionState
from smq.records import marker_batch
from smq.replication.api import DoneFn
from smq.replication.host import Host
from smq.replication.partition.proposals import ITEMS_MAX, Proposals
from smq.replication.partition.replica import Replica

_NS_PER_MS: Final = 1_000_000


class Markers:
    def __init__(self, host: Host, propose: Callable[[Command, int, DoneFn[Reply]], None]) -> None:
        self._host = host
        self._reports = Proposals(host.clock, propose, self._written, lambda items: CompleteTransactions(items=items))

    def drive(self, replica: Replica) -> None:
        """Does what is due for a partition: after a decision, at the beginning of an epoch, when the commit point has
        moved, and now and then."""
        if replica.pid not in self._host.state.endings or replica.leading != replica.part.epoch:
            return
        for transaction in self._lacking(replica):
            if replica.log.producers.open_from(transaction.marked_as[0]) is not None:
                replica.append_marker(self._marker(transaction))
        if self._written(replica):
            self._reports.mark_due(replica)

    def _lacking(self, replica: Replica) -> list[TransactionState]:
        """The decided transactions that the state does not know to be complete here: so many that a call stays short.
        The others follow when these are complete."""
        producers = nsmallest(ITEMS_MAX, self._host.state.endings.get(replica.pid, ()))
        found = (self._host.state.transaction_of(producer) for producer in producers)
        return [transaction for transaction in found if transaction is not None]

    def _marker(self, transaction: TransactionState) -> bytes:
        producer_id, producer_epoch = transaction.marked_as
        return marker_batch(
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            is_commit=transaction.phase is TransactionPhase.COMMITTING,
            timestamp_ms=self._host.clock.wall_ns() // _NS_PER_MS,
        )

    def _written(self, replica: Replica) -> list[WrittenMarker]:
        """What can be reported: the log has no such transaction open, and its marker is committed."""
        epoch = replica.leading
        if epoch is None or epoch != replica.part.epoch:
            return []
        known, producers = replica.known_commit_point(), replica.log.producers
        return [
            WrittenMarker(
                partition=replica.pid,
                epoch=epoch,
                producer_id=transaction.marked_as[0],
                changes=transaction.changes,
            )
            for transaction in self._lacking(replica)
            if producers.has_ended(transaction.marked_as[0], known)
        ]
