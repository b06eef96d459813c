"""format("smq-dying"): format("smq") whose processes pass the steps of `steps`, where a test may have them die.

To import it puts the steps around the calls of every gRPC channel that its process makes from then on. Spark's Python
workers import it with the source; a test must not.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final

import grpc
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from smq.spark_connector.options import stream_options
from smq.spark_connector.sink.write_options import sink_options
from smq.spark_connector.sink.writer import SmqStreamWriter, Staged
from smq.spark_connector.source import SmqDataSource
from smq.spark_connector.stream.stream_reader import SmqStreamReader
from tests.spark.steps import COMMIT, PLAN, PLANNED, STAGED, TASK, is_armed, reach

IN_FLIGHT_MS: Final = 10  # at most, from a request to the death of its sender: an answer takes a few


class DyingSource(SmqDataSource):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "smq-dying"

    def streamReader(self, schema: StructType) -> "_Reader":
        return _Reader(stream_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> "_Writer":
        return _Writer(sink_options(self.options, overwrite=overwrite, is_stream=True), schema)


class _Reader(SmqStreamReader):
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        end = super().latestOffset(start, limit)
        reach(PLAN)
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        reach(PLANNED)
        return super().partitions(start, end)


class _Writer(SmqStreamWriter):
    def write(self, iterator: Iterator[Any]) -> Staged:
        reach(TASK)
        staged = super().write(iterator)
        reach(STAGED)
        return staged

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        reach(COMMIT)
        super().commit(messages, batchId)


class _Steps(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg] # any call
    """Before and after the answer of each call that the sink makes."""

    def intercept_unary_unary(self, go_on: Callable[..., Any], details: Any, request: Any) -> Any:
        sent, answered = _steps(details)
        if is_armed(sent):
            threading.Thread(target=go_on, args=(details, request), daemon=True).start()
            _reach_in_flight(sent)
        answer = go_on(details, request)
        reach(answered)
        return answer

    def intercept_stream_stream(self, go_on: Callable[..., Any], details: Any, requests: Any) -> Any:
        sent, answered = _steps(details)
        answers = go_on(details, requests)
        if is_armed(sent):
            _reach_in_flight(sent)

        def passed() -> Iterator[Any]:
            yield from answers
            reach(answered)

        return passed()


def _steps(details: Any) -> tuple[str, str]:
    method = str(details.method).rpartition("/")[2]
    return f"{method} sent", f"{method} answered"


def _reach_in_flight(step: str) -> None:
    """A moment after the request has left, or before it has, or with the answer under way."""
    time.sleep(random.random() * IN_FLIGHT_MS / 1000)
    reach(step)


_insecure_channel = grpc.insecure_channel


def _passing_steps(*arguments: Any, **options: Any) -> grpc.Channel:
    return grpc.intercept_channel(_insecure_channel(*arguments, **options), _Steps())


grpc.insecure_channel = _passing_steps
