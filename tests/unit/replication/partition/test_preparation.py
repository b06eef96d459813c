"""Batches that are converted, or judged by their times, before they are appended: their bytes and their order."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionId
from smq.raft_state.topic_config import BatchRules, batch_rules
from smq.records import CODECS, HEADER_BYTES, NewRecord, check_crc, decode_batch, encode_batch, parse_header, with_body
from smq.replication.log import decoding
from smq.replication.partition import producing as producing_module
from smq.replication.partition.admission import PreparedBatch, validated
from smq.replication.partition.producing import BATCHES_MAX, RUNNING_MAX, Preparation, prepared

A, B = PartitionId(b"a" * 20), PartitionId(b"b" * 20)
ZSTD = BatchRules(codec=CODECS["zstd"])
RECORDS = [NewRecord(b"k%d" % i, b"value " * 20, 1_000 + i, [("h", b"x")]) for i in range(50)]


def rules(**config: str) -> BatchRules:
    return batch_rules({key.replace("_", "."): value for key, value in config.items()})


class LateCompute:
    """Ends its jobs when, and in the order, that a test asks for."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append(lambda: done(job()))

    def end(self, number: int) -> None:
        self.jobs.pop(number)()


@pytest.fixture
def compute() -> LateCompute:
    return LateCompute()


