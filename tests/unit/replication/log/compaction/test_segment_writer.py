"""Batches rewritten without some records: what stays has its bytes, its offset and its times."""

import itertools
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.ids import Epoch, Offset, TsNs
from smq.records import (
    CODECS,
    NewRecord,
    Record,
    build_batch,
    decode_batch,
    encode_batch,
    marker_batch,
    parse_header,
)
from smq.replication.log.aborted import AbortedTransactions
from smq.replication.log.compaction import segment_writer
from smq.replication.log.compaction.cleaner import KeyScan, Stretch
from smq.replication.log.compaction.segment_writer import Rewritten, SegmentWriter
from smq.replication.log.reader import LogReader
from smq.replication.log.segments import digest_of
from smq.replication.log.stored_batch import StoredValue, build_value, parse_header_of, parse_value
from tests.unit.replication.log.support import PID

PRODUCER = 77


def stored(
    base: int,
    keys: list[bytes | None],
    *,
    codec: str = "none",
    epoch: int = 0,
    producer: int = -1,
    tombstones: bool = False,
) -> StoredValue:
    """A batch of one record per key. Its times leave room for those of the records."""
    records = [
        NewRecord(key, None if tombstones else b"value %d" % (base + n), 1_000 + base + n, (("h", b"x"),))
        for n, key in enumerate(keys)
    ]
    batch = encode_batch(
        records, codec=codec, producer_id=producer, producer_epoch=min(producer, 0), base_sequence=min(producer, 0)
    )
    return stored_batch(batch, base, epoch)


def stored_batch(batch: bytes, base: int = 0, epoch: int = 0) -> StoredValue:
    value = build_value(PID, batch, parse_header(batch), Offset(base), Epoch(epoch), TsNs(10_000 + 10 * base))
    return parse_value(PID, value)


def records_of(values: list[StoredValue]) -> list[Record]:
    return [record for value in values if parse_header(value.batch).count for record in decode_batch(value.batch)]


def written(values: list[StoredValue], removed: set[int], producers_start: int = 0) -> Rewritten:
    writer = SegmentWriter(PID, Offset(producers_start))
    for value in values:
        writer.add(value, lambda records: [offset not in removed for offset, *_ in records])
    return writer.finish()


def contiguous(*batches: tuple[int, int, str, int]) -> list[StoredValue]:
    """(records, epoch, codec, producer) of each batch."""
    values, base = [], 0
    for count, epoch, codec, producer in batches:
        values.append(stored(base, [b"k%d" % n for n in range(count)], codec=codec, epoch=epoch, producer=producer))
        base += count
    return values


@given(
    batches=st.lists(
        st.tuples(
            st.integers(1, 4), st.integers(0, 2), st.sampled_from(sorted(CODECS)), st.sampled_from([-1, PRODUCER])
        ),
        min_size=1,
        max_size=8,
    ),
    data=st.data(),
)
def test_everything_but_the_removed_records_stays(
    batches: list[tuple[int, int, str, int]], data: st.DataObject
) -> None:
    values = contiguous(
        *((count, epoch, codec, producer) for count, epoch, codec, producer in sorted(batches, key=lambda b: b[1]))
    )
    end = values[-1].end
    removed = data.draw(st.sets(st.integers(0, end - 1)))
    new = written(values, removed, data.draw(st.integers(0, end)))
    assert records_of(new.values) == [record for record in records_of(values) if record.offset not in removed]
    assert new.removed == len(removed)
    assert new.is_changed == bool(removed)
    assert new.digest == digest_of(new.values)
    # The batches touch, no epoch is mixed, and the append times of all records that are left stay.
    assert [value.base for value in new.values] == [0, *(value.end for value in new.values[:-1])]
    assert new.values[-1].end == end
    stamps = {o: v.ts_ns + o - v.base for v in values for o in range(v.base, v.end)}
    epochs = {o: v.epoch for v in values for o in range(v.base, v.end)}
    for value in new.values:
        assert {epochs[o] for o in range(value.base, value.end)} == {value.epoch}
    for record in records_of(new.values):
        holder = next(v for v in new.values if v.base <= record.offset < v.end)
        assert holder.ts_ns + record.offset - holder.base == stamps[record.offset]
    lasts = [(value.ts_ns, value.ts_ns + value.end - 1 - value.base) for value in new.values]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(lasts))


