"""What a topic's settings make of a batch when its leader appends it: times that are refused, or replaced."""

import pytest

from smq.raft_state.config_keys import INT64_MAX
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset
from smq.raft_state.topic_config import BatchRules, batch_rules
from smq.records import NewRecord, decode_batch, encode_batch, parse_header, with_append_time
from smq.replication.api import Acks, Produced, TimeKind
from smq.replication.partition import admission
from smq.replication.partition.admission import PreparedBatch, with_bad_records
from smq.replication.partition.producing import prepared
from tests.unit.replication.support import Answer, Host

APPENDED = batch_rules({"message.timestamp.type": "LogAppendTime", "message.timestamp.before.max.ms": "0"})
AN_HOUR = 3_600_000
LIMITED = BatchRules(before_ms=AN_HOUR, after_ms=AN_HOUR)


@pytest.fixture
def host() -> Host:
    """It leads an empty partition of one replica."""
    made = Host()
    made.create_partition(replication=1)
    return made


def produce(host: Host, data: bytes, rules: BatchRules) -> Produced:
    answer = Answer()
    host.give(prepared(PreparedBatch(data, rules)), Acks.LEADER, answer)
    host.settle()
    host.advance(host.live.log.appended_end)
    host.settle()
    assert isinstance(answer.result, Produced), answer.result
    return answer.result


def refusal(host: Host, data: bytes, rules: BatchRules) -> SmqError:
    before = host.live.log.appended_end
    with pytest.raises(SmqError) as e:
        host.give(prepared(PreparedBatch(data, rules)), Acks.LEADER, Answer())
    assert host.live.log.appended_end == before
    return e.value


def now_ms(host: Host) -> int:
    return host.clock.wall_ns() // 1_000_000


def stamped(*times_ms: int, sequence: int = 0) -> bytes:
    records = [NewRecord(None, b"v", ms) for ms in times_ms]
    return encode_batch(records, producer_id=5, producer_epoch=0, base_sequence=sequence)


def test_records_get_the_leaders_time(host: Host) -> None:
    answer = produce(host, stamped(17, 99), APPENDED)
    assert answer.is_append_time
    (stored,) = host.live.log.read(Offset(0), Offset(2), 1 << 20)
    appended_ms = stored.ts_ns // 1_000_000
    assert appended_ms == answer.ts_ns // 1_000_000 > 99
    assert [record.timestamp_ms for record in decode_batch(bytes(stored.batch))] == [appended_ms] * 2
    assert host.offset_at(TimeKind.TIMESTAMP_MS, appended_ms) == 0
    assert host.offset_at(TimeKind.TIMESTAMP_MS, appended_ms + 1) == 2


def test_without_the_setting_the_producers_times_stay(host: Host) -> None:
    assert not produce(host, stamped(17, 99), BatchRules()).is_append_time
    (stored,) = host.live.log.read(Offset(0), Offset(2), 1 << 20)
    assert [record.timestamp_ms for record in decode_batch(bytes(stored.batch))] == [17, 99]


def test_a_producer_does_not_claim_the_leaders_time(host: Host) -> None:
    sent = stamped(now_ms(host))
    claimed, _ = with_append_time(sent, parse_header(sent), now_ms(host))
    assert refusal(host, claimed, BatchRules()).code is ErrorCode.INVALID_TIMESTAMP
    produce(host, claimed, APPENDED)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((-AN_HOUR - 1_000,), "behind the leader's clock: message.timestamp.before.max.ms=3600000"),
        ((0, -AN_HOUR - 1_000, 5), "behind the leader's clock"),
        ((AN_HOUR + 60_000,), "ahead of the leader's clock: message.timestamp.after.max.ms=3600000"),
        ((0, AN_HOUR + 60_000, 5), "ahead of the leader's clock"),
    ],
)
def test_a_time_beyond_the_limits_refuses_the_batch(host: Host, times: tuple[int, ...], words: str) -> None:
    now = now_ms(host)
    error = refusal(host, stamped(*(now + ms for ms in times)), LIMITED)
    assert error.code is ErrorCode.INVALID_TIMESTAMP
    assert words in error.message
    produce(host, stamped(*(now + ms for ms in times)), BatchRules(after_ms=INT64_MAX))