@pytest.mark.parametrize("target", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("source", CODECS)
def test_a_batch_is_stored_in_the_codec_of_its_topic(source: str, target: str) -> None:
    sent = encode_batch(RECORDS, codec=source, producer_id=7, producer_epoch=1, base_sequence=3)
    taken = prepared(PreparedBatch(sent, rules(compression_type=target)))
    assert taken.refusal is None
    header = validated(taken)
    assert header.codec == CODECS["none" if target == "uncompressed" else target]
    assert (header.producer_id, header.base_sequence, header.count) == (7, 3, 50)
    assert list(decode_batch(taken.data)) == list(decode_batch(sent))
    if parse_header(sent).codec == header.codec:
        assert taken.data is sent, "bytes that are right already are not touched"


@pytest.mark.parametrize(("codec", "levels"), [("gzip", ("1", "9")), ("lz4", ("1", "17")), ("zstd", ("-50", "19"))])
def test_the_level_of_a_codec_matters(codec: str, levels: tuple[str, str]) -> None:
    records = [NewRecord(None, b"%d some words that repeat %d" % (i * 7919 % 1009, i % 13), 0) for i in range(20_000)]
    sizes = []
    for level in levels:
        config = {"compression.type": codec, f"compression.{codec}.level": level}
        taken = prepared(PreparedBatch(encode_batch(records), batch_rules(config)))
        assert list(decode_batch(taken.data)) == list(decode_batch(encode_batch(records)))
        sizes.append(len(taken.data))
    assert sizes[1] < sizes[0]


def test_a_batch_that_does_not_decompress_is_refused() -> None:
    sent = encode_batch(RECORDS, codec="gzip")
    broken = with_body(parse_header(sent), sent, CODECS["gzip"], b"\x1f\x8bnot gzip" + bytes(200))
    taken = prepared(PreparedBatch(broken, ZSTD))
    assert taken.refusal is not None
    assert taken.refusal.code is ErrorCode.INVALID_BATCH
    assert taken.data is broken, "its sequence is judged first: it may be a repetition"


def test_a_batch_that_is_not_right_in_itself_is_left_to_the_usual_checks() -> None:
    for bad in (b"", b"x" * 30, encode_batch(RECORDS)[:-1], bytes(HEADER_BYTES)):
        taken = prepared(PreparedBatch(bad, ZSTD))
        assert (taken.data, taken.refusal) == (bad, None)
        with pytest.raises(SmqError):
            validated(taken)


def test_a_batch_that_is_too_large_in_the_codec_of_its_topic_is_refused() -> None:
    sent = encode_batch([NewRecord(None, bytes(10_000), 0)], codec="gzip")
    limit = len(sent) + 100
    taken = prepared(PreparedBatch(sent, BatchRules(codec=CODECS["none"], bytes_max=limit)))
    assert taken.refusal is not None
    assert taken.refusal.code is ErrorCode.BATCH_TOO_LARGE
    assert str(limit) in taken.refusal.message


def test_a_bomb_is_refused_before_it_fills_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DECODED_BATCH_BYTES_MAX", 50_000)
    refusal = prepared(PreparedBatch(encode_batch([NewRecord(None, bytes(100_000), 0)], codec="lz4"), ZSTD)).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.BATCH_TOO_LARGE
    assert "uncompressed" in refusal.message


def test_the_times_of_a_batch_are_those_of_its_records_and_of_its_header() -> None:
    limited = BatchRules(before_ms=5)
    mixed = [NewRecord(None, b"v", ms) for ms in (500, 100, 900)]
    assert prepared(PreparedBatch(encode_batch(mixed, codec="lz4"), limited)).times == (100, 900)
    assert prepared(PreparedBatch(encode_batch([NewRecord(None, b"v", -1)]), limited)).times is None
    assert prepared(PreparedBatch(encode_batch(mixed), ZSTD)).times is None, "without limits, they are not read"


def test_a_batch_that_claims_more_records_than_it_holds_has_no_times() -> None:
    sent = encode_batch(RECORDS)
    lying = with_body(parse_header(sent), sent, CODECS["none"], encode_batch(RECORDS[:49])[HEADER_BYTES:] + bytes(400))
    refusal = prepared(PreparedBatch(lying, BatchRules(after_ms=1))).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.INVALID_BATCH


def test_batches_of_a_partition_keep_their_order_and_other_partitions_do_not_wait(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    seen: list[str] = []

    def start(pid: PartitionId, name: str, rules: BatchRules) -> None:
        assert preparation.concerns(pid, rules)
        preparation.start(pid, PreparedBatch(encode_batch(RECORDS), rules), lambda _batch: seen.append(name))

    assert not preparation.concerns(A, BatchRules())
    start(A, "first", ZSTD)
    start(A, "second", ZSTD)
    start(A, "plain", BatchRules())  # the setting has changed meanwhile
    start(B, "elsewhere", ZSTD)
    compute.end(1)
    assert seen == []
    compute.end(1)
    assert seen == ["elsewhere"]
    compute.end(0)
    assert seen == ["elsewhere", "first", "second", "plain"]
    assert not preparation.concerns(A, BatchRules()), "nothing waits any more"


def test_too_many_batches_are_refused_until_some_have_ended(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    for _ in range(BATCHES_MAX):
        preparation.start(A, PreparedBatch(b"", ZSTD), ended.append)
    with pytest.raises(SmqError) as refused:
        preparation.start(B, PreparedBatch(b"", ZSTD), ended.append)
    assert (refused.value.code, refused.value.details.retry_after_ms) == (ErrorCode.OVERLOADED, 50)
    compute.end(0)
    preparation.start(B, PreparedBatch(b"", ZSTD), ended.append)
    assert len(ended) == 1


def test_few_jobs_run_together_and_every_one_runs(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    for number in range(20):
        preparation.start((A, B)[number % 2], PreparedBatch(encode_batch(RECORDS), ZSTD), ended.append)
        assert len(compute.jobs) == min(number + 1, RUNNING_MAX)
    while compute.jobs:
        compute.end(len(compute.jobs) - 1)
    assert len(ended) == 20


def test_results_that_wait_for_their_turn_hold_back_further_jobs(
    compute: LateCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = encode_batch([NewRecord(None, bytes(50_000), 0)], codec="gzip")
    uncompressed = BatchRules(codec=CODECS["none"])
    monkeypatch.setattr(producing_module, "BYTES_MAX", 100_000)
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    for _ in range(12):
        preparation.start(A, PreparedBatch(plain, uncompressed), ended.append)
    for _ in range(2):
        compute.end(1)
    assert (len(compute.jobs), len(ended)) == (2 + 1, 0), "one result was below the bound, the second one was not"
    compute.end(0)
    assert len(ended) == 3
    while compute.jobs:
        compute.end(0)
    assert len(ended) == 12


def test_a_stopping_node_answers_every_batch_once(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    stopping = SmqError(ErrorCode.SHUTTING_DOWN, "bye")
    preparation.start(A, PreparedBatch(encode_batch(RECORDS), ZSTD), ended.append)
    preparation.close(stopping)
    compute.end(0)
    assert ended == [stopping]
    with pytest.raises(SmqError):
        preparation.start(A, PreparedBatch(encode_batch(RECORDS), ZSTD), ended.append)


def test_a_converted_batch_has_a_right_checksum() -> None:
    taken = prepared(PreparedBatch(encode_batch(RECORDS), ZSTD))
    check_crc(taken.data, parse_header(taken.data))


@given(
    source=st.sampled_from(list(CODECS)),
    target=st.sampled_from(list(CODECS)),
    cut=st.integers(0, 2_000),
    noise=st.binary(max_size=40),
    is_limited=st.booleans(),
)
def test_whatever_a_producer_sends_is_converted_or_refused(
    source: str, target: str, cut: int, noise: bytes, is_limited: bool
) -> None:
    """Its checksum is right, and its records are not. Nothing may end the node."""
    sent = encode_batch(RECORDS, codec=source)
    body = sent[HEADER_BYTES:]
    at = cut % len(body)
    hostile = with_body(parse_header(sent), sent, CODECS[source], body[:at] + noise + body[at + len(noise) :])
    wanted = BatchRules(codec=CODECS[target], before_ms=1 if is_limited else BatchRules().before_ms)
    taken = prepared(PreparedBatch(hostile, wanted))
    if taken.refusal is None and taken.data is not hostile:
        header = validated(taken)
        assert (header.codec, header.count) == (CODECS[target], len(RECORDS))
    elif taken.refusal is not None:
        assert taken.refusal.code in (ErrorCode.INVALID_BATCH, ErrorCode.BATCH_TOO_LARGE)