def test_bytes_without_a_removed_record_are_not_touched() -> None:
    values = contiguous((3, 0, "zstd", PRODUCER), (2, 0, "none", -1))
    assert next(v.value for v in written(values, {3}).values) == values[0].value


def test_an_empty_batch_joins_the_one_before_it() -> None:
    values = contiguous((2, 0, "none", -1), (3, 0, "none", -1), (1, 0, "none", -1))
    new = written(values, {2, 3, 4})
    assert [(v.base, v.end, parse_header(v.batch).count) for v in new.values] == [(0, 5, 2), (5, 6, 1)]


def test_empty_batches_of_two_epochs_stay_apart() -> None:
    new = written(contiguous((2, 0, "none", -1), (2, 1, "none", -1)), {0, 1, 2, 3})
    assert [(v.base, v.end, v.epoch) for v in new.values] == [(0, 2, 0), (2, 4, 1)]


def test_producers_stay_known_until_they_have_expired() -> None:
    values = contiguous((2, 0, "none", PRODUCER), (2, 0, "none", PRODUCER), (2, 0, "none", PRODUCER))
    new = written(values, set(range(6)), producers_start=2)
    headers = [parse_header(v.batch) for v in new.values]
    assert [(h.base_offset, h.end, h.producer_id, h.count) for h in headers] == [
        (0, 2, PRODUCER, 0),
        (2, 4, PRODUCER, 0),
        (4, 6, PRODUCER, 0),
    ], "the first batch has expired, but cannot take in one that has not"
    assert headers[1].last_sequence == parse_header(values[1].batch).last_sequence
    later = written(new.values, set(), producers_start=6)
    assert [(v.base, v.end, parse_header(v.batch).producer_id) for v in later.values] == [(0, 6, -1)]


def test_times_of_a_batch_are_those_of_its_records() -> None:
    new = written(contiguous((3, 0, "none", -1)), {2})
    assert parse_header(new.values[0].batch).max_timestamp == 1_001
    assert parse_header(written(contiguous((1, 0, "none", -1)), {0}).values[0].batch).max_timestamp == -1


def test_append_time_is_kept_as_the_largest_time() -> None:
    value = contiguous((3, 0, "none", -1))[0]
    ts_ns, header = parse_header_of(value.value, verify=None)
    header = replace(header, attributes=header.attributes | 0x08, max_timestamp=5_000)
    batch = build_batch(header, value.batch[61:])
    stamped = parse_value(PID, build_value(PID, batch, parse_header(batch), value.base, value.epoch, ts_ns))
    assert parse_header(written([stamped], {2}).values[0].batch).max_timestamp == 5_000


def test_a_control_batch_is_left_alone() -> None:
    for is_commit in (True, False):
        marker = ended(0, is_commit=is_commit)
        assert written([marker], {0}, producers_start=9).values == [marker]


def in_transaction(
    base: int, count: int, *, producer: int = PRODUCER, sequence: int = 0, epoch: int = 0, attributes: int = 0x10
) -> StoredValue:
    """A transactional batch."""
    plain = stored(base, [b"k%d" % n for n in range(count)], epoch=epoch)
    ts_ns, header = parse_header_of(plain.value, verify=None)
    header = replace(
        header, attributes=attributes, producer_id=producer, producer_epoch=3, base_sequence=sequence, base_offset=0
    )
    batch = build_batch(header, plain.batch[61:])
    return parse_value(PID, build_value(PID, batch, parse_header(batch), Offset(base), Epoch(epoch), ts_ns))


