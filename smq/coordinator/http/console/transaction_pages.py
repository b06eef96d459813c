"""The pages of transactions: those that are open, the oldest first, and every transactional id with its last outcome.

Owns what they show. `service.transaction_states` names the states. `console.site` imports it.
"""

from collections.abc import Iterable, Iterator

from smq.coordinator.http.console.markup import Content, Markup, facts, link, long_table, table, tag
from smq.coordinator.http.console.overview import ROWS_MAX
from smq.coordinator.operators.formats import age_text
from smq.coordinator.service.transaction_states import open_ms, state_name
from smq.coordinator.service.turns import Turns
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.ids import split_partition_id
from smq.raft_state.state import ClusterState, TransactionPhase, TransactionState

HEADS = ("Transactional id", "State", "Open for", "Times out after", "Producer id", "Epoch", "Partitions")


async def transactions_page(state: ClusterState, after: str) -> list[Markup]:
    """The table of all ids begins after the one named `after`."""
    everyone = list(state.transactions.values())
    unfinished = [t async for t in Turns().over(everyone) if t.phase is not TransactionPhase.EMPTY]
    unfinished.sort(key=lambda t: (-(open_ms(state, t) or 0), t.transactional_id))
    count = (
        f"{len(unfinished)}, the oldest {ROWS_MAX} are shown" if len(unfinished) > ROWS_MAX else f"{len(unfinished)}"
    )
    names = sorted(name for name in state.transactions if name > after)
    shown = [state.transactions[name] for name in names[:ROWS_MAX]]
    more = []
    if len(names) > ROWS_MAX:
        more = [tag("p", link("Further transactional ids", "transactions", after=names[ROWS_MAX - 1]))]
    return [
        facts((("Open or ending", count), ("Transactional ids", len(everyone)))),
        await long_table("Open or ending", HEADS, _rows(state, unfinished[:ROWS_MAX])),
        await long_table("All transactional ids", HEADS, _rows(state, shown)),
        *more,
    ]


def _rows(state: ClusterState, transactions: Iterable[TransactionState]) -> Iterator[tuple[Content, ...]]:
    return (
        (
            link(t.transactional_id, "transactions", t.transactional_id),
            state_name(t),
            age_text(open_ms(state, t)),
            age_text(t.timeout_ms),
            t.producer_id,
            t.producer_epoch,
            len(t.partitions),
        )
        for t in transactions
    )


async def transaction_page(state: ClusterState, transaction: TransactionState) -> list[Markup]:
    slot = coordinator_of(state, transaction.transactional_id)
    summary = facts(
        (
            ("State", state_name(transaction)),
            ("Open for", age_text(open_ms(state, transaction))),
            ("Times out after", age_text(transaction.timeout_ms)),
            ("Producer id", transaction.producer_id),
            ("Epoch", transaction.producer_epoch),
            ("Coordinator", f"node {slot.node}" if slot.node else "none yet"),
        )
    )
    rows: list[tuple[Content, ...]] = []
    for pid in sorted(transaction.partitions)[:ROWS_MAX]:
        topic_id, index = split_partition_id(pid)
        topic = state.topic_names.get(topic_id)
        place: Content = f"{topic}/{index}" if topic is not None else f"a deleted topic/{index}"
        rows.append((link(place, "topics", topic, "messages", partition=index) if topic is not None else place,))
    groups = [(link(name, "groups", name), len(transaction.offsets[name])) for name in sorted(transaction.offsets)]
    hint = "Readers of committed records wait at the first record of an open transaction. `smq txn abort` ends one."
    return [
        summary,
        tag("p", hint),
        await long_table("Partitions", ("Partition",), rows),
        table("Groups whose offsets it commits", ("Group", "Offsets"), groups[:ROWS_MAX]),
    ]
