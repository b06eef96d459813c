"""What became of producers' batches is counted, each once, wherever its answer comes from."""

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import NewRecord, encode_batch
from smq.replication.api import Acks
from tests.unit.replication.support import ME, PEER_A, Host

SEQUENCED = encode_batch([NewRecord(b"k", b"v", 1)], producer_id=7, producer_epoch=0, base_sequence=0)


def results(host: Host) -> dict[str, int]:
    """Those that occurred."""
    return {result: count for (result,), count in host.measures.produced.values.items() if count}


def commit(host: Host, end: int) -> None:
    host.settle()
    host.ack(PEER_A, end)
    host.advance(end)
    host.settle()


def test_a_batch_is_counted_when_it_is_answered(host: Host) -> None:
    answer = host.produce()
    assert (answer.result, results(host)) == (None, {})
    commit(host, 1)
    assert answer.offsets == (0, 0)
    assert results(host) == {"stored": 1}


def test_a_repeated_batch_is_a_duplicate_whether_it_waits_or_not(host: Host) -> None:
    host.produce(SEQUENCED)
    host.produce(SEQUENCED)
    commit(host, 1)
    assert results(host) == {"stored": 1, "duplicate": 1}
    host.produce(SEQUENCED)
    assert results(host) == {"stored": 1, "duplicate": 2}


def test_batches_whose_producers_want_no_answer_are_counted_too(host: Host) -> None:
    for _ in range(2):
        host.produce(SEQUENCED, Acks.NONE)
    assert results(host) == {"stored": 1, "duplicate": 1}


def test_a_lost_batch_is_counted_by_its_error_and_not_as_stored(host: Host) -> None:
    host.produce()
    host.elect(PEER_A)
    host.elect(ME)
    host.settle()
    assert results(host) == {"APPEND_LOST": 1}


def test_a_batch_that_no_majority_stores_in_time_is_counted_once(host: Host) -> None:
    host.produce(timeout_ms=100)
    host.settle()
    commit(host, 1)
    assert results(host) == {"TIMED_OUT": 1}


def test_parked_batches_are_counted_when_they_are_refused(host: Host) -> None:
    host.produce()
    commit(host, 1)
    assert host.live.transfer(PEER_A)
    host.produce()
    host.live.close(SmqError(ErrorCode.LEADER_UNAVAILABLE, "the node stops"))
    assert results(host) == {"stored": 1, "LEADER_UNAVAILABLE": 1}
