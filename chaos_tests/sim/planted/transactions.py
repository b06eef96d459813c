"""Planted bugs of transactions.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

_HANDLERS: Final = "smq.raft_state.handlers."
_PARTITION: Final = "smq.replication.partition."
_PRODUCERS: Final = "smq.replication.log.producers:ProducerTable."
_SEEN: Final = frozenset({"aborted-read", "dirty-read", "torn-transaction"})

TRANSACTION_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="every-marker-commits",
        rule="29: a control batch says what the entry has decided",
        mutations=(
            Mutation(
                _PARTITION + "endings:Endings._marker", "transaction.phase is TransactionPhase.COMMITTING", "True"
            ),
        ),
        scenario="transactions",
        anomalies=_SEEN,
        seeds=4,
    ),
    PlantedBug(
        name="open-transactions-are-stable",
        rule="30: the last stable offset passes a transaction with its control batch",
        mutations=(Mutation(_PRODUCERS + "stable_end", "return end", "return known"),),
        scenario="transactions",
        anomalies=_SEEN | {"skipped-record"},
        seeds=4,
    ),
    PlantedBug(
        name="no-aborted-transactions-in-a-fetch",
        rule="a committed reader gets the aborted transactions of what it reads",
        mutations=(Mutation(_PARTITION + "reads:Reads._fetched", "if poll.is_committed and batches:", "if False:"),),
        scenario="transactions",
        anomalies=_SEEN,
        seeds=4,
    ),
    PlantedBug(
        name="late-batch-opens-a-transaction",
        rule="29: a leader takes a batch only into an open transaction with its partition",
        mutations=(
            Mutation(
                _PARTITION + "transactional:check_transaction",
                "if transaction.phase is not TransactionPhase.ONGOING or pid not in transaction.partitions:",
                "if False:",
            ),
            Mutation(
                _PARTITION + "transactional:check_transaction",
                "if header.producer_epoch > transaction.producer_epoch:",
                "if False:",
            ),
            Mutation(
                _PARTITION + "transactional:check_transaction",
                "if header.producer_epoch < transaction.producer_epoch:",
                "if False:",
            ),
        ),
        scenario="transactions",
        anomalies=_SEEN | {"lost-transaction", "skipped-record"},
        seeds=8,
    ),
    PlantedBug(
        name="marker-reported-before-it-is-committed",
        rule="29: a leader reports a transaction once its control batch is committed",
        mutations=(Mutation(_PRODUCERS + "has_ended", "and marker < known", ""),),
        scenario="transactions",
        anomalies=_SEEN | {"lost-transaction", "skipped-record", "lso-back"},
        seeds=120,
    ),
    PlantedBug(
        name="zombie-ends-the-transaction",
        rule="EndTransaction names the present producer epoch",
        mutations=(
            Mutation(
                _HANDLERS + "transactions:find_transaction",
                "if transaction.producer_epoch != producer_epoch or producer_epoch == PRODUCER_EPOCH_RETIRED:",
                "if False:",
            ),
        ),
        scenario="transactions",
        anomalies=_SEEN | {"torn-offsets", "lost-transaction"},
        seeds=8,
    ),
    PlantedBug(
        name="abort-commits-the-offsets",
        rule="staged offsets are committed with the transaction, or not at all",
        mutations=(
            Mutation(
                _HANDLERS + "transactions:end_transaction",
                "if command.is_commit:\n        _check_is_kept(transaction)\n        commit_staged",
                "if True:\n        commit_staged",
            ),
        ),
        scenario="transactions",
        anomalies=frozenset({"torn-offsets"}),
        seeds=4,
    ),
    PlantedBug(
        name="only-the-first-leader-ends-transactions",
        rule="29: a partition gets its control batch from its leader, whichever node that is",
        mutations=(
            Mutation(
                _PARTITION + "endings:Endings.drive",
                "or replica.leading != replica.part.epoch:",
                "or replica.leading != 0:",
            ),
        ),
        scenario="transactions",
        anomalies=frozenset({"no-progress"}),
        seeds=4,
    ),
    PlantedBug(
        name="expired-transaction-commits",
        rule="an abort by time is a decision, and fences the producer",
        mutations=(
            Mutation(
                _HANDLERS + "transactions:end_transaction",
                "if transaction.phase is not TransactionPhase.ONGOING:",
                "if transaction.phase is TransactionPhase.EMPTY:",
            ),
            Mutation(
                _HANDLERS + "transactions:find_transaction",
                "if transaction.producer_epoch != producer_epoch or producer_epoch == PRODUCER_EPOCH_RETIRED:",
                "if False:",
            ),
        ),
        scenario="transactions",
        anomalies=_SEEN | {"torn-offsets", "lost-transaction"},
        seeds=8,
    ),
    PlantedBug(
        name="aborted-transactions-not-indexed",
        rule="the index of aborted transactions is a fold over the log",
        mutations=(
            Mutation("smq.replication.log.aborted:AbortedTransactions.add", "self._entries.append(aborted)", "pass"),
        ),
        scenario="transactions",
        anomalies=_SEEN,
        seeds=4,
    ),
    PlantedBug(
        name="late-end-ends-the-next-transaction",
        rule="a repeated end is answered as the first; it is fenced once another transaction has begun",
        mutations=(
            Mutation(
                _HANDLERS + "transactions:_is_repetition",
                "transaction.phase is TransactionPhase.ONGOING or ",
                "",
            ),
        ),
        scenario="transactions",
        anomalies=_SEEN | {"torn-offsets", "lost-transaction"},
        seeds=8,
    ),
    PlantedBug(
        name="end-keeps-the-epoch",
        rule="the end of a transaction begins its producer's next epoch (Kafka's second protocol)",
        mutations=(
            Mutation(
                _HANDLERS + "transaction_producers:note_end",
                "if not is_bumping:",
                "if is_bumping:\n        transaction.ended_id, transaction.ended_epoch = NO_PRODUCER, _NO_EPOCH\n"
                "    if True:",
            ),
            Mutation(_PRODUCERS + "check", "if header.base_sequence != expected:", "if False:"),
        ),
        scenario="transactions",
        anomalies=_SEEN | {"torn-offsets", "lost-transaction", "doubled-record"},
        seeds=8,
    ),
)
