"""The way of sampled records as spans of OpenTelemetry: the one module that imports it.

Owns which batches are traced, and their spans: "produce" from a batch's arrival to its answer, with the stages that the
node times as its children, and "fetch" of an answer with traced records, linked to them. A record's own `traceparent`
header is stored as it came; here it is only read. It must never change what a request does, nor delay it: the exporter
has a thread of its own, and drops what it cannot send. `tracing` imports it if it is wanted.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from smq import __version__
from smq.coordinator.user_errors import StartError
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import TopicId
from smq.replication.api import Cancel, DoneFn, Fetched, NodeApi, Produced, ProduceRequest
from smq.replication.monitoring.measures import StageSink
from smq.replication.ports import Buffer

CLOSE_S: Final = 3.0
PARENTS_MAX: Final = 8  # different ones of a batch, or of an answer
# A header of a record, as Kafka's format has it: the lengths of key and value are zigzag numbers of one byte. Found as
# bytes: no record is decoded. A batch that its producer has compressed does not show its headers.
_HEADER: Final = re.compile(rb"\x16traceparent\x6e(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})")
_W3C: Final = TraceContextTextMapPropagator()


def traced(
    node: NodeApi, cluster_id: str, environment: Mapping[str, str], parent: Callable[[], str]
) -> tuple[NodeApi, Callable[[], None]]:
    """By the standard variables of OpenTelemetry. Unless OTEL_TRACES_SAMPLER says otherwise, only what its sender has
    sampled is traced. `parent` is the header of the call that is being served, or "". StartError for an exporter that
    is not installed."""
    sampler = None if "OTEL_TRACES_SAMPLER" in environment else sampling.ParentBased(sampling.ALWAYS_OFF)
    provider = TracerProvider(sampler=sampler, resource=_resource(node, cluster_id), shutdown_on_exit=False)
    for name in environment["OTEL_TRACES_EXPORTER"].split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip(), environment)))
    return cast(NodeApi, TracedNode(node, provider, parent)), partial(_close, provider)


def _close(provider: TracerProvider) -> None:
    """Sends what is left. A collector that does not answer must not hold the node's end up."""
    sending = threading.Thread(target=provider.shutdown, daemon=True, name="last-spans")
    sending.start()
    sending.join(CLOSE_S)


def _resource(node: NodeApi, cluster_id: str) -> Resource:
    found = Resource.create({SERVICE_INSTANCE_ID: f"{cluster_id}/{node.node_id}"})
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):  # neither variable names it
        found = found.merge(Resource({SERVICE_NAME: "smq"}))
    return found


def _exporter(name: str, environment: Mapping[str, str]) -> SpanExporter:
    if name == "otlp":
        general = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general)
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    known = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
    if name not in known:
        raise StartError(
            f"OTEL_TRACES_EXPORTER asks for {name!r}, which is not installed: install its package, or set one of "
            f"otlp, {', '.join(sorted(known))}, none"
        )
    exporter: SpanExporter = known[name].load()()
    return exporter


class TracedNode:
    """The node, with `produce` and `fetch` traced; all else is the node's own."""

    def __init__(self, node: NodeApi, provider: trace.TracerProvider, parent: Callable[[], str]) -> None:
        self._node = node
        self._parent = parent
        self._tracer = provider.get_tracer("smq", __version__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def produce(self, request: ProduceRequest) -> None:
        parents = parents_in([request.batch], self._parent())
        span = self._begin("produce", request.topic, request.partition, parents[:1], parents[1:])
        span.set_attribute("smq.acks", request.acks.name.lower())
        if not span.is_recording():
            self._node.produce(request)
            return
        ending, stages = partial(_end, span, request.done), BatchTrace(self._tracer, span)
        try:
            self._node.produce(replace(request, done=ending, trace=stages))
        except SmqError as e:
            _note(span, e)
            raise

    def fetch(
        self, topic: str | TopicId, partition: int, offset: int, *, done: DoneFn[Fetched], **options: Any
    ) -> Cancel:
        fetched = partial(self._fetched, time.time_ns(), topic, partition, done)
        return self._node.fetch(topic, partition, offset, done=fetched, **options)

    def _fetched(
        self, began_ns: int, topic: str | TopicId, partition: int, done: DoneFn[Fetched], result: Fetched | SmqError
    ) -> None:
        parents = [] if isinstance(result, SmqError) else parents_in(batch.data for batch in result.batches)
        sampled = [parent for parent in parents if parent.trace_flags.sampled]
        if sampled and isinstance(result, Fetched):
            span = self._begin("fetch", topic, partition, sampled[:1], sampled, began_ns)
            span.set_attribute("messaging.kafka.offset", result.batches[0].base_offset)
            span.end()
        done(result)

    def _begin(
        self,
        name: str,
        topic: str | TopicId,
        partition: int,
        parent: list[trace.SpanContext],
        links: list[trace.SpanContext],
        began_ns: int | None = None,
    ) -> trace.Span:
        known = topic if isinstance(topic, str) else self._node.state.topic_names.get(topic, topic.hex())
        return self._tracer.start_span(
            name,
            context=_context(trace.NonRecordingSpan(parent[0])) if parent else Context(),
            kind=trace.SpanKind.SERVER,
            attributes={
                "messaging.system": "smq",
                "messaging.destination.name": known,
                "messaging.destination.partition.id": str(partition),
            },
            links=[trace.Link(other) for other in links],
            start_time=began_ns,
        )


class BatchTrace(StageSink):
    """The stages of one batch as spans below its own."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._context = _context(span)

    def observe(self, amount: int, stage: str, /) -> None:
        now_ns = time.time_ns()
        self._tracer.start_span(stage, context=self._context, start_time=now_ns - amount).end(now_ns)


def parents_in(batches: Iterable[Buffer], named: str = "") -> list[trace.SpanContext]:
    """The different contexts that the records' headers name, in order; before them the one that the caller named."""
    found: dict[str, trace.SpanContext] = {}
    _add(found, named)
    for batch in batches:
        for match in _HEADER.finditer(batch):
            if len(found) >= PARENTS_MAX:
                return list(found.values())
            _add(found, match[1].decode())
    return list(found.values())


def _add(found: dict[str, trace.SpanContext], header: str) -> None:
    """Nothing for a header that is not valid."""
    if header and header not in found:
        context = trace.get_current_span(_W3C.extract({"traceparent": header}, Context())).get_span_context()
        if context.is_valid:
            found[header] = context


def _context(span: trace.Span) -> Context:
    return trace.set_span_in_context(span, Context())


def _end(span: trace.Span, done: DoneFn[Produced], result: Produced | SmqError) -> None:
    _note(span, result)
    done(result)


def _note(span: trace.Span, result: Produced | SmqError) -> None:
    if isinstance(result, SmqError):
        span.set_attribute("error.type", result.code.name)
        span.set_status(trace.StatusCode.ERROR, str(result))
    else:
        span.set_attribute("messaging.kafka.offset", result.base_offset)
        span.set_attribute("smq.duplicate", result.duplicate)
    span.end()