def test_a_transactional_batch_stays_one_of_its_transaction_without_its_records() -> None:
    new = written([in_transaction(0, 3)], {0, 1, 2}, producers_start=99)
    header = parse_header(new.values[0].batch)
    assert (header.count, header.last_offset_delta, header.attributes) == (0, 2, 0x10)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (PRODUCER, 3, 0)


def test_an_empty_transactional_batch_joins_only_one_before_it_of_its_transaction() -> None:
    first, second = in_transaction(0, 2), in_transaction(2, 2, sequence=2)
    others = {
        "of its transaction": (first, 1),
        "of another producer": (in_transaction(0, 2, producer=PRODUCER + 1), 2),
        "of another sequence": (in_transaction(0, 2, sequence=9), 2),
        "of no transaction": (stored(0, [b"a", b"b"], producer=PRODUCER), 2),
        "of no producer": (stored(0, [b"a", b"b"]), 2),
        "a control batch": (ended(1), 2),
    }
    for name, (before, count) in others.items():
        new = written([before, second], {2, 3}, producers_start=4)
        assert len(new.values) == count, name
    joined = written([first, second], {2, 3}, producers_start=4).values[0]
    header = parse_header(joined.batch)
    assert (joined.end, header.count, header.is_transactional, header.producer_id) == (4, 2, True, PRODUCER)
    assert header.last_sequence == parse_header(second.batch).last_sequence
    assert len(written([first, second], {2, 3}, producers_start=3).values) == 2, "a retry must still be recognised"
    assert len(written([second, stored(4, [b"a"])], {4}, producers_start=9).values) == 2, "a plain one stays outside"


def ended(base: int, *, is_commit: bool = True) -> StoredValue:
    """A control batch."""
    marker = marker_batch(producer_id=PRODUCER, producer_epoch=3, is_commit=is_commit, timestamp_ms=5)
    return stored_batch(marker, base)


def shapes(values: list[StoredValue], removed: set[int], producers_start: int) -> list[tuple[int, int, int, int, int]]:
    """(base, end, records, attributes, producer) of each new batch."""
    headers = [parse_header(v.batch) for v in written(values, removed, producers_start).values]
    return [(h.base_offset, h.end, h.count, h.attributes, h.producer_id) for h in headers]


def test_of_a_row_of_commits_the_last_control_batch_stays() -> None:
    values = [in_transaction(0, 2), ended(2), stored(3, [b"a"]), in_transaction(4, 1), ended(5), ended(6)]
    found = shapes(values, {1, 3}, 7)
    assert found == [(0, 4, 1, 0, -1), (4, 6, 1, 0, -1), (6, 7, 1, 0x30, PRODUCER)]
    left = records_of(written(values, {1, 3}, 7).values)
    data = [value for value in values if value not in (values[1], values[4], values[5])]
    kept = [record for record in records_of(data) if record.offset not in {1, 3}]
    assert [record for record in left if record.offset != 6] == kept
    again = written(written(values, {1, 3}, 7).values, set(), 7)
    assert not again.is_changed


def test_an_aborted_transaction_between_others_of_its_segment_goes() -> None:
    values = [in_transaction(0, 1), ended(1), in_transaction(2, 1), ended(3, is_commit=False), ended(4)]
    assert shapes(values, {0, 2}, 5) == [(0, 4, 0, 0, -1), (4, 5, 1, 0x30, PRODUCER)]
    assert shapes(values, {0}, 5)[1:4] == [
        (1, 2, 1, 0x30, PRODUCER),
        (2, 3, 1, 0x10, PRODUCER),
        (3, 4, 1, 0x30, PRODUCER),
    ], "it has a record, so nothing of it may become visible"


