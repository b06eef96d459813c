"""The options of a write, validated on the driver.

Owns their names, defaults and meanings. Does no I/O and knows no cluster. Option keys arrive lower-cased from Spark.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from smq.records import CODECS
from smq.spark_connector import option_values as values
from smq.spark_connector.errors import OptionError
from smq.spark_connector.options import (
    READ_ONLY,
    RETRY_TIMEOUT_MS_DEFAULT,
    Security,
    check_given,
    security_of,
    servers_of,
)

APP_BYTES_MAX: Final = 400  # the transactional ids of its tasks are longer, and may have 512
# A task's rows wait for all tasks of the job, so as long as a cluster allows by default.
TRANSACTION_TIMEOUT_MS_DEFAULT: Final = 900_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """A validated write. `app` and `version` name one that may be repeated; a stream has them from its checkpoint.
    Without `fail_on_data_loss`, a repetition is not compared with what was written."""

    servers: tuple[str, ...]
    topic: str | None
    app: str | None
    version: int | None
    fail_on_data_loss: bool
    codec: str
    transaction_timeout_ms: int
    retry_timeout_ms: int
    security: Security


def sink_options(options: Mapping[str, str], *, overwrite: bool, is_stream: bool) -> SinkOptions:
    """OptionError if an option is missing or wrong, or only for reads."""
    check_given(options)
    if overwrite:
        raise OptionError("format('smq') appends to topics: write .mode('append'), or .outputMode('append')")
    for name in READ_ONLY:
        if options.get(name.lower()) is not None:
            raise OptionError(f"option {name!r} is only for reads: leave it out of a write, which names its topic")
    topic = options.get("topic")
    if topic is not None:
        if len(values.topics(topic)) != 1:
            raise OptionError("option 'topic' names one topic: use a column 'topic' for rows of several")
        (topic,) = values.topics(topic)
    app, version = options.get("txnAppId".lower()), values.whole_number(options, "txnVersion", least=0)
    _check_app(app, version, is_stream=is_stream)
    return SinkOptions(
        servers=servers_of(options),
        topic=topic,
        app=app,
        version=version,
        fail_on_data_loss=values.flag(options, "failOnDataLoss", default=True),
        codec=values.one_of(options, "kafka.compression.type", tuple(CODECS)),
        transaction_timeout_ms=values.whole_number(options, "transactionTimeoutMs") or TRANSACTION_TIMEOUT_MS_DEFAULT,
        retry_timeout_ms=values.whole_number(options, "retryTimeoutMs") or RETRY_TIMEOUT_MS_DEFAULT,
        security=security_of(options),
    )


def _check_app(app: str | None, version: int | None, *, is_stream: bool) -> None:
    if app is not None and not 1 <= len(app.encode()) <= APP_BYTES_MAX:
        raise OptionError(f"option 'txnAppId' must have 1 to {APP_BYTES_MAX} bytes, not {len(app.encode())}")
    if is_stream and (app is not None or version is not None):
        raise OptionError(
            "options 'txnAppId' and 'txnVersion' are only for batch writes: a stream's name and the numbers of its"
            " micro-batches are in its checkpoint"
        )
    if (app is None) != (version is None):
        raise OptionError(
            "give options 'txnAppId' and 'txnVersion' together: the name of the job, and a number that grows from write"
            " to write (in foreachBatch, the batch id)"
        )
