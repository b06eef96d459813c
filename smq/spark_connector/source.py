"""The data source that Spark finds: name, schema, readers.

Owns nothing but the hand-over to the other modules, which it imports when they are needed: Spark imports this
module (through `pyspark_smq`) when any source at all is looked up, and a failure here would hide every source.
"""

from typing import TYPE_CHECKING, NoReturn

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
        from smq.spark_connector.options import check_given
        from smq.spark_connector.worker import spare_collector

        super().__init__(options)
        spare_collector()
        # CREATE TABLE passes the table's properties in as options (provider, owner, comment, ...), and none of
        # them, not even the OPTIONS, at a SELECT: only a read's own options can be judged.
        if "provider" not in options and "metadata" not in options:
            check_given(options)

    @classmethod
    def name(cls) -> str:
        return "smq"

    def schema(self) -> "StructType":
        """Kafka's connector's columns, and with includeHeaders and includeIndex the others."""
        from smq.spark_connector.options import flag
        from smq.spark_connector.schema import default_schema

        if "metadata" in self.options:
            from smq.spark_connector.metadata import metadata_schema

            return metadata_schema(self.options["metadata"])
        return default_schema(
            include_headers=flag(self.options, "includeHeaders", default=False),
            include_index=flag(self.options, "includeIndex", default=False),
        )

    def reader(self, schema: "StructType") -> "DataSourceReader":
        """A batch reader. OptionError where an option is missing or wrong, or `schema` names no column of ours."""
        from smq.spark_connector.options import flag, read_options
        from smq.spark_connector.reader import SmqPushdownReader, SmqReader

        if "metadata" in self.options:
            from smq.spark_connector.metadata import MetadataReader, metadata_options

            return MetadataReader(metadata_options(self.options), schema)
        is_pushdown = flag(self.options, "pushdown", default=False)
        return (SmqPushdownReader if is_pushdown else SmqReader)(read_options(self.options), schema)

    def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":
        """A stream reader. OptionError where an option is missing or wrong, or `schema` names no column of ours."""
        from smq.spark_connector.options import stream_options
        from smq.spark_connector.stream.reader import SmqStreamReader

        return SmqStreamReader(stream_options(self.options), schema)

    def writer(self, schema: "StructType", overwrite: bool) -> "DataSourceWriter":
        self._not_there("df.write", "publish with smq.clients")

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "DataSourceStreamWriter":
        self._not_there("df.writeStream", "publish with smq.clients in foreachBatch")

    def _not_there(self, what: str, advice: str) -> NoReturn:
        from smq.spark_connector.errors import OptionError

        raise OptionError(f"format('smq') does not support {what} in this version: {advice}")
