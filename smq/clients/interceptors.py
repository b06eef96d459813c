"""Interceptors: what an application hooks into its producers and consumers, as in Kafka's clients.

Owns the two base classes, the order in which interceptors run, and what becomes of their errors: they are logged, and
the record, the poll or the commit goes on as if the interceptor were not there. A client without interceptors has no
chain, and pays nothing. It must never send, read or wait. The producers and consumers import it; users import the base
classes through `smq.clients`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from smq.clients.arguments import invalid, shown
from smq.clients.producing.delivery import Intercepted, RecordMetadata
from smq.clients.producing.outgoing import ProducerRecord, checked_record
from smq.clients.types import CommittedOffset, ConsumerRecord, TopicPartition
from smq.raft_state.errors import SmqError

log = logging.getLogger(__name__)


class ProducerInterceptor:
    """Sees each record before it is sent, and learns its outcome. Override what you need.

    An exception is logged, and the record goes on. Several run in the order of the producer's `interceptors`, each with
    the record that the one before returned. No function here may wait. `on_send` runs in the thread or task that sends,
    perhaps in several threads at the same time; for `send_many()`, and for all other functions, it is the event loop of
    the clients.
    """

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Returns the record to send: the same one, or a changed copy (`record._replace(headers=...)`)."""
        return record

    def on_acknowledgement(self, metadata: RecordMetadata, error: SmqError | None) -> None:
        """Once for each record that `on_send` has seen, before its sender learns of it. After an error, `metadata` has
        only the topic, and the partition if it was given."""

    def close(self) -> None:
        """The producer is closed."""


class ConsumerInterceptor:
    """Sees the records that a consumer is about to return, and its commits. Override what you need.

    An exception is logged, and the consumer goes on. Several run in the order of the consumer's `interceptors`. None of
    these functions may wait: those of a blocking consumer run on the clients' event loop.
    """

    def on_consume(self, records: list[ConsumerRecord]) -> Sequence[ConsumerRecord]:
        """Returns the records for the application, from those of one batch: it may leave some out, and change key,
        value and headers (`record._replace(value=...)`), not their order or place. Records that the application did
        not take in the end, because of a seek or a rebalance, are read again, and come here again."""
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """After each commit that succeeded, automatic ones included."""

    def close(self) -> None:
        """The consumer is closed."""


K = TypeVar("K", ProducerInterceptor, ConsumerInterceptor)


@contextmanager
def _logged(name: str, interceptor: object) -> Iterator[None]:
    try:
        yield
    except Exception:  # the application's code raises anything
        # As in Kafka's clients, that costs no record, poll or commit.
        text = "%s of the interceptor %s failed; what it was called for goes on without it"
        log.exception(text, name, type(interceptor).__name__)


class _Chain(Generic[K]):
    def __init__(self, interceptors: Sequence[K]) -> None:
        self._interceptors: tuple[K, ...] = tuple(interceptors)
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tell("close", lambda each: each.close())

    def _tell(self, name: str, call: Callable[[K], object]) -> None:
        for each in self._interceptors:
            with _logged(name, each):
                call(each)


class ProducerChain(_Chain[ProducerInterceptor]):
    """The interceptors of one producer."""

    @classmethod
    def of(cls, interceptors: object) -> "ProducerChain | None":
        found = _checked(interceptors, ProducerInterceptor)
        return cls(found) if found else None

    def begin(self, record: ProducerRecord, token: object) -> tuple[ProducerRecord, Intercepted]:
        """The record as it is to be sent, and the token to send it with."""
        for each in self._interceptors:
            with _logged("on_send", each):
                record = _checked_record(each.on_send(record))
        return record, Intercepted(token, record.topic, record.partition, self._acknowledged)

    def _acknowledged(self, metadata: RecordMetadata, error: SmqError | None) -> None:
        self._tell("on_acknowledgement", lambda each: each.on_acknowledgement(metadata, error))


class ConsumerChain(_Chain[ConsumerInterceptor]):
    """The interceptors of one consumer."""

    @classmethod
    def of(cls, interceptors: object) -> "ConsumerChain | None":
        found = _checked(interceptors, ConsumerInterceptor)
        return cls(found) if found else None

    def on_consume(self, records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """Of one batch, and so of one partition."""
        for each in self._interceptors:
            if not records:
                break
            with _logged("on_consume", each):
                records = _checked_records(each.on_consume(list(records)), records)
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, int | CommittedOffset]) -> None:
        full = {tp: at if isinstance(at, CommittedOffset) else _plain(at) for tp, at in offsets.items()}
        self._tell("on_commit", lambda each: each.on_commit(dict(full)))


def _plain(offset: int) -> CommittedOffset:
    return CommittedOffset(offset=offset, metadata="")


def _checked(given: object, kind: type[K]) -> list[K]:
    if not isinstance(given, Iterable):
        raise invalid(f"interceptors must be a list of {kind.__name__}, not {shown(given)}")
    found = list(given)
    for each in found:
        if not isinstance(each, kind):
            raise invalid(f"interceptors must be objects of classes that extend {kind.__name__}, not {shown(each)}")
    return found


def _checked_record(found: object) -> ProducerRecord:
    if not isinstance(found, ProducerRecord):
        raise invalid(f"on_send must return a ProducerRecord, not {shown(found)}")
    when, headers, _ = checked_record(*found)
    return found._replace(headers=headers, timestamp_ms=when)


def _checked_records(found: Iterable[ConsumerRecord], given: list[ConsumerRecord]) -> list[ConsumerRecord]:
    """Those that were given, perhaps changed, perhaps not all: the consumer's position follows their places."""
    records, places = list(found), iter([_place(record) for record in given])
    for record in records:
        if not isinstance(record, ConsumerRecord):
            raise invalid(f"on_consume must return a list of ConsumerRecord, not one with {shown(record)}")
        if _place(record) not in places:  # the iterator goes on after the last one that was found
            raise invalid("on_consume must return some of the records that it was given, in their order and place")
    return records


def _place(record: ConsumerRecord) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset
