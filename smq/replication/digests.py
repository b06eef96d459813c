"""The digest of the replicated state at one index, a step at a time.

Owns who waits for it and how far it is. It is of a state that stood still: where an entry moves the state on the way,
it begins anew, and the node lets no further entry in until it is done (`holds_state`). It must never change the state,
nor hold it back without an end in sight: its steps follow each other by themselves. Only the applied state imports it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from typing import Final, TypeAlias

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import LogIndex
from smq.replication.ports import Clock

PIECES_A_STEP: Final = 4  # of the snapshot: some two milliseconds
WAITING_MAX: Final = 1_000  # who asked for one and the same digest; more are refused
_RETRY: Final = ErrorDetails(retry_after_ms=200)

DigestDone: TypeAlias = Callable[[tuple[LogIndex, str] | SmqError], None]


class Digests:
    """`pieces` begins the snapshot of the present state, whose index is `index`."""

    def __init__(self, clock: Clock, pieces: Callable[[], Iterator[bytes]], index: Callable[[], LogIndex]) -> None:
        self._clock = clock
        self._new_pieces = pieces
        self._index = index
        self._pieces: Iterator[bytes] | None = None
        self._sum = sha256()
        self._waiting: list[DigestDone] = []
        self.holds_state = False

    def request(self, done: DigestDone) -> None:
        """`done` gets the digest, and the index that the state is of by then: no older than when this was called."""
        if len(self._waiting) >= WAITING_MAX:
            done(SmqError(ErrorCode.OVERLOADED, f"{WAITING_MAX} others wait for the digest", _RETRY))
            return
        self._waiting.append(done)
        if self._pieces is None:
            self._begin()
            self._clock.call_soon(self._go_on)

    def on_state_moved(self) -> None:
        if self._pieces is not None:
            self._begin()
            self.holds_state = True

    def close(self, error: SmqError) -> None:
        self._pieces = None
        self._end(error)

    def _begin(self) -> None:
        self._pieces, self._sum = self._new_pieces(), sha256()

    def _go_on(self) -> None:
        if self._pieces is None:
            return
        for _ in range(PIECES_A_STEP):
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                self._end((self._index(), self._sum.hexdigest()))
                return
            self._sum.update(piece)
        self._clock.call_soon(self._go_on)

    def _end(self, result: tuple[LogIndex, str] | SmqError) -> None:
        self.holds_state = False
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            self._clock.call_soon(partial(done, result))
