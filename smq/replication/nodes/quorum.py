"""What the Raft leader knows of Raft's voters, for an operator at any node.

Owns the way of the question to the leader and of the answer back. It is repeated until the leader answers or the
caller's deadline has passed: a question changes nothing. What the leader knows is in `raft.leader`. The node and its
dispatcher use it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId
from smq.replication.api import DoneFn
from smq.replication.host import Host
from smq.replication.net import wire
from smq.replication.ports import Channel, Quorum, Rng
from smq.replication.runtime.deadlines import Deadline

PENDING_MAX: Final = 1_000  # waiting callers: each is one request of an operator's tool
RETRY_MS: Final = 100  # a lost question or answer, or a leader that is not known yet, costs this much
_NUMBER_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True, eq=False)
class _Pending:
    done: DoneFn[Quorum]
    deadline: Deadline | None = None


class QuorumQueries:
    def __init__(self, host: Host, rng: Rng, late: Callable[[], SmqError]) -> None:
        """`late` makes the error of a caller whose deadline has passed."""
        self._host = host
        self._late = late
        # Starts at a random number: an answer to this node's previous process is never taken for one to this.
        self._number = int.from_bytes(rng.randbytes(7), "big")
        self._pending: dict[int, _Pending] = {}
        self._closed: SmqError | None = None

    def describe(self, timeout_ms: int, done: DoneFn[Quorum]) -> None:
        closed = self._closed
        if closed is not None:
            self._host.deliver(lambda: done(closed))
            return
        if len(self._pending) >= PENDING_MAX:
            details = ErrorDetails(retry_after_ms=RETRY_MS)
            error = SmqError(ErrorCode.OVERLOADED, f"{PENDING_MAX} requests wait for the Raft leader", details)
            self._host.deliver(lambda: done(error))
            return
        self._number = number = (self._number + 1) & _NUMBER_MASK
        pending = self._pending[number] = _Pending(done)
        at_ns = self._host.clock.monotonic_ns() + timeout_ms * 1_000_000
        pending.deadline = self._host.deadlines.add(at_ns, lambda: self._conclude(number, self._late()))
        self._attempt(number)

    def _attempt(self, number: int) -> None:
        if number not in self._pending:
            return
        own, leader = self._host.engine.quorum(), self._host.engine.leader
        if own is not None:
            self._conclude(number, own)
            return
        if leader is not None and leader != self._host.node_id:
            self._host.links.send(leader, Channel.CONTROL, wire.DescribeQuorum(number))
        self._host.clock.call_later(RETRY_MS, partial(self._attempt, number))

    def _conclude(self, number: int, result: Quorum | SmqError) -> None:
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        if pending.deadline is not None:
            pending.deadline.cancel()
        self._host.deliver(lambda: pending.done(result))

    def close(self, error: SmqError) -> None:
        """The node is stopping: every caller gets the error, also later ones."""
        self._closed = error
        for number in list(self._pending):
            self._conclude(number, error)

    # ------------------------------------------------------------------------------------------- messages
    def on_query(self, peer: NodeId, message: wire.DescribeQuorum) -> None:
        """A node that does not lead gives no answer: the other node asks the next leader."""
        quorum = self._host.engine.quorum()
        if quorum is not None:
            self._host.links.send(peer, Channel.CONTROL, wire.QuorumDescribed(message.request, quorum))

    def on_described(self, message: wire.QuorumDescribed) -> None:
        self._conclude(message.request, message.quorum)
