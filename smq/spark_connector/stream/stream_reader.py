"""The stream reader: Spark calls it for each micro-batch, in one process on the driver per query.

Owns a query's position and the extent of its next micro-batch. A micro-batch is determined by its start and its end
alone, so a replay reads the same records. An exception in latestOffset or partitions ends the query: an unavailable
cluster makes the query wait, lost records raise.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from smq.raft_state.errors import ErrorCode, SmqError
from smq.spark_connector.cluster_calls import GONE, Cluster, Layout
from smq.spark_connector.errors import CheckpointError, ReadError, report_loss
from smq.spark_connector.options import StreamOptions
from smq.spark_connector.planning import SmqSlice, ranges_between, slices_of
from smq.spark_connector.read_bounds import (
    PartitionKey,
    PartitionView,
    check_storage,
    is_named,
    matching_partitions,
    select_partitions,
    starting_offsets,
)
from smq.spark_connector.schema import check_projection
from smq.spark_connector.stream.read_limits import Limits, admit, default_limit, limits_of
from smq.spark_connector.stream.stream_offset import StreamOffset
from smq.spark_connector.tasks import cluster_of, read_slice

log = logging.getLogger(__name__)

# How long one look-up at the cluster may take: query.stop() waits for it. After "nothing new" Spark asks again.
LOOK_UP_TIMEOUT_S: Final = 10.0
RACES_MAX: Final = 3  # with retention or a deletion, in one latestOffset: each lasts milliseconds


class SmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the partitions that the options name, starting at startingOffsets or at the checkpoint."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        check_projection(schema)
        self._options = options
        self._schema = schema
        self._initial: dict[str, Any] | None = None
        self._target: dict[PartitionKey, int] | None = None  # of Trigger.AvailableNow
        self._newest: StreamOffset | None = None
        self._last_batch_s: float | None = None  # monotonic
        self._turn = 0

    # ------------------------------------------------------------------------------------------- positions
    def initialOffset(self) -> dict[str, Any]:
        """Where a new query starts. Spark asks twice during the first micro-batch: both answers must be the same."""
        if self._initial is None:
            source = self._options.source
            cluster = self._cluster()
            layout = cluster.layout(exact=lambda key: is_named(source, key))
            views = {key: layout.views[key] for key in select_partitions(source, layout.views, layout.external)}
            starts = starting_offsets(source, views, lambda unit, times: cluster.offsets_at(unit, times, views))
            fresh = StreamOffset(next_offsets=starts, topic_ids=layout.topic_ids, is_fresh=True)
            self._initial = fresh.to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return default_limit(self._options)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes the end of this run: later records are for the next run."""
        layout = self._cluster().layout(exact=lambda key: is_named(self._options.source, key))
        keys = matching_partitions(self._options.source, layout.views)
        self._target = {key: layout.views[key].hi for key in keys}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch; exactly `start` if there is nothing (worth a trigger) to read."""
        races = 0
        while True:
            try:
                return self._planned(start, limit)
            except ReadError as e:
                if self._target is not None:
                    raise  # "nothing new" would end the run as if everything had been read
                log.warning("the query waits: %s", e)
                return start
            except SmqError as e:
                # Retention or a deletion happened between two calls: the next layout shows it.
                races += 1
                if e.code not in (*GONE, ErrorCode.OFFSET_OUT_OF_RANGE) or races == RACES_MAX:
                    raise

    def _planned(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = StreamOffset.of_json(start)
        cluster = self._cluster()
        timeout_s = LOOK_UP_TIMEOUT_S if self._target is None else None
        # Without a target, a partition without a leader has nothing new beyond what is known, and holds up no other.
        layout = cluster.layout(timeout_s, exact=lambda key: self._target is not None and key in self._target)
        check_storage(self._options.source, layout.external)  # a restarted query asks for no initial offset
        positions = self._positions(begin, layout)
        self._newest = StreamOffset(
            next_offsets={key: max(layout.views[key].hi, position) for key, position in positions.items()},
            topic_ids=layout.topic_ids,
        )
        goals = {key: self._goal(key, layout.views[key], position) for key, position in positions.items()}
        limits = limits_of(self._options, limit)
        if self._is_postponed(limits, sum(goals[key] - positions[key] for key in positions)):
            return start
        ends = admit(
            positions,
            goals,
            limits,
            lambda requested: cluster.sized_ends(requested, layout.views, timeout_s),
            self._turn,
        )
        ids = {topic: layout.topic_ids[topic] for topic, _ in positions}
        if ends == begin.next_offsets and ids == begin.topic_ids:
            return start
        self._turn += 1
        self._last_batch_s = time.monotonic()
        starts = {k: p for k, p in positions.items() if begin.is_fresh or begin.next_offsets.get(k) != p}
        return StreamOffset(next_offsets=ends, topic_ids=ids, starts=starts).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The end of the readable records when the last micro-batch was planned. With the progress' endOffset it gives
        the lag."""
        return None if self._newest is None else self._newest.to_json()

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has processed everything before `end`. Nothing depends on it: the position is in the checkpoint, and
        Spark calls this only when it plans the next micro-batch, so never for the last one."""

    def stop(self) -> None:
        self._cluster().close()

    # ---------------------------------------------------------------------------------------- reading
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of the micro-batch [start, end); every call gives the same records."""
        begin, stop = StreamOffset.of_json(start), StreamOffset.of_json(end)
        if stop.is_fresh:
            return []  # a replay of a first micro-batch without records: `start` may have moved since
        starts = {key: stop.starts.get(key, begin.next_offsets.get(key)) for key in stop.next_offsets}
        unknown = [f"{topic}-{partition}" for (topic, partition), lo in starts.items() if lo is None]
        if unknown:
            raise CheckpointError(f"the checkpoint does not say where {', '.join(unknown)} started")
        layout = self._cluster().layout()
        known = {key: offset for key, offset in starts.items() if offset is not None}
        left = self._still_readable(stop, known, layout)
        los, his = ({key: ends[i] for key, ends in left.items()} for i in (0, 1))
        return list(slices_of(self._options.source, ranges_between(los, his, layout.views)))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one slice."""
        ranges = partition.ranges if isinstance(partition, SmqSlice) else ()
        return read_slice(self._options.source, self._schema, ranges)

    # ---------------------------------------------------------------------------------------- leaves
    def _cluster(self) -> Cluster:
        return cluster_of(self._options.source)

    def _positions(self, begin: StreamOffset, layout: Layout) -> dict[PartitionKey, int]:
        """Where to read each existing partition from: new partitions from their beginning."""
        positions: dict[PartitionKey, int] = {}
        for key, offset in begin.next_offsets.items():
            if not is_named(self._options.source, key):
                log.warning("%s-%d is no longer read: the options of the restarted query do not name it", *key)
                continue
            position = self._position(key, offset, begin.topic_ids, layout)
            if position is not None:
                positions[key] = position
        for key in matching_partitions(self._options.source, layout.views):
            if key not in begin.next_offsets and (self._target is None or key in self._target):
                positions[key] = layout.views[key].lo
                log.info("%s-%d is new: reading it from offset %d on", *key, positions[key])
        return positions

    def _position(self, key: PartitionKey, offset: int, topic_ids: Mapping[str, str], layout: Layout) -> int | None:
        """`offset`, or the next existing one; None if the partition is gone. DataLossError if records are gone."""
        name = f"{key[0]}-{key[1]}"
        view = layout.views.get(key)
        if view is None:
            self._lost(f"{name} is gone: the topic has been deleted")
            return None
        if topic_ids.get(key[0]) != layout.topic_ids[key[0]]:
            self._lost(f"topic {key[0]!r} has been deleted and created again since offset {offset} of {name}")
            return view.lo
        if offset < view.lo:
            self._lost(f"offsets [{offset}, {view.lo}) of {name} are gone: the log now starts at {view.lo}")
            return view.lo
        if offset > view.hi and view.is_end_known:
            self._lost(f"{name} ends at {view.hi}, before offset {offset} that the query has reached")
            return view.hi
        return offset

    def _still_readable(
        self, stop: StreamOffset, los: Mapping[PartitionKey, int], layout: Layout
    ) -> dict[PartitionKey, tuple[int, int]]:
        """The ranges [lo, hi) of a planned micro-batch that still exist. DataLossError if part of it is gone."""
        left: dict[PartitionKey, tuple[int, int]] = {}
        for key, hi in stop.next_offsets.items():
            lo = self._position(key, los[key], stop.topic_ids, layout) if los[key] < hi else None
            if lo is None or stop.topic_ids.get(key[0]) != layout.topic_ids[key[0]]:
                continue
            end = layout.views[key].hi if layout.views[key].is_end_known else max(hi, lo)
            if hi > end and los[key] <= end:
                self._lost(f"{key[0]}-{key[1]} ends at {end}, before offset {hi} that a micro-batch was to read")
            left[key] = (lo, min(hi, end))
        return left

    def _goal(self, key: PartitionKey, view: PartitionView, position: int) -> int:
        if self._target is None:
            return max(position, view.hi)
        return max(position, min(view.hi, self._target.get(key, position)))

    def _is_postponed(self, limits: Limits, rows: int) -> bool:
        """True while there are fewer than minOffsetsPerTrigger rows and maxTriggerDelay has not passed since this run's
        last micro-batch. The first micro-batch is never postponed, nor is any with Trigger.AvailableNow."""
        if limits.rows_min is None or rows >= limits.rows_min or self._target is not None:
            return False
        if self._last_batch_s is None:
            return False
        return time.monotonic() - self._last_batch_s < self._options.delay_ms_max / 1000

    def _lost(self, message: str) -> None:
        report_loss(message, fail=self._options.source.fail_on_data_loss)
