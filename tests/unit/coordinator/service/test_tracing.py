"""The way of sampled records as spans, of a real node with the SDK's exporter into memory."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiokafka
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.config.addresses import format_address
from smq.coordinator.service import tracing, tracing_otel
from smq.coordinator.user_errors import StartError
from smq.records import NewRecord, encode_batch
from smq.testing.served import PATIENCE_S, Served, served_node

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = {"queue", "append", "fsync", "replicate", "commit", "answer"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """All spans are in it once the node has stopped."""
    kept = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "kept")
    monkeypatch.setattr(tracing_otel, "_exporter", lambda _name, _environment: kept)
    return kept


def traced_batch(*parents: str) -> bytes:
    return encode_batch([NewRecord(b"k", b"v", 1_000, (("traceparent", parent.encode()),)) for parent in parents])


async def publish(served: Served, batch: bytes, metadata: Mapping[str, str] | None = None) -> str:
    """The error's name, or "" if there is none."""

    async def send() -> AsyncIterator[pb.PublishRecordRequest]:
        yield pb.PublishRecordRequest(topic="t", partition=0, batch=batch, acks=pb.ACKS_ALL)

    calls = served.agent.PublishRecord(send(), metadata=tuple((metadata or {}).items()))
    (answer,) = [answer async for answer in calls]
    return str(answer.error.name)


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def test_a_sampled_record_is_followed_from_its_arrival_to_its_reader(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async with served_node(tmp_path) as served:
        await served.create()
        assert await publish(served, traced_batch(SAMPLED, OTHER)) == ""
        answers = await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
        headers = [(h.key, h.value) for answer in answers for record in answer.records for h in record.headers]
        assert headers == [("traceparent", SAMPLED.encode()), ("traceparent", OTHER.encode())]
    (produce,) = named(exporter, "produce")
    assert produce.context is not None
    assert produce.parent is not None
    assert (f"{produce.context.trace_id:032x}", f"{produce.parent.span_id:016x}") == (TRACE, SPAN)
    assert [f"{link.context.trace_id:032x}" for link in produce.links] == [OTHER.split("-")[1]]
    assert produce.attributes is not None
    assert produce.attributes["messaging.destination.name"] == "t"
    assert produce.attributes["messaging.kafka.offset"] == 0
    own, spans = produce.context.span_id, exporter.get_finished_spans()
    stages = {span.name: span for span in spans if span.parent is not None and span.parent.span_id == own}
    assert stages.keys() == STAGES
    for stage in stages.values():
        assert stage.context is not None
        assert stage.context.trace_id == produce.context.trace_id
        assert stage.start_time is not None
        assert stage.end_time is not None
        assert stage.start_time <= stage.end_time
    fetch = named(exporter, "fetch")[0]
    assert fetch.context is not None
    assert fetch.context.trace_id == produce.context.trace_id
    assert f"{fetch.links[0].context.span_id:016x}" == SPAN
    assert produce.resource.attributes["service.name"] == "smq"


async def test_what_nobody_has_sampled_is_not_traced(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with served_node(tmp_path) as served:
        await served.create()
        for batch in (
            traced_batch(UNSAMPLED),
            traced_batch("00-" + "0" * 32 + f"-{SPAN}-01"),  # not valid
            traced_batch("ff-" + SAMPLED[3:]),
            encode_batch([NewRecord(None, SAMPLED.encode(), 1_000)]),  # in a value
        ):
            assert await publish(served, batch) == ""
        assert await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
    assert exporter.get_finished_spans() == ()


async def test_metadata_names_the_parent_and_an_error_ends_the_span(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async with served_node(tmp_path) as served:
        await served.create()
        whole = encode_batch([NewRecord(None, b"v", 1_000)])
        assert await publish(served, whole, {"traceparent": OTHER}) == ""
        damaged = whole[:-1] + bytes([whole[-1] ^ 1])
        assert await publish(served, damaged, {"traceparent": SAMPLED}) == "CORRUPT_BATCH"
    good, bad = sorted(named(exporter, "produce"), key=lambda span: span.status.is_ok, reverse=True)
    assert good.parent is not None
    assert bad.parent is not None
    assert f"{good.parent.trace_id:032x}" == OTHER.split("-")[1]
    assert f"{bad.parent.trace_id:032x}" == TRACE
    assert bad.attributes is not None
    assert bad.attributes["error.type"] == "CORRUPT_BATCH"


async def test_a_kafka_clients_record_is_followed_the_same_way(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with served_node(tmp_path, kafka_address=("127.0.0.1", 0)) as served:
        await served.create()
        assert served.server.kafka_address is not None
        servers = format_address(served.server.kafka_address)
        async with aiokafka.AIOKafkaProducer(bootstrap_servers=servers) as producer:
            await producer.send_and_wait("t", b"v", headers=[("traceparent", SAMPLED.encode())])
        consumer = aiokafka.AIOKafkaConsumer("t", bootstrap_servers=servers, auto_offset_reset="earliest")
        async with consumer:
            record = await asyncio.wait_for(consumer.getone(), PATIENCE_S)
        assert record.headers == (("traceparent", SAMPLED.encode()),)
    (produce,) = named(exporter, "produce")
    assert produce.parent is not None
    assert f"{produce.parent.span_id:016x}" == SPAN
    assert named(exporter, "fetch")
    assert {span.name for span in exporter.get_finished_spans()} >= STAGES


async def test_a_ratio_samples_what_carries_no_trace(
    tmp_path: Path, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1.0")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "the-log")

    async with served_node(tmp_path) as served:
        await served.create()
        await served.fill([3])
    (produce,) = named(exporter, "produce")
    assert produce.parent is None
    assert produce.resource.attributes["service.name"] == "the-log"
    assert named(exporter, "fsync")


def test_parents_are_different_valid_and_few() -> None:
    many = [f"00-{number:032x}-{SPAN}-01" for number in range(1, 30)]
    found = tracing_otel.parents_in([traced_batch(*many[:3], many[0]), traced_batch(*many)])
    assert [context.trace_id for context in found] == list(range(1, 1 + tracing_otel.PARENTS_MAX))
    assert tracing_otel.parents_in([b"", memoryview(b"\x16traceparent\x6e00-")], "no traceparent") == []


def test_without_the_variable_nothing_of_opentelemetry_is_loaded() -> None:
    disabled = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}
    off: list[dict[str, str]] = [{}, {"OTEL_TRACES_EXPORTER": "none"}, disabled]
    assert not any(map(tracing.is_enabled, off))
    assert tracing.is_enabled({"OTEL_TRACES_EXPORTER": "otlp"})
    code = "import sys, smq.coordinator.service.tracing; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_an_exporter_that_is_not_installed_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with pytest.raises(StartError, match=r"'carrier-pigeon', which is not installed.*console"):
        await served_node(tmp_path).__aenter__()


async def test_without_the_packages_the_node_starts_and_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "smq.coordinator.service.tracing_otel", None)
    monkeypatch.delattr("smq.coordinator.service.tracing_otel")
    warnings: list[dict[str, str]] = []
    monkeypatch.setattr(tracing._log, "warning", lambda _event, **fields: warnings.append(fields), raising=False)

    async with served_node(tmp_path) as served:
        await served.create()
        await served.fill([1])
    assert [w["advice"] for w in warnings] == ["install smq with its extra otel, or unset OTEL_TRACES_EXPORTER"]
