"""Spark imports every module named pyspark_* and registers its DefaultSource, so `format("smq")` just works."""

from smq.spark_connector.source import SmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
