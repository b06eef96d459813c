"""Planted bugs of transactions, of batches of them, and of the producers that partitions remember.

Owns these rows only. `catalogue` alone imports it.
"""

import dataclasses
from typing import Any, Final

from chaos_tests.sim.replacement import Fault, PlantedBug, nothing, replace
from smq.raft_state.commands import CommitBatch, EndTransaction
from smq.raft_state.handlers import batches
from smq.raft_state.handlers.transactions import commit_staged
from smq.raft_state.ids import Offset
from smq.raft_state.state import ClusterState, TransactionPhase, TransactionState
from smq.replication.log.producers import ProducerTable
from smq.replication.partition.markers import Markers

_HANDLERS: Final = "smq.raft_state.handlers."
_PARTITION: Final = "smq.replication.partition."
_PRODUCERS: Final = "smq.replication.log.producers:ProducerTable."
_SEEN: Final = frozenset({"aborted-read", "dirty-read", "torn-transaction"})


def _commits(original: Fault, markers: Markers, transaction: TransactionState) -> Any:
    return original(markers, dataclasses.replace(transaction, phase=TransactionPhase.COMMITTING))


def _as_if_none_were_open(original: Fault, table: ProducerTable, known: Offset) -> Offset:
    is_open, table._open = table._open, {}
    try:
        end: Offset = original(table, known)
        return end
    finally:
        table._open = is_open


OPEN_IS_STABLE: Final = replace(_PRODUCERS + "stable_end", by=_as_if_none_were_open)


def _commits_its_offsets(original: Fault, state: ClusterState, command: EndTransaction) -> Any:
    transaction = state.transactions.get(command.transactional_id)
    if transaction is not None and transaction.phase is TransactionPhase.ONGOING and not command.is_commit:
        commit_staged(state, transaction)
    return original(state, command)


def _as_if_all_were_older(original: Fault, state: ClusterState, transaction: TransactionState) -> Any:
    for name in transaction.offsets.keys() & state.groups.keys():
        for committed in state.groups[name].offsets.values():
            committed.order = 0
    return original(state, transaction)


def _without_the_last(original: Fault, state: ClusterState, command: CommitBatch) -> Any:
    state.apps.pop(command.app, None)
    return original(state, command)


def _what_is_left(original: Fault, state: ClusterState, command: CommitBatch) -> Any:
    left = tuple(item for item in command.transactions if batches._still_staged(state, item) is not None)
    return original(state, dataclasses.replace(command, transactions=left))


TRANSACTION_BUGS: Final = (
    PlantedBug(
        name="every-marker-commits",
        rule="29: a control batch says what the entry has decided",
        faults=(replace(_PARTITION + "markers:Markers._marker", by=_commits),),
        scenario="transactions",
        anomalies=_SEEN,
        seeds=4,
    ),
    PlantedBug(
        name="late-batch-opens-a-transaction",
        rule="29: a leader takes a batch only into an open transaction with its partition",
        faults=(replace(_PARTITION + "admission:check_transaction", by=nothing),),
        scenario="transactions",
        anomalies=_SEEN | {"lost-transaction", "skipped-record"},
    ),
    PlantedBug(
        name="open-transactions-are-stable",
        rule="30: the last stable offset passes a transaction with its control batch",
        faults=(OPEN_IS_STABLE,),
        scenario="transactions",
        anomalies=_SEEN | {"skipped-record"},
        watched="watched-lso-back",
        seeds=4,
    ),
    PlantedBug(
        name="abort-commits-the-offsets",
        rule="staged offsets are committed with the transaction, or not at all",
        faults=(replace(_HANDLERS + "transactions:end_transaction", by=_commits_its_offsets),),
        scenario="transactions",
        anomalies=frozenset({"torn-offsets"}),
        seeds=4,
    ),
    PlantedBug(
        name="staged-offset-replaces-a-newer-one",
        rule="the end of a transaction replaces no offset that was committed after it had staged its own (P6)",
        faults=(replace(_HANDLERS + "transactions:commit_staged", by=_as_if_all_were_older),),
        scenario="transactions",
        anomalies=frozenset({"commit-regression", "torn-offsets"}),
    ),
    PlantedBug(
        name="last-batch-not-compared",
        rule="31: a batch that is not newer than the app's last is dropped",
        faults=(replace(_HANDLERS + "batches:commit_batch", by=_without_the_last),),
        scenario="batches",
        anomalies=frozenset({"repeated-batch"}),
        seeds=4,
    ),
    PlantedBug(
        name="replay-not-compared",
        rule="31: a batch of other rows than those that its number stands for is refused",
        faults=(replace(_HANDLERS + "batches:_check_replay", by=nothing),),
        scenario="batches",
        anomalies=frozenset({"lost-batch"}),
        seeds=4,
    ),
    PlantedBug(
        name="batch-without-its-lost-transactions",
        rule="31: a batch commits all of its transactions, or none",
        faults=(replace(_HANDLERS + "batches:commit_batch", by=_what_is_left),),
        scenario="batches",
        anomalies=frozenset({"torn-batch", "lost-batch"}),
    ),
)
