"""Follows a record from producer to producer by W3C trace context: interceptors that write and read `traceparent`.

    python -m examples.tracing 127.0.0.1:7401

An interceptor adds the header to each record that is sent: the trace that the application is in, or a new one. A second
interceptor notes the traces of what a consumer reads, and `continued(record)` is the application's trace while it works
on a record. So what it sends then belongs to the same trace. With OpenTelemetry, `current` is its current span.
"""

import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Final

from smq.clients import (
    ConsumerInterceptor,
    ConsumerRecord,
    ProducerInterceptor,
    ProducerRecord,
    SyncAdmin,
    SyncConsumer,
    SyncProducer,
    TopicExists,
)

HEADER: Final = "traceparent"  # https://www.w3.org/TR/trace-context/: version, trace, span, flags
current: Final[ContextVar[str | None]] = ContextVar("trace id of the application", default=None)


class WriteTrace(ProducerInterceptor):
    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        if any(name == HEADER for name, _ in record.headers):
            return record
        trace, span = current.get() or secrets.token_hex(16), secrets.token_hex(8)
        return record._replace(headers=[*record.headers, (HEADER, f"00-{trace}-{span}-01".encode())])


class CountTraces(ConsumerInterceptor):
    """How many records of each trace were read."""

    def __init__(self) -> None:
        self.records: Counter[str | None] = Counter()

    def on_consume(self, records: list[ConsumerRecord]) -> Sequence[ConsumerRecord]:
        self.records.update(trace_of(record) for record in records)
        return records


def trace_of(record: ConsumerRecord) -> str | None:
    """None if the record has no traceparent, or one that cannot be read."""
    for name, value in record.headers:
        parts = (value or b"").split(b"-")
        if name == HEADER and len(parts) >= 4 and len(parts[1]) == 32:
            return parts[1].decode("ascii", "replace")
    return None


@contextmanager
def continued(record: ConsumerRecord) -> Iterator[None]:
    """What is sent within the block belongs to the record's trace."""
    token = current.set(trace_of(record))
    try:
        yield
    finally:
        current.reset(token)


def main(servers: str) -> None:
    """Sends three orders, copies each within its trace, and shows where the traces went."""
    with SyncAdmin(servers) as admin:
        for topic in ("orders", "invoices"):
            with suppress(TopicExists):
                admin.create_topic(topic, partitions=1)
    seen = CountTraces()
    with (
        SyncProducer(servers, interceptors=[WriteTrace()]) as producer,
        SyncConsumer(servers, interceptors=[seen]) as consumer,
    ):
        first = producer.send_many("orders", [b"one", b"two", b"three"])[0].base_offset
        consumer.assign([("orders", 0)], first, end_offset="latest")
        for order in consumer:
            with continued(order):
                place = producer.send("invoices", order.value).result()
            print(f"{order.topic}/{order.offset} -> {place.topic}/{place.offset} in trace {trace_of(order)}")
        consumer.assign([("invoices", 0)], place.offset - 2, end_offset="latest")
        copies = len(list(consumer))
    print(f"{len(seen.records)} traces, {copies} invoices")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7401")