def test_the_first_transaction_of_a_segment_stays_if_it_was_aborted_as_it_may_have_begun_before() -> None:
    values = [in_transaction(0, 1), ended(1, is_commit=False), in_transaction(2, 1), ended(3, is_commit=False)]
    assert shapes(values, {0, 2}, 4) == [
        (0, 1, 0, 0x10, PRODUCER),
        (1, 2, 1, 0x30, PRODUCER),
        (2, 3, 0, 0, -1),
        (3, 4, 1, 0x30, PRODUCER),
    ]
    assert shapes([*values, ended(4)], {0, 2}, 5)[2:] == [(2, 4, 0, 0, -1), (4, 5, 1, 0x30, PRODUCER)]
    assert shapes([ended(0), *values[2:]], {2}, 4) == [
        (0, 1, 1, 0x30, PRODUCER),
        (2, 3, 0, 0, -1),
        (3, 4, 1, 0x30, PRODUCER),
    ], "the first one committed, and the last one aborts"


def test_commits_of_producers_that_are_known_stay() -> None:
    values = [in_transaction(0, 1), ended(1), in_transaction(2, 1), ended(3), in_transaction(4, 1), ended(5)]
    found = shapes(values, set(), 5)
    assert found == [
        (0, 2, 1, 0, -1),
        (2, 3, 1, 0, -1),
        (3, 4, 1, 0x30, PRODUCER),
        (4, 5, 1, 0x10, PRODUCER),
        (5, 6, 1, 0x30, PRODUCER),
    ]


def test_a_transactional_batch_that_does_not_decode_keeps_its_bytes() -> None:
    ts_ns, header = parse_header_of(in_transaction(0, 2).value, verify=None)
    batch = build_batch(replace(header, attributes=0x14), b"no zstd")
    odd = parse_value(PID, build_value(PID, batch, parse_header(batch), Offset(0), Epoch(0), ts_ns))
    assert written([odd, ended(2)], {0, 1}, 9).values == [odd, ended(2)]


def test_nor_does_anything_else_of_its_producer_go() -> None:
    """The last control batch aborts: the batch would seem to be of that transaction."""
    ts_ns, header = parse_header_of(in_transaction(1, 1).value, verify=None)
    batch = build_batch(replace(header, attributes=0x14), b"no zstd")
    odd = parse_value(PID, build_value(PID, batch, parse_header(batch), Offset(1), Epoch(0), ts_ns))
    values = [ended(0), odd, ended(2), in_transaction(3, 1), ended(4, is_commit=False)]
    assert [at for at, _, _, attributes, _ in shapes(values, {3}, 9) if attributes & 0x20] == [0, 2, 4]


def test_an_aborted_batch_loses_all_records_without_being_unpacked() -> None:
    ts_ns, header = parse_header_of(in_transaction(0, 3).value, verify=None)
    batch = build_batch(replace(header, attributes=0x14), b"no zstd")
    odd = parse_value(PID, build_value(PID, batch, parse_header(batch), Offset(0), Epoch(0), ts_ns))
    for aborted in (odd, in_transaction(0, 3)):
        writer = SegmentWriter(PID, Offset(0))
        writer.add_aborted(aborted)
        new = writer.finish()
        made = parse_header(new.values[0].batch)
        assert (new.removed, new.has_tombstones, new.is_changed, writer.has_unread) == (3, False, True, False)
        assert (made.count, made.last_offset_delta, made.attributes, made.producer_id) == (0, 2, 0x10, PRODUCER)
        again = SegmentWriter(PID, Offset(0))
        again.add_aborted(new.values[0])
        assert again.finish()[::4] == (new.values, False)


def test_a_batch_that_does_not_decode_is_left_alone() -> None:
    value = contiguous((3, 0, "zstd", -1))[0]
    ts_ns, header = parse_header_of(value.value, verify=None)
    batch = build_batch(header, b"no zstd")
    odd = parse_value(PID, build_value(PID, batch, parse_header(batch), value.base, value.epoch, ts_ns))
    assert written([odd], {0, 1, 2}).values == [odd]
    later = stored(3, [b"a"])
    assert written([odd, later], {3}).values[0] == odd, "nor does an empty batch join it"


