"""The batch readers: they plan on the driver and read on the executors.

Owns the methods that Spark calls. A read is fixed when it is planned: the same offsets for every task and retry.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from smq.spark_connector.garbage_collection import freeze_loaded_modules
from smq.spark_connector.options import ReadOptions
from smq.spark_connector.planning import Range, SmqSlice, resolve_ranges, slices_of
from smq.spark_connector.pushdown import Bounds, narrowed
from smq.spark_connector.read_bounds import LookUp, Views, is_named, select_partitions
from smq.spark_connector.schema import check_projection
from smq.spark_connector.tasks import cluster_of, read_slice

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


class SmqReader(DataSourceReader):
    """Reads [startingOffsets, endingOffsets) of the partitions that the options name."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        check_projection(schema)

    def partitions(self) -> list[InputPartition]:
        """The slices of this read, with offsets as of now. A list, because Spark refuses other sequences.

        An empty read has one empty slice, because Spark turns an empty list into InputPartition(None).
        """
        freeze_loaded_modules()
        return list(slices_of(self._options.source, self._ranges())) or [SmqSlice([])]

    def _ranges(self) -> list[Range]:
        source = self._options.source
        cluster = cluster_of(source)
        layout = cluster.layout(exact=lambda key: is_named(source, key))
        views = {key: layout.views[key] for key in select_partitions(source, layout.views, layout.external)}
        return self._resolve(views, lambda unit, times: cluster.offsets_at(unit, times, views))

    def _resolve(self, views: Views, look_up: LookUp) -> list[Range]:
        return resolve_ranges(self._options, views, look_up)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one slice."""
        ranges = partition.ranges if isinstance(partition, SmqSlice) else ()
        return read_slice(self._options.source, self._schema, ranges)


class SmqPushdownReader(SmqReader):
    """As SmqReader, but reads only topics, partitions, offsets and append times that pass the query's filters.

    One filter per load(): Spark plans a read once and reuses it for all DataFrames derived from the same load(), so
    records filtered by one of them are missing in the others. Therefore it is not the default.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._bounds = Bounds()

    def pushFilters(self, filters: list["Filter"]) -> Iterable["Filter"]:
        """Uses the filters that narrow the read, and also leaves all of them to Spark: that is cheap on fewer rows."""
        self._bounds = Bounds.of(filters)
        return filters

    def _resolve(self, views: Views, look_up: LookUp) -> list[Range]:
        return narrowed(super()._resolve(views, look_up), self._bounds, look_up)
