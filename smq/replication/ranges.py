"""A request for the exact ranges of partitions by name, at any node.

Owns the way from names to the answers of `partition.exact_ends`, and back. A topic may have been deleted and created
again under its name, so an unknown partition is looked up once more, in the state that does not have it. Only the
node's requests import it.
"""

from collections.abc import Sequence

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionId, PartitionIndex
from smq.raft_state.state import ClusterState
from smq.replication.api import DoneFn, PartitionEnd, PartitionRange
from smq.replication.host import Host
from smq.replication.lookup import Lookup, unknown_partition
from smq.replication.partition.exact_ends import Ends, ExactEnds


class RangesRequest:
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
