"""What a topic does not retain goes: by age, bytes and records, proposed by the leader of each partition."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import AdvanceClock, AlterTopicConfig, ApplyRetention
from smq.raft_state.config_keys import INT64_MAX
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Offset, PartitionId
from smq.raft_state.replies import Done
from smq.raft_state.state import PartitionState
from smq.raft_state.topic_config import BatchRules
from smq.records import NewRecord, encode_batch
from smq.replication.api import DoneFn
from smq.replication.log import reader as log_reader
from smq.replication.log.reader import Retained
from smq.replication.log.segments import own_digest
from smq.replication.log.stored_batch import ENVELOPE_BYTES
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.replica import Replica
from smq.replication.partition.retention import PAUSE_MS_MAX, Retainer
from tests.unit.raft_state.support import advance, advances, pid, topic
from tests.unit.replication.partition.compaction.support import Keeper as Writer
from tests.unit.replication.partition.compaction.support import agree
from tests.unit.replication.support import ME, PEER_A, Host

DAY_MS = 86_400_000
NOW_MS = 1_800_000_000_000
BATCH_BYTES = ENVELOPE_BYTES + len(encode_batch([NewRecord(None, b"x" * 100, NOW_MS)] * 10))


class Keeper:
    """A leader whose batches of one record each are committed, and its retention."""

    def __init__(self) -> None:
        self.host = Host()
        self.host.config = replace(self.host.config, retention_check_ms=10_000)
        self.host.create_partition()
        self.host.elect(ME)
        node = self.host.node_host()
        self.measures = node.measures
        self.retainer = Retainer(node, self.host.look_ups())
        self.host.apply(AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=NOW_MS))
        self.host.rules = BatchRules(after_ms=INT64_MAX)  # the leader's own clock is three years behind that one

    def commit(self, *ages_ms: int, count: int = 1) -> None:
        for age_ms in ages_ms:
            self.host.produce(encode_batch([NewRecord(None, b"x" * 100, NOW_MS - age_ms)] * count))
        self.host.commit()

    def limit(self, **limits: int) -> None:
        set_ = tuple((f"retention.{name}", str(value)) for name, value in sorted(limits.items()))
        self.host.apply(AlterTopicConfig(name="t", set_=set_))

    def visit(self) -> None:
        self.retainer.visit(self.host.live, self.host.clock.monotonic_ns())
        self.host.settle(50)

    def visit_again(self) -> None:
        self.host.settle(PAUSE_MS_MAX)
        self.visit()

    @property
    def starts(self) -> list[int]:
        """Of the commands that were proposed."""
        return [item.offset for c in self.host.proposed if isinstance(c, ApplyRetention) for item in c.items]

    def accept(self) -> None:
        """The newest proposal takes effect."""
        self.host.apply(self.host.proposed[-1])
        self.host.answers[-1](Done())
        self.visit()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.mark.parametrize(
    ("ages_ms", "limits", "starts"),
    [
        ([365 * DAY_MS, 0], {}, []),
        ([3 * DAY_MS, 2 * DAY_MS + 1, 2 * DAY_MS, 0], {"ms": 2 * DAY_MS}, [20]),
        ([3 * DAY_MS, 0, 3 * DAY_MS], {"ms": DAY_MS}, [10]),  # the log stays contiguous
        ([0, 0, 0, 0], {"records": 15}, [20]),
        ([0, 0, 0, 0], {"bytes": 2 * BATCH_BYTES + 1}, [10]),  # three batches are the fewest with that many bytes
        ([0, 0, 0], {"bytes": 1}, [20]),  # the newest stays
    ],
)
def test_batches_of_ten_records_go_that_the_limits_do_not_keep(
    keeper: Keeper, ages_ms: list[int], limits: dict[str, int], starts: list[int]
) -> None:
    keeper.commit(*ages_ms, count=10)
    assert keeper.host.live.log.size_bytes == len(ages_ms) * BATCH_BYTES
    if limits:
        keeper.limit(**limits)
    keeper.visit()
    assert keeper.starts == starts


def test_a_new_limit_does_not_wait_for_the_pause_of_the_old(keeper: Keeper) -> None:
    keeper.commit(0, 0, 0)
    keeper.limit(ms=365 * DAY_MS)
    keeper.visit()
    assert keeper.starts == []
    keeper.limit(records=1)
    keeper.host.settle(keeper.host.config.retention_check_ms)
    keeper.visit()
    assert keeper.starts == [2]


def test_everything_may_go_by_age(keeper: Keeper) -> None:
    keeper.commit(3 * DAY_MS, 3 * DAY_MS)
    keeper.limit(ms=DAY_MS)
    keeper.visit()
    while keeper.host.part.log_start < 2:
        keeper.accept()
    assert keeper.host.live.log.log_start == 2
    assert keeper.starts == [1, 2], "a log is emptied in one transaction, so the last batch goes alone"
    keeper.commit(0)
    keeper.visit_again()
    assert keeper.starts == [1, 2]


@pytest.mark.parametrize("limits", [{"records": 20}, {"bytes": 2 * BATCH_BYTES}])
def test_what_is_not_committed_neither_goes_nor_counts(keeper: Keeper, limits: dict[str, int]) -> None:
    keeper.commit(0, 0, 0, count=10)
    for _ in range(5):
        keeper.host.produce(encode_batch([NewRecord(None, b"x" * 100, NOW_MS - 9 * DAY_MS)] * 10))
    keeper.host.settle()
    assert keeper.host.live.log.size_bytes == 8 * BATCH_BYTES
    keeper.limit(**limits)
    keeper.visit()
    assert keeper.starts == [10]


@pytest.mark.parametrize(("records", "start"), [(4, 1), (1, 2)])
def test_an_open_transaction_counts_and_does_not_go(records: int, start: int) -> None:
    writer = Writer()
    writer.put(b"k", b"1")
    writer.put(b"k", b"2")
    writer.put_in_transaction(b"k", b"3", commit=None)
    writer.put(b"k", b"4")
    writer.put(b"k", b"5")
    host = writer.host
    host.configure(cleanup_policy="delete", retention_records=str(records))
    retainer = Retainer(host.node_host(), host.look_ups())

    def starts() -> list[int]:
        retainer.visit(host.live, host.clock.monotonic_ns())
        writer.settle(PAUSE_MS_MAX)
        return [item.offset for c in host.proposed if isinstance(c, ApplyRetention) for item in c.items]

    assert starts() == [start]
    writer.end(commit=True)
    assert starts()[-1] == 6 - records, "the control batch is the last"


def test_age_is_judged_by_the_replicated_clock_only(keeper: Keeper) -> None:
    keeper.commit(0)
    keeper.limit(ms=DAY_MS)
    keeper.host.hardware.wall_offset_ns += 10 * DAY_MS * 1_000_000
    keeper.visit()
    assert keeper.starts == []


def test_without_a_clock_nothing_goes_by_age(host: Host) -> None:
    host.elect(ME)
    retainer = Retainer(host.node_host(), host.look_ups())
    host.produce(encode_batch([NewRecord(None, b"x", 1)]))
    host.settle()
    host.advance(1)
    host.configure(retention_ms="1")
    retainer.visit(host.live, host.clock.monotonic_ns())
    host.settle(50)
    assert host.proposed == []


def test_records_without_a_create_time_age_by_their_append_time(keeper: Keeper) -> None:
    keeper.host.produce(encode_batch([NewRecord(None, b"x", -1)]))
    keeper.host.settle()
    keeper.host.advance(1)
    appended_ms = keeper.host.live.log.last_ts_ns // 1_000_000
    keeper.limit(ms=NOW_MS - appended_ms)
    keeper.visit()
    assert keeper.starts == []
    keeper.limit(ms=NOW_MS - appended_ms - 1)
    keeper.visit_again()
    assert keeper.starts == [1]


def test_a_failed_proposal_is_repeated(keeper: Keeper) -> None:
    keeper.commit(0, 0)
    keeper.limit(records=1)
    keeper.visit()
    keeper.host.answers[-1](SmqError(ErrorCode.TIMED_OUT, "no answer"))
    keeper.host.settle(50)
    assert keeper.starts == [1, 1]
    keeper.accept()
    keeper.host.settle(50)
    assert keeper.starts == [1, 1]


def _deposed(host: Host) -> None:
    host.elect(PEER_A)


def _unlimited(host: Host) -> None:
    host.configure(retention_records=None)


def _relaxed(host: Host) -> None:
    host.configure(retention_records="100")


@pytest.mark.parametrize("change", [_deposed, _unlimited, _relaxed])
def test_nothing_goes_that_a_change_during_the_look_up_has_saved(
    keeper: Keeper, change: Callable[[Host], None]
) -> None:
    keeper.commit(0, 0)
    keeper.limit(records=1)
    keeper.retainer.visit(keeper.host.live, keeper.host.clock.monotonic_ns())
    change(keeper.host)
    keeper.host.settle(50)
    assert keeper.starts == []


@pytest.mark.parametrize("change", [_deposed, _unlimited, _relaxed])
def test_nothing_goes_that_a_change_has_saved_while_the_command_was_on_its_way(
    keeper: Keeper, change: Callable[[Host], None]
) -> None:
    keeper.commit(0, 0)
    keeper.limit(records=1)
    keeper.visit()
    change(keeper.host)
    keeper.host.apply(keeper.host.proposed[-1])
    assert keeper.host.part.log_start == 0
    keeper.host.answers[-1](SmqError(ErrorCode.TIMED_OUT, "no answer"))
    keeper.host.settle(50)
    assert keeper.starts == [1], "it is not repeated either"


@dataclass(eq=False)
class _Led:
    """As much of a leader's replica as its retention looks at."""

    part: PartitionState
    log = SimpleNamespace(size_bytes=0)

    @property
    def pid(self) -> PartitionId:
        return self.part.pid

    @property
    def leading(self) -> Epoch:
        return self.part.epoch


