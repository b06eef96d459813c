"""The batch reader: plans on the driver, reads on the executors.

Owns what Spark calls. A read is fixed when it is planned: the same offsets for every task and every retry. The
connections of a worker process live here, since Spark reuses its workers but not the reader.
"""

import gc
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from smq.records import BatchCorrupt
from smq.spark_connector.cluster import Cluster
from smq.spark_connector.decode import Decoder
from smq.spark_connector.errors import ReadError
from smq.spark_connector.fetching import RangeFetcher
from smq.spark_connector.options import ReadOptions
from smq.spark_connector.planning import PartitionView, Range, SmqSlice, plan_slices, resolve_ranges, select_partitions
from smq.spark_connector.schema import arrow_schema, check_projection

CLUSTERS_MAX: Final = 8  # clusters one worker keeps connections to; a session that reads more than that is rare

_clusters: OrderedDict[tuple[tuple[str, ...], int], Cluster] = OrderedDict()
_is_frozen = False


class SmqReader(DataSourceReader):
    """Reads [startingOffsets, endingOffsets) of the partitions that the options name."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._columns = check_projection(schema)

    def partitions(self) -> list[InputPartition]:
        """The slices of this read, with offsets as of now, as a list, since Spark refuses other sequences.

        An empty read has one empty slice, because Spark turns an empty list into InputPartition(None).
        """
        options = self._options
        cluster = cluster_of(options)
        layout = cluster.layout()
        keys = select_partitions(options, layout.counts)
        views = {
            key: PartitionView(lo=lo, hi=hi, replicas=layout.replicas[key])
            for key, (lo, hi) in cluster.ends(keys).items()
        }
        slices = plan_slices(
            resolve_ranges(options, views),
            partitions_min=options.partitions_min,
            records_per_partition_max=options.records_per_partition_max,
        )
        return list(slices) or [SmqSlice([])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one slice."""
        _freeze_once()
        ranges = partition.ranges if isinstance(partition, SmqSlice) else ()
        return self._read(ranges)

    def _read(self, ranges: tuple[Range, ...]) -> Iterator[Any]:
        schema = arrow_schema(self._schema)
        for wanted in ranges:
            fetcher = RangeFetcher(cluster_of(self._options), wanted, fail_on_data_loss=self._options.fail_on_data_loss)
            decoder = Decoder(wanted.topic, wanted.partition, self._columns, schema)
            try:
                for raw in fetcher:
                    yield from decoder.add(raw, wanted.lo, wanted.hi)
            except BatchCorrupt as e:
                raise ReadError(
                    f"{wanted.topic}-{wanted.partition}: {e}. Its checksum is right, so its producer wrote it this "
                    "way: read around it with startingOffsets and endingOffsets"
                ) from e
            yield from decoder.flush()


def cluster_of(options: ReadOptions) -> Cluster:
    """This process's connections for these options, kept for the next task."""
    key = (options.servers, options.retry_timeout_ms)
    cluster = _clusters.pop(key, None) or Cluster(options.servers, options.retry_timeout_ms)
    _clusters[key] = cluster
    while len(_clusters) > CLUSTERS_MAX:
        _clusters.popitem(last=False)[1].close()
    return cluster


def _freeze_once() -> None:
    """Takes what is loaded by now out of the garbage collector's sight: Spark's worker collects after every task,
    which costs 25-45 ms of walking over modules that never go away."""
    global _is_frozen
    if not _is_frozen:
        gc.collect()
        gc.freeze()
        _is_frozen = True
