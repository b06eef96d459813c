"""Handler of CompactSegment: what a compacted partition's replicas end with.

Owns a partition's segments: they lie one after another from at most the log start to `compacted_end`, below the high
water mark. Their borders are batch borders in every replica's log, however old its bytes are: a border may vanish from
this list, but no new one appears below `compacted_end`. It must never judge what a compaction removed: the leader does.
`command_table` and the handler of the log start import it.
"""

from bisect import bisect_left

from smq.raft_state.commands import CompactSegment
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import SEGMENT_DIGEST_BYTES
from smq.raft_state.refusal import Refused, find_partition
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, PartitionState, Segment


def compact_segment(state: ClusterState, command: CompactSegment) -> Applied:
    partition = find_partition(state, command.partition)
    if partition.is_external:
        raise Refused(ErrorCode.WRONG_STORAGE, "a partition of external storage has no records to compact")
    if (command.epoch, command.compactions_seen) != (partition.epoch, partition.compactions):
        raise Refused(
            ErrorCode.STALE_EPOCH,
            f"the partition is in epoch {partition.epoch} and has been compacted {partition.compactions} times,"
            f" not in {command.epoch} and {command.compactions_seen}",
        )
    if len(command.digest) != SEGMENT_DIGEST_BYTES or command.tombstones_ms < 0:
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"a digest has {SEGMENT_DIGEST_BYTES} bytes, and times are not negative"
        )
    first, stop = _covered(partition, command)
    segments = partition.segments
    segments[first:stop] = [Segment(command.start, command.digest, command.tombstones_ms, command.is_reset)]
    if command.is_reset:
        segments[first + 1 :] = [segment._replace(is_dirty=True) for segment in segments[first + 1 :]]
    partition.compacted_end = max(partition.compacted_end, command.end)
    partition.compactions += 1
    return Applied(reply=Done(), touched=(command.partition,))


def _covered(partition: PartitionState, command: CompactSegment) -> tuple[int, int]:
    """The numbers of the first segment that the new one replaces, and of the first that stays after it."""
    segments, end = partition.segments, partition.compacted_end
    starts = [segment.start for segment in segments]
    if not command.start < command.end <= partition.hwm:
        raise _misplaced(partition, command)
    first = bisect_left(starts, command.start)
    is_border = first < len(starts) and starts[first] == command.start
    is_next = command.start == end
    if not segments:
        is_next = command.start <= partition.log_start < command.end and command.log_start_seen == partition.log_start
    if not is_border and not is_next:
        raise _misplaced(partition, command)
    stop = bisect_left(starts, command.end)
    if command.end < end and (stop == len(starts) or starts[stop] != command.end):
        raise _misplaced(partition, command)
    return first, stop


def _misplaced(partition: PartitionState, command: CompactSegment) -> Refused:
    return Refused(
        ErrorCode.INVALID_REQUEST,
        f"[{command.start}, {command.end}) is no stretch of whole segments: the log starts at {partition.log_start},"
        f" {len(partition.segments)} segments end at {partition.compacted_end}, and the hwm is {partition.hwm}",
    )


def forget_segments(partition: PartitionState) -> None:
    """The log start has moved: segments that end at or below it are gone."""
    segments = partition.segments
    keep = 0
    while keep < len(segments) and partition.segment_end(keep) <= partition.log_start:
        keep += 1
    del segments[:keep]