def test_what_is_found_while_a_command_is_on_its_way_shares_the_next() -> None:
    host, count = Host(), 5
    host.apply(replace(topic(1, partitions=count), config=(("retention.records", "1"),)))
    host.apply(advances(*(advance(pid(1, index), 0, hwm=3) for index in range(count))))
    found: list[DoneFn[Retained]] = []
    look_ups = SimpleNamespace(retained_start=lambda _replica, _limits, _now_ms, done: found.append(done))
    retainer = Retainer(host.node_host(), cast(LookUps, look_ups))
    parts = host.state.topics["t1"].partitions
    for part in parts:
        retainer.visit(cast(Replica, _Led(part)), 1)
    for number in range(count):
        assert len(found) == number + 1, "one log at a time"
        found[-1](Retained(Offset(2), False, 0))
        host.settle(1)
    assert [len(command.items) for command in host.proposed if isinstance(command, ApplyRetention)] == [1]
    host.apply(host.proposed[-1])
    host.answers[-1](Done())
    host.settle(1)
    assert [len(command.items) for command in host.proposed if isinstance(command, ApplyRetention)] == [1, count - 1]
    host.apply(host.proposed[-1])
    assert [part.log_start for part in parts] == [2] * count


def test_a_long_log_goes_in_several_steps_and_what_has_gone_is_counted_once_it_has(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "RETENTION_BATCHES_MAX", 3)
    measures = keeper.measures
    keeper.commit(*[0] * 8)
    before = keeper.host.live.log.size_bytes
    keeper.limit(records=1)
    keeper.visit()
    assert (keeper.starts, measures.retained_offsets.amount) == ([3], 0)
    while keeper.host.part.log_start < 7:
        keeper.accept()
    keeper.visit()
    assert (keeper.starts, measures.retained_offsets.amount) == ([3, 6, 7], 7)
    assert measures.retained_bytes.amount == before - keeper.host.live.log.size_bytes


