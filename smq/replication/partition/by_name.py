"""Partitions by the name or id of their topic: finding them, linearizable reads of the state, and their exact ranges.

Owns the rule that something is unknown only after a read barrier: until then it may have been created through another
node, and not be applied here. `Lookup.find` is the one place that decides it, for the node's own requests and, through
NodeApi, for the services. Owns the way from names to the answers of `exact_ends`, and back. The node and `producing`
import it, and services its errors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, PartitionId, PartitionIndex, TopicId, partition_id
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import DoneFn, PartitionEnd, PartitionRange
from smq.replication.commands.coalescing import Barriers
from smq.replication.host import Host
from smq.replication.partition.exact_ends import Ends, ExactEnds
from smq.replication.partition.reads import read_failure

T = TypeVar("T")

TIMEOUT_MS_MAX: Final = 60_000  # the longest timeout that a caller may ask for


def clipped(timeout_ms: int) -> int:
    """A caller's timeout within bounds."""
    return max(0, min(timeout_ms, TIMEOUT_MS_MAX))


def unknown_topic(topic: str) -> SmqError:
    return SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")


def unknown_topic_id(topic_id: TopicId) -> SmqError:
    return SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic with the id {topic_id.hex()}")


def unknown_partition(state: ClusterState, topic: str | TopicId, partition: int) -> SmqError:
    """Why the state, which must be as of a barrier, does not have the partition of the topic with this name or id."""
    name = topic if isinstance(topic, str) else state.topic_names.get(topic)
    found = None if name is None else state.topics.get(name)
    if found is None:
        return unknown_topic(topic) if isinstance(topic, str) else unknown_topic_id(topic)
    message = f"topic {name!r} has partitions 0 to {len(found.partitions) - 1}, not {partition}"
    return SmqError(ErrorCode.UNKNOWN_PARTITION, message)


def check_has_records(part: PartitionState, topic: str) -> None:
    if part.is_external:
        raise SmqError(ErrorCode.WRONG_STORAGE, f"topic {topic!r} keeps its records elsewhere (storage=external)")


def partition_in(state: ClusterState, topic: str | TopicId, partition: int) -> PartitionState | None:
    """By the topic's name or id."""
    if isinstance(topic, str):
        return state.partition_of(topic, partition)
    return state.partition(partition_id(topic, PartitionIndex(partition))) if partition >= 0 else None