def test_by_default_a_batch_is_refused_that_is_dated_more_than_an_hour_ahead_without_being_opened(host: Host) -> None:
    late = stamped(now_ms(host), now_ms(host) + AN_HOUR + 60_000)
    default = batch_rules({})
    assert prepared(PreparedBatch(late, default)).times is None
    assert refusal(host, late, default).code is ErrorCode.INVALID_TIMESTAMP
    produce(host, stamped(now_ms(host) + AN_HOUR - 60_000), default)


def test_times_within_the_limits_and_records_without_a_time_are_taken(host: Host) -> None:
    now = now_ms(host)
    produce(host, stamped(now - AN_HOUR // 2, now + AN_HOUR // 2, now), LIMITED)
    produce(host, stamped(-1, -1, sequence=3), LIMITED)


def test_a_repeated_batch_is_not_judged_again(host: Host) -> None:
    sent = stamped(now_ms(host))
    first = produce(host, sent, LIMITED)
    host.scheduler.run_for_ms(2 * AN_HOUR)
    again = produce(host, sent, LIMITED)
    assert (again.base_offset, again.duplicate) == (first.base_offset, True)
    assert refusal(host, stamped(now_ms(host) - 2 * AN_HOUR, sequence=1), LIMITED).code is ErrorCode.INVALID_TIMESTAMP


def test_a_repeated_batch_that_no_longer_decodes_is_not_judged_again(host: Host) -> None:
    """The setting was switched on after its first attempt."""
    sent = encode_batch([NewRecord(None, b"v", 0)], producer_id=5, producer_epoch=0, base_sequence=0)
    broken = SmqError(ErrorCode.INVALID_BATCH, "it does not decode")
    first = produce(host, sent, BatchRules())
    answer = Answer()
    host.give(PreparedBatch(sent, BatchRules(codec=1), refusal=broken), Acks.LEADER, answer)
    host.settle()
    assert answer.offsets == (first.base_offset, first.last_offset)
    assert answer.is_duplicate


DATED = BatchRules(before_ms=1_000, after_ms=1_000)
KEYED = BatchRules(needs_keys=True)
BOTH = BatchRules(before_ms=1_000, after_ms=1_000, needs_keys=True)
NO_KEY, OLD, NEW = "has no key", "ms behind the leader's clock", "ms ahead of the leader's clock"


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    ("rules", "records", "code", "bad"),
    [
        (KEYED, "..n.n", ErrorCode.INVALID_BATCH, {2: NO_KEY, 4: NO_KEY}),
        (DATED, "o.a.n", ErrorCode.INVALID_TIMESTAMP, {0: OLD, 2: NEW}),
        (BOTH, "n.oNa", ErrorCode.INVALID_TIMESTAMP, {0: NO_KEY, 2: OLD, 3: NO_KEY, 4: NEW}),
        (BatchRules(), "no.", ErrorCode.INVALID_BATCH, {}),
        (batch_rules({"message.timestamp.type": "LogAppendTime"}), "oa", ErrorCode.INVALID_BATCH, {}),
    ],
    ids=["keys", "times", "both", "no rule", "append time"],
)
def test_a_refusal_names_the_records_that_are_to_blame(
    rules: BatchRules, records: str, code: ErrorCode, bad: dict[int, str], codec: str
) -> None:
    """n: without a key, N: and with a bad time; o: too old; a: ahead. As Kafka's LogValidator answers: a missing
    key comes first, and a bad time of any record decides the code."""
    shift = {"o": -2_000, "a": 2_000, "N": -2_000}
    made = [NewRecord(None if c in "nN" else b"k", b"v", 50_000 + shift.get(c, 0)) for c in records]
    before = SmqError(ErrorCode.INVALID_BATCH, "why")
    found = with_bad_records(before, encode_batch(made, codec=codec), rules, 50_000)
    assert found.code is code
    assert {r.place: r.message for r in found.details.records}.keys() == bad.keys()
    assert all(bad[r.place] in r.message for r in found.details.records)
    assert (found is before) == (not bad)


def test_what_does_not_decode_or_has_too_many_bad_records_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    error = SmqError(ErrorCode.INVALID_BATCH, "why")
    sent = encode_batch([NewRecord(None, b"v" * 99, 0)] * 5, codec="gzip")
    for broken in (sent[:-9], b"", sent[:30]):
        assert with_bad_records(error, broken, KEYED, 0) is error
    monkeypatch.setattr(admission, "RECORD_ERRORS_MAX", 3)
    assert len(with_bad_records(error, sent, KEYED, 0).details.records) == 3
    assert "and 2 more of its 5 records are bad" in with_bad_records(error, sent, KEYED, 0).message
