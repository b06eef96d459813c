"""What many replicas have to propose: one command for all that are due on this node, one command in flight.

Owns the coalescing. Without a pace, a command goes immediately if none is in flight, and whatever becomes due meanwhile
shares the next. With one, commands have at least that distance. The items come from the replicas at the moment of
proposing; apply judges them.
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from smq.raft_state.commands import Command
from smq.raft_state.errors import SmqError
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn
from smq.replication.partition.replica import Replica
from smq.replication.ports import Clock

ITEMS_MAX: Final = 1_000  # per command: applying one moves as many replicas, some 10 ms of every node's loop
PROPOSAL_MS_MAX: Final = 1_000  # rule 9: a command without an answer by then is simply proposed again
_RETRY_MS: Final = 20

Item = TypeVar("Item")


class Coalescer(Generic[Item]):
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
        self._clock = clock
        self._propose = propose
        self._items_of = items_of
        self._command_of = command_of
        self._pace_ms = pace_ms
        self._items_max = items_max
        self._due: dict[Replica, None] = {}  # bounded by the node's partitions
        self._in_flight = False
        self._scheduled = False

    def mark_due(self, replica: Replica) -> None:
        """The replica may have something to propose; examined when the current callback has ended."""
        self._due[replica] = None
        if not self._in_flight and not self._scheduled:
            self._flush_later()

    def _flush_later(self) -> None:
        self._scheduled = True
        if self._pace_ms:
            self._clock.call_later(self._pace_ms, self._flush)
        else:
            self._clock.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._in_flight:
            return
        replicas: list[Replica] = []
        items: list[Item] = []
        while self._due and len(items) < self._items_max:
            replica = next(iter(self._due))
            del self._due[replica]
            found = self._items_of(replica)
            if found:
                replicas.append(replica)
                items += found
        if items:
            self._in_flight = True
            self._propose(
                self._command_of(tuple(items)), PROPOSAL_MS_MAX, lambda reply: self._on_reply(replicas, reply)
            )

    def _on_reply(self, replicas: list[Replica], reply: Reply | SmqError) -> None:
        self._in_flight = False
        if isinstance(reply, SmqError):
            self._due.update(dict.fromkeys(replicas))
            self._scheduled = True
            self._clock.call_later(_RETRY_MS, self._flush)
        elif self._due and self._pace_ms:
            self._flush_later()
        elif self._due:
            self._flush()
