"""Finding partitions by name, and linearizable reads of the replicated state.

Owns the rule that only a node that has passed a read barrier may say UNKNOWN_TOPIC or UNKNOWN_PARTITION: until then the
topic may have been created through another node, and not be applied here. The node's requests import it.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex
from smq.raft_state.state import PartitionState
from smq.replication.api import DoneFn
from smq.replication.host import Host
from smq.replication.partition.reads import read_failure
from smq.replication.proposer import Barriers

T = TypeVar("T")

TIMEOUT_MS_MAX: Final = 60_000  # the longest timeout that a caller may ask for


def clipped(timeout_ms: int) -> int:
    """A caller's timeout within bounds."""
    return max(0, min(timeout_ms, TIMEOUT_MS_MAX))


class Lookup:
    def __init__(self, host: Host, barriers: Barriers) -> None:
        self._host = host
        self._barriers = barriers

    def find(self, topic: str, partition: int) -> PartitionState:
        """For callers that have passed a barrier: raises UNKNOWN_TOPIC, UNKNOWN_PARTITION as of the applied state."""
        state = self._host.state.topics.get(topic)
        if state is None:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")
        if not 0 <= partition < len(state.partitions):
            message = f"topic {topic!r} has partitions 0 to {len(state.partitions) - 1}, not {partition}"
            raise SmqError(ErrorCode.UNKNOWN_PARTITION, message)
        return state.partitions[partition]

    def with_partition(
        self, topic: str, partition: int, timeout_ms: int, done: DoneFn[T], use: Callable[[PartitionState], None]
    ) -> None:
        """Calls `use` with the partition: immediately if its name is known, otherwise after a barrier. An SmqError that
        `use` raises goes to `done`."""

        def attempt() -> None:
            try:
                use(self.find(topic, partition))
            except SmqError as e:
                # Without its traceback: that leads to this frame, and so to the request, which only the garbage
                # collector would find again. It counts objects, and a request may have megabytes.
                self._host.deliver(partial(done, e.with_traceback(None)))

        def after_barrier(result: LogIndex | SmqError) -> None:
            if isinstance(result, SmqError):
                self._host.deliver(partial(done, result))
            else:
                attempt()

        known = self._host.state.topics.get(topic)
        if known is not None and 0 <= partition < len(known.partitions):
            attempt()
        else:
            self._barriers.wait(clipped(timeout_ms), after_barrier)

    def after_barrier(self, timeout_ms: int, done: DoneFn[T], look_up: Callable[[], T]) -> None:
        """A linearizable read of the replicated state. What `look_up` raises goes to `done`."""

        def read(result: LogIndex | SmqError) -> None:
            if isinstance(result, SmqError):
                done(result)
                return
            try:
                answer: T | SmqError = look_up()
            except Exception as e:  # noqa: BLE001  # a read changes nothing: whatever it was, the node lives on
                answer = read_failure(e)
            done(answer)

        self._barriers.wait(clipped(timeout_ms), read)
