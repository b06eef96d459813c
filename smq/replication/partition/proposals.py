"""What many replicas have to propose: one command for all that are due on this node, one command in flight.

Owns what a command of this kind takes from the replicas: at the moment of proposing, so nothing that has changed since
it became due. `commands.coalescing` owns the rounds, and apply judges the items.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from smq.raft_state.commands import Command
from smq.raft_state.errors import SmqError
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn
from smq.replication.commands.coalescing import Coalescer
from smq.replication.partition.replica import Replica
from smq.replication.ports import Clock

ITEMS_MAX: Final = 1_000  # per command: applying one moves as many replicas, some 10 ms of every node's loop
PROPOSAL_MS_MAX: Final = 1_000  # rule 9: a command without an answer by then is simply proposed again
_RETRY_MS: Final = 20

Item = TypeVar("Item")


class Proposals(Generic[Item]):
    def __init__(
        self,
        clock: Clock,
        propose: Callable[[Command, int, DoneFn[Reply]], None],
        items_of: Callable[[Replica], list[Item]],
        command_of: Callable[[tuple[Item, ...]], Command],
        *,
        pace_ms: int = 0,
        items_max: int = ITEMS_MAX,
    ) -> None:
        """`items_of` gives what a replica has to propose now, nothing if that has changed since it became due."""
        self._propose = propose
        self._items_of = items_of
        self._command_of = command_of
        self._items_max = items_max
        self._rounds = Coalescer[Replica](clock, self._begin, pace_ms=pace_ms)  # bounded by the node's partitions
        self.mark_due = self._rounds.add

    def _begin(self, due: dict[Replica, None]) -> None:
        replicas: list[Replica] = []
        items: list[Item] = []
        while due and len(items) < self._items_max:
            replica = next(iter(due))
            del due[replica]
            found = self._items_of(replica)
            if found:
                replicas.append(replica)
                items += found
        if items:
            self._propose(self._command_of(tuple(items)), PROPOSAL_MS_MAX, partial(self._on_reply, replicas))
        else:
            self._rounds.end()

    def _on_reply(self, replicas: list[Replica], reply: Reply | SmqError) -> None:
        if isinstance(reply, SmqError):
            self._rounds.retry(replicas, _RETRY_MS)
        else:
            self._rounds.end()
