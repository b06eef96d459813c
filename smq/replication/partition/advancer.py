"""High water marks to Raft: one command for all partitions that are due on this node, one command in flight.

Owns the coalescing (no timer: a command goes at once when none is in flight, and what becomes due meanwhile
shares the next). The numbers come from the replicas at the moment of proposing; apply judges them (rule 9).
"""

from collections.abc import Callable
from typing import Final

from smq.raft_state.commands import AdvanceHwms, HwmAdvance, Reply
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import PartitionId
from smq.replication.api import DoneFn
from smq.replication.ports import Clock

ITEMS_MAX: Final = 1_000  # of one command: applying one moves as many replicas, some 10 ms of every node's loop
PROPOSAL_MS_MAX: Final = 1_000  # rule 9: one without an answer by then is simply proposed again
_RETRY_MS: Final = 20


class Advancer:
    def __init__(
        self,
        *,
        clock: Clock,
        propose: Callable[[AdvanceHwms, int, DoneFn[Reply]], None],
        advance_of: Callable[[PartitionId], HwmAdvance | None],
    ) -> None:
        self._clock = clock
        self._propose = propose
        self._advance_of = advance_of
        self._due: dict[PartitionId, None] = {}  # bounded by the node's partitions
        self._in_flight = False
        self._scheduled = False

    def mark(self, pid: PartitionId) -> None:
        """The partition's HWM may move; looked at when the current callback has ended."""
        self._due[pid] = None
        if not self._in_flight and not self._scheduled:
            self._scheduled = True
            self._clock.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._in_flight:
            return
        items: list[HwmAdvance] = []
        while self._due and len(items) < ITEMS_MAX:
            pid = next(iter(self._due))
            del self._due[pid]
            item = self._advance_of(pid)
            if item is not None:
                items.append(item)
        if items:
            self._in_flight = True
            self._propose(AdvanceHwms(items=tuple(items)), PROPOSAL_MS_MAX, lambda reply: self._on_reply(items, reply))

    def _on_reply(self, items: list[HwmAdvance], reply: Reply | SmqError) -> None:
        self._in_flight = False
        if isinstance(reply, SmqError):
            for item in items:
                self._due[item.partition] = None
            self._scheduled = True
            self._clock.call_later(_RETRY_MS, self._flush)
        elif self._due:
            self._flush()
