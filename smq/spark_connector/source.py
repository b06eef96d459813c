"""The data source that Spark finds: name, schema, readers, writers.

Owns only the hand-over to the other modules, which it imports when they are needed: Spark imports this module (through
`pyspark_smq`) on the look-up of any source, and a failure here would hide every source.
"""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class SmqDataSource(DataSource):
    """`spark.read.format("smq").option("servers", ...).option("subscribe", topic).load()`"""

    def __init__(self, options: "MutableMapping[str, str]") -> None:
        from smq.spark_connector.garbage_collection import freeze_loaded_modules
        from smq.spark_connector.options import check_given

        super().__init__(options)
        freeze_loaded_modules()
        # CREATE TABLE passes the table's properties as options (provider, owner, comment, ...); a SELECT passes none of
        # them, not even the OPTIONS. So only a read's own options can be checked.
        if "provider" not in options and "metadata" not in options:
            check_given(options)

    @classmethod
    def name(cls) -> str:
        return "smq"

    def schema(self) -> "StructType":
        """The Kafka connector's columns; includeHeaders and includeIndex add the others."""
        from smq.spark_connector.options import flag
        from smq.spark_connector.schema import default_schema

        if "metadata" in self.options:
            from smq.spark_connector.metadata_source import metadata_schema

            return metadata_schema(self.options["metadata"])
        return default_schema(
            include_headers=flag(self.options, "includeHeaders", default=False),
            include_index=flag(self.options, "includeIndex", default=False),
        )

    def reader(self, schema: "StructType") -> "DataSourceReader":
        """A batch reader. OptionError if an option is missing or wrong, or `schema` names an unknown column."""
        from smq.spark_connector.batch_reader import SmqPushdownReader, SmqReader
        from smq.spark_connector.options import flag, read_options

        if "metadata" in self.options:
            from smq.spark_connector.metadata_source import MetadataReader, metadata_options

            return MetadataReader(metadata_options(self.options), schema)
        is_pushdown = flag(self.options, "pushdown", default=False)
        return (SmqPushdownReader if is_pushdown else SmqReader)(read_options(self.options), schema)

    def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":
        """A stream reader. OptionError if an option is missing or wrong, or `schema` names an unknown column."""
        from smq.spark_connector.options import stream_options
        from smq.spark_connector.stream.stream_reader import SmqStreamReader

        return SmqStreamReader(stream_options(self.options), schema)

    def writer(self, schema: "StructType", overwrite: bool) -> "DataSourceWriter":
        """A batch writer. OptionError if an option or a column is missing or wrong."""
        from smq.spark_connector.sink.write_options import sink_options
        from smq.spark_connector.sink.writer import SmqWriter

        return SmqWriter(sink_options(self.options, overwrite=overwrite, is_stream=False), schema)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "DataSourceStreamWriter":
        """A stream writer. OptionError if an option or a column is missing or wrong."""
        from smq.spark_connector.sink.write_options import sink_options
        from smq.spark_connector.sink.writer import SmqStreamWriter

        return SmqStreamWriter(sink_options(self.options, overwrite=overwrite, is_stream=True), schema)
