"""Spark DataSource V2 `format("smq")`: read a topic as a DataFrame, with its native offsets.

Importing this package imports neither Spark nor gRPC; `session()` and the data source load what they need.
"""

from typing import TYPE_CHECKING

from smq import extra_advice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["session"]


def session(app_name: str = "smq", *, master: str = "local[*]", conf: dict[str, str] | None = None) -> "SparkSession":
    """A local Spark session with settings for smq: Java is found or provided, workers use this interpreter.

    `conf` adds to the settings or overrides them. See `smq.spark_connector.local_session`.
    """
    try:
        import pyspark  # noqa: F401 - only to say what is missing
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"session() needs pyspark: {extra_advice('spark')}", name=e.name) from e
    from smq.spark_connector.local_session import build_session

    return build_session(app_name, master=master, conf=conf or {})
