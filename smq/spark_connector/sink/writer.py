"""The writers: Spark calls `write` in each task, and `commit` or `abort` on the driver.

Owns the names of a job's transactions, and what a commit message says. A task's rows are staged in a transaction of its
attempt; the commit makes those of all tasks visible by one call, once for each batch of the app. Ids are the same from
batch to batch, so that a new attempt fences one that is still alive, and a stream needs few of them. A write that is
not repeated has ids of its own, which are forgotten with it.
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError
from smq.spark_connector.errors import SinkError
from smq.spark_connector.garbage_collection import freeze_loaded_modules
from smq.spark_connector.sink.columns import Columns, check_columns, values_of
from smq.spark_connector.sink.staging import Staging, abort_of_dead_quietly, abort_quietly
from smq.spark_connector.sink.transaction_calls import Producer, commit_batch
from smq.spark_connector.sink.write_options import SinkOptions
from smq.spark_connector.tasks import connected

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

# Spark sets it for the tasks of a stream. It is in the checkpoint, so it stays over restarts.
_QUERY_ID: Final = "sql.streaming.queryId"
_FENCED: Final = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.UNKNOWN_TRANSACTIONAL_ID})


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task has staged; no producer if it had no rows."""

    app: str
    producer: Producer | None
    rows: int
    digest: int  # of the rows (see `columns`); 0 if they are not compared
    earlier: tuple[str, ...]  # transactional ids of the attempts before this one, which have failed


class SmqWriter(DataSourceArrowWriter):
    """A batch write: visible whole, or not at all; with txnAppId and txnVersion also once, however often it is run."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(schema, has_topic=options.topic is not None)
        self._run = uuid.uuid4().hex  # of a write without an app

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Staged:
        app = self._options.app
        return _stage(self._options, self._columns, iterator, app or "", app or self._run, is_temporary=app is None)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _commit(self._options, self._options.app or "", self._options.version or 0, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _abort(self._options, messages)


class SmqStreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of a stream, each of which is visible once. Spark makes a new object for each commit."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(schema, has_topic=options.topic is not None)

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Staged:
        app = _query_id()
        return _stage(self._options, self._columns, iterator, app, app, is_temporary=False)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        apps = {message.app for message in messages if isinstance(message, Staged)}
        if apps:  # otherwise the micro-batch had no task
            (app,) = apps
            _commit(self._options, app, batchId, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _abort(self._options, messages)


def _query_id() -> str:
    context = TaskContext.get()
    found: str | None = context.getLocalProperty(_QUERY_ID) if context is not None else None
    if not found:
        raise SinkError("Spark has not named the query of this task: write with foreachBatch, and txnAppId")
    return found


def _stage(
    options: SinkOptions,
    columns: Columns,
    batches: "Iterator[pa.RecordBatch]",
    app: str,
    prefix: str,
    *,
    is_temporary: bool,
) -> Staged:
    """The work of one attempt of a task."""
    freeze_loaded_modules()
    context = TaskContext.get()
    partition, attempt = (context.partitionId(), context.attemptNumber()) if context is not None else (0, 0)
    ids = [f"spark/{prefix}/{partition}/{number}" for number in range(attempt + 1)]
    staging = Staging(
        connected(options.servers, options.retry_timeout_ms, options.security),
        ids.pop(),
        codec=options.codec,
        transaction_timeout_ms=options.transaction_timeout_ms,
        is_temporary=is_temporary,
    )
    digest = 0
    try:
        for batch in batches:
            values = values_of(batch, columns)
            if options.fail_on_data_loss:
                digest += values.digest(options.topic)
            staging.add(values.rows(), options.topic)
        staging.finish()
    except SmqError as e:
        staging.abort()
        raise _explained(e) from e
    except BaseException:  # also if Spark ends the task
        staging.abort()
        raise
    return Staged(app, staging.producer, staging.rows, digest, tuple(ids))


def _commit(options: SinkOptions, app: str, batch_id: int, messages: Sequence[WriterCommitMessage | None]) -> None:
    producers = [m.producer for m in messages if isinstance(m, Staged) and m.producer is not None]
    if not producers and not app:
        return
    freeze_loaded_modules()  # of the worker that runs the commits
    cluster = connected(options.servers, options.retry_timeout_ms, options.security)
    try:
        fingerprint = _fingerprint(messages) if app and options.fail_on_data_loss else None
        if not commit_batch(cluster, app, batch_id, producers, fingerprint):
            log.warning("batch %d of %s is not newer than its last one: its rows are dropped", batch_id, app)
    except SmqError as e:
        raise _explained(e) from e
    for message in messages:
        for transactional_id in message.earlier if isinstance(message, Staged) else ():
            abort_of_dead_quietly(cluster, transactional_id)


def _fingerprint(messages: Sequence[WriterCommitMessage | None]) -> pb.Fingerprint:
    """Of the whole batch. Spark may divide a replay among its tasks in another way, and rows without a key go to other
    partitions then: what stays is the rows."""
    staged = [message for message in messages if isinstance(message, Staged)]
    digest = sum(message.digest for message in staged) % (1 << 64)
    return pb.Fingerprint(rows=sum(message.rows for message in staged), digest=digest.to_bytes(8, "big"))


def _abort(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Of the tasks that have succeeded. Spark does not know what the others have staged: they abort it themselves."""
    cluster = connected(options.servers, options.retry_timeout_ms, options.security)
    for message in messages:
        if isinstance(message, Staged) and message.producer is not None:
            abort_quietly(cluster, message.producer)


def _explained(error: SmqError) -> SinkError:
    if error.code is ErrorCode.BATCH_DIFFERS:
        return SinkError(
            f"{error.message}. What was committed is kept, and nothing of this run is visible. (1) If the checkpoint"
            " has lost what the batch was (an older copy, a deleted file, a crash of its disk), start it with a new"
            " checkpointLocation, and with startingOffsets after what the topic has. (2) If the query makes other rows"
            " at each run (uuid(), rand(), a clock of its own), none is missing: run it once with option"
            " failOnDataLoss=false, which drops this run's rows. (3) A batch write with other rows needs a greater"
            " txnVersion"
        )
    if error.code in _FENCED:
        return SinkError(
            f"another writer has taken the place of this one ({error}). Two queries with one checkpoint, or two jobs"
            " with one txnAppId, must not run at the same time; or the transaction was open for longer than"
            " transactionTimeoutMs. Nothing of this batch is visible: start the query again"
        )
    return SinkError(f"the rows could not be written: {error}")
