"""The digest of the replicated state at one index, computed in steps.

Owns the waiting callers and the progress. The digest is of an unmoved state: if an entry moves the state meanwhile, it
starts again, and the node lets no further entry in until it is done (`holds_state`). It must never change the state,
nor hold it back for ever: its steps follow each other by themselves. Only the applied state imports it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from typing import Final, TypeAlias

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import LogIndex
from smq.replication.ports import Clock

PIECES_PER_STEP: Final = 4  # of the snapshot: some two milliseconds
WAITING_MAX: Final = 1_000  # callers of one digest; further ones are refused
_RETRY: Final = ErrorDetails(retry_after_ms=200)

DigestDone: TypeAlias = Callable[[tuple[LogIndex, str] | SmqError], None]


class Digests:
    """`pieces` begins the snapshot of the present state, which is at `index`."""

    def __init__(self, clock: Clock, pieces: Callable[[], Iterator[bytes]], index: Callable[[], LogIndex]) -> None:
        self._clock = clock
        self._make_pieces = pieces
        self._index = index
        self._pieces: Iterator[bytes] | None = None
        self._sum = sha256()
        self._waiting: list[DigestDone] = []
        self.holds_state = False

    def request(self, done: DigestDone) -> None:
        """`done` gets the digest and its index, which is no older than the state's at this call."""
        if len(self._waiting) >= WAITING_MAX:
            done(SmqError(ErrorCode.OVERLOADED, f"{WAITING_MAX} other callers wait for the digest", _RETRY))
            return
        self._waiting.append(done)
        if self._pieces is None:
            self._begin()
            self._clock.call_soon(self._step)

    def request_here(self, done: DigestDone) -> None:
        """Of the state as it is at this call: no entry is let in until the digest is done."""
        self.request(done)
        self.holds_state = self._pieces is not None

    def on_state_moved(self) -> None:
        if self._pieces is not None:
            self._begin()
            self.holds_state = True

    def close(self, error: SmqError) -> None:
        self._pieces = None
        self._end(error)

    def _begin(self) -> None:
        self._pieces, self._sum = self._make_pieces(), sha256()

    def _step(self) -> None:
        if self._pieces is None:
            return
        for _ in range(PIECES_PER_STEP):
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                self._end((self._index(), self._sum.hexdigest()))
                return
            self._sum.update(piece)
        self._clock.call_soon(self._step)

    def _end(self, result: tuple[LogIndex, str] | SmqError) -> None:
        self.holds_state = False
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            self._clock.call_soon(partial(done, result))