class Lookup:
    def __init__(self, host: Host, barriers: Barriers) -> None:
        self._host = host
        self._barriers = barriers
        self.refusal: SmqError | None = None  # what every request gets once the node waits for an upgrade

    def find(self, look_up: Callable[[ClusterState], T | None], timeout_ms: int, done: DoneFn[T | None]) -> None:
        """Calls `done` with what `look_up` finds: within this call if it finds anything, otherwise after a barrier.
        None, which only follows a barrier, means that it is unknown. `look_up` must not raise."""
        found = look_up(self._host.state) if self.refusal is None else self.refusal
        if found is not None:
            done(found)
            return

        def after_barrier(result: LogIndex | SmqError) -> None:
            done(result if isinstance(result, SmqError) else look_up(self._host.state))

        self._barriers.wait(clipped(timeout_ms), after_barrier)

    def known_partition(self, topic: str | TopicId, partition: int) -> PartitionState | None:
        """As this node has applied it. None proves nothing; it is also the answer of a node that has stopped."""
        return partition_in(self._host.state, topic, partition) if self.refusal is None else None

    def timer(self, timeout_ms: int) -> Callable[[], int]:
        """For requests of several steps: what is left of a caller's timeout, in milliseconds."""
        until_ns = self._host.clock.monotonic_ns() + clipped(timeout_ms) * 1_000_000
        return lambda: max(0, (until_ns - self._host.clock.monotonic_ns()) // 1_000_000)

    def applied_partition(self, topic: str, partition: int) -> PartitionState:
        """For callers that have passed a barrier: raises UNKNOWN_TOPIC, UNKNOWN_PARTITION as of the applied state."""
        found = self._host.state.partition_of(topic, partition)
        if found is None:
            raise unknown_partition(self._host.state, topic, partition)
        return found

    def with_partition(
        self,
        topic: str | TopicId,
        partition: int,
        timeout_ms: int,
        done: DoneFn[T],
        use: Callable[[PartitionState], None],
    ) -> None:
        """Finds the partition, by the topic's name or id, and calls `use` with it. An SmqError that `use` raises goes
        to `done`."""

        def on_found(found: PartitionState | SmqError | None) -> None:
            if found is None:
                found = unknown_partition(self._host.state, topic, partition)
            if isinstance(found, SmqError):
                self._host.deliver(partial(done, found))
                return
            try:
                use(found)
            except SmqError as e:
                # Without its traceback: that leads to this frame, and so to the request, which only the garbage
                # collector would find again. It counts objects, and a request may have megabytes.
                self._host.deliver(partial(done, e.with_traceback(None)))

        known = self.known_partition(topic, partition)
        if known is not None:  # the hot path, without `find` and its closures
            on_found(known)
        else:
            self.find(lambda state: partition_in(state, topic, partition), timeout_ms, on_found)

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


class RangesRequest:
    """A request for the exact ranges of partitions by name, at any node.

    A topic may have been deleted and created again under its name, so an unknown partition is looked up once more, in
    the state that does not have it."""

    def __init__(
        self,
        host: Host,
        lookup: Lookup,
        ends: ExactEnds,
        partitions: Sequence[tuple[str, int]],
        timeout_ms: int,
        done: DoneFn[list[PartitionRange | SmqError]],
        at_leader: bool,
    ) -> None:
        self._host = host
        self._lookup = lookup
        self._ends = ends
        self._names = partitions
        self._time_left_ms = lookup.timer(timeout_ms)
        self._done = done
        self._at_leader = at_leader
        self._pids: dict[tuple[str, int], PartitionId] = {}  # as asked
        self._found: dict[tuple[str, int], PartitionRange | SmqError] = {}

    def start(self) -> None:
        self._lookup.find(lambda state: _are_known(state, self._names) or None, self._time_left_ms(), self._on_known)

    def _on_known(self, result: bool | SmqError | None) -> None:
        if isinstance(result, SmqError):
            self._host.deliver(lambda: self._done(result))
        else:  # what the state does not have is unknown: it is as of a barrier then
            self._ask(dict.fromkeys(self._names))

    def _ask(self, names: dict[tuple[str, int], None]) -> None:
        state = self._host.state
        self._pids.clear()
        for topic, index in names:
            part = state.partition_of(topic, index)
            if part is None:
                self._found[topic, index] = unknown_partition(state, topic, index)
            else:
                self._pids[topic, index] = part.pid
        self._ends.ask(self._pids.values(), self._time_left_ms(), self._on_ends, at_leader=self._at_leader)

    def _on_ends(self, ends: Ends) -> None:
        again: dict[tuple[str, int], None] = {}
        for name, pid in self._pids.items():
            end = ends[pid]
            found = self._range(name, pid, end) if isinstance(end, PartitionEnd) else end
            if isinstance(found, SmqError) and found.code is ErrorCode.UNKNOWN_TOPIC:
                again[name] = None
            else:
                self._found[name] = found
        if again:
            self._ask(again)
        else:
            self._done([self._found[name] for name in self._names])

    def _range(self, name: tuple[str, int], pid: PartitionId, end: PartitionEnd) -> PartitionRange | SmqError:
        part = self._host.state.partition(pid)
        if part is None:
            return SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted")
        return PartitionRange(
            topic=name[0],
            partition=PartitionIndex(name[1]),
            pid=pid,
            log_start=end.log_start,
            lso=end.lso,
            hwm=end.hwm,
            next_offset=end.log_end,
            leader=part.leader if part.is_external else end.leader,
            epoch=end.epoch,
            replicas=part.replicas,
        )


def _are_known(state: ClusterState, names: Sequence[tuple[str, int]]) -> bool:
    return all(state.partition_of(topic, index) is not None for topic, index in names)