def test_a_partition_is_not_examined_at_every_visit(keeper: Keeper) -> None:
    keeper.commit(0, 0)
    keeper.limit(records=1)
    keeper.visit()
    keeper.accept()
    keeper.commit(0)
    keeper.visit()
    assert keeper.starts == [1]
    keeper.host.settle(keeper.host.config.retention_check_ms)
    keeper.visit()
    assert keeper.starts == [1, Offset(2)]


def compacted(batches: int) -> Keeper:
    """All batches are old, and one compacted segment: it stays on disk whole until the log start has passed it."""
    keeper = Keeper()
    for number in range(batches):
        record = NewRecord(b"%d" % number, b"", NOW_MS - 3 * DAY_MS)
        keeper.host.produce(encode_batch([record], producer_id=5, producer_epoch=0, base_sequence=number))
    keeper.host.settle()
    keeper.host.advance(batches)
    log = keeper.host.live.log
    digest = own_digest(log, Offset(0), Offset(batches))
    agree(keeper.host, batches, digest)
    log.note_held(Offset(0), Offset(batches), digest)
    keeper.host.settle()
    return keeper


@pytest.mark.parametrize("batches", [6, 40])
def test_batches_below_the_start_that_stay_with_their_segment_do_not_hold_retention_up(
    batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one look-up they are more than it takes, and the last batch above them is the only one that is left."""
    monkeypatch.setattr(log_reader, "RETENTION_BATCHES_MAX", 10)
    keeper = compacted(batches)
    keeper.limit(ms=DAY_MS)
    keeper.visit()
    for _ in range(10):
        if keeper.starts and keeper.host.part.log_start < keeper.starts[-1]:
            keeper.accept()
        else:
            keeper.visit_again()
    assert keeper.host.part.log_start == batches
