"""A snapshot from another node on its way into this one's state, step by step.

Owns how much of it a turn of the engine does. It must never touch the journal, which is replaced behind the last step:
should the process end before, what is on disk is the state of before, and the leader sends the snapshot again. Only the
engine imports it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from smq.replication.raft.journal import Snapshot

STEPS_A_TURN: Final = 4  # about a millisecond
_END: Final = object()


@dataclass(frozen=True, slots=True)
class Installation:
    """`steps` are the state machine's; `done` is for whoever began it."""

    snapshot: Snapshot
    steps: Iterator[None]
    done: Callable[[], None]

    def go_on(self) -> bool:
        """True once the state machine holds the snapshot."""
        return any(next(self.steps, _END) is _END for _ in range(STEPS_A_TURN))