def test_a_batch_of_very_many_records_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "RECORDS_MAX", 2)
    few, many = contiguous((2, 0, "none", -1), (3, 0, "none", -1))
    rewritten = written([few, many], {0, 2})
    assert rewritten.values[1] == many
    assert [record.offset for record in records_of(rewritten.values)] == [1, 2, 3, 4]


def test_compaction_reads_a_batch_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that gives up by time could lack the keys that the next one sees."""
    ticks = itertools.count()
    monkeypatch.setattr("smq.replication.log.decoding.time.thread_time", lambda: float(next(ticks)) * 10)
    assert written(contiguous((3, 0, "gzip", -1)), {0}).removed == 1


def test_a_batch_with_a_header_whose_name_is_no_text_is_compacted() -> None:
    value = stored(0, [b"a", b"b"])
    ts_ns, header = parse_header_of(value.value, verify=None)
    body = bytes(value.batch[61:])
    batch = build_batch(header, body.replace(b"\x02h\x02x", b"\x02\xff\x02x"))
    odd = parse_value(PID, build_value(PID, batch, parse_header(batch), value.base, value.epoch, ts_ns))
    found = written([odd], {0})
    assert (found.removed, parse_header(found.values[0].batch).count) == (1, 1)
    assert body.endswith(b"\x02h\x02x")
    assert bytes(found.values[0].batch).endswith(b"\x02\xff\x02x")


def test_tombstones_are_noticed() -> None:
    assert written([stored(0, [b"k"], tombstones=True)], set()).has_tombstones
    assert not written([stored(0, [b"k"], tombstones=True)], {0}).has_tombstones
    assert not written([stored(0, [None], tombstones=True)], set()).has_tombstones


def zigzag(number: int) -> bytes:
    raw, out = (number << 1) ^ (number >> 127), bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    return bytes([*out, raw])


def crafted(
    key_size: int = 1, *, longer: int = 0, offset_delta: int = 0, time_delta: int = 0, headers: bytes = b"\x00"
) -> bytes:
    """A record of key "k" and value "v", with what no client writes in one place."""
    content = b"\x00" + zigzag(time_delta) + zigzag(offset_delta) + zigzag(key_size) + b"k" + zigzag(1) + b"v" + headers
    return zigzag(len(content) + longer) + content


@pytest.mark.parametrize(
    "records",
    [
        [crafted(), crafted((1 << 63) - 34)],
        [crafted(), crafted(headers=zigzag(1) + zigzag((1 << 63) - 42) + b"x")],
        [crafted(), crafted(longer=1 << 63), crafted(offset_delta=2)],
        [crafted(), crafted(offset_delta=-8)],
        [crafted(offset_delta=1), crafted(offset_delta=0)],
        [crafted(), crafted(offset_delta=2)],
        [crafted(), crafted(offset_delta=1, time_delta=1 << 63)],
    ],
    ids=["key", "header", "record", "before the batch", "not in order", "after the batch", "time"],
)
def test_a_crafted_batch_stays_as_it_is_and_stops_no_pass(records: list[bytes]) -> None:
    """Its checksum is right, so a node has stored it."""
    header = replace(parse_header(stored(0, [b"k"] * len(records)).batch), attributes=0)
    value = stored_batch(build_batch(header, b"".join(records)))
    scan = KeyScan([Stretch(Offset(0), value.end)], 100, AbortedTransactions([]))

    class Log:
        first = Offset(0)

        def read_segment(self, *_: object) -> list[StoredValue]:
            return [value]

    assert scan.step(cast(LogReader, Log()))
    writer = SegmentWriter(PID, Offset(0))
    writer.add(value, lambda found: [False] + [True] * (len(found) - 1))
    rewritten = writer.finish()
    if rewritten.is_changed:  # it decodes, whatever a client may make of it
        assert rewritten.removed == 1
    else:
        assert writer.has_unread
        assert [v.value for v in rewritten.values] == [value.value]
