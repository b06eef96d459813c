"""The journal over a disk that crashes: restarts recover it, and damage is refused."""

from random import Random

import pytest

from smq.raft_state.ids import NodeId
from smq.replication.ports import DataDamaged, Table
from smq.replication.raft.journal import JournalWriter, RaftJournal, Snapshot, set_aside
from smq.replication.raft.messages import NO_OP, REGULAR
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.disk import DiskImage, FakeDisk

LATENCY_MS = 5.0


class Desk:
    """A journal on a disk that takes 5 ms for a commit."""

    def __init__(self, image: DiskImage | None = None) -> None:
        self.scheduler = Scheduler()
        self.process = Process(self.scheduler, "desk", self._raise)
        clock = SimClock(self.process, Machine())
        self.disk = FakeDisk(clock, Random(1), image=image, latency_ms=(LATENCY_MS, LATENCY_MS), on_fatal=self._raise)
        self.reports = 0
        self.journal = RaftJournal()
        self.writer = JournalWriter(self.disk, self.journal, self._on_durable)
        for _ in self.journal.load(self.disk):
            pass

    def _on_durable(self) -> None:
        self.reports += 1

    def _raise(self, error: BaseException) -> None:
        raise error

    def sync(self) -> None:
        self.writer.flush()
        self.scheduler.run_for_ms(3 * LATENCY_MS)

    def reopened(self) -> RaftJournal:
        return Desk(self.disk.image.copy()).journal


def entry(n: int) -> bytes:
    return bytes([REGULAR]) + f"command {n}".encode()


def filled(count: int, *, term: int = 1) -> Desk:
    """Entries 1 (the library's first) to `count`, durable."""
    desk = Desk()
    desk.journal.set_term(term, NodeId(2))
    desk.journal.add(bytes([NO_OP]), 1, 0)
    for index in range(2, count + 1):
        desk.journal.add(entry(index), index, term)
    desk.sync()
    return desk


def contents(journal: RaftJournal) -> list[tuple[bytes, int, int]]:
    return [journal[i] for i in range(len(journal))]


def test_a_new_node_has_an_empty_journal() -> None:
    journal = Desk().journal
    assert (len(journal), journal.term, journal.voted_for) == (0, 0, None)
    assert journal.commit_index == 1


def test_everything_comes_back_after_a_restart() -> None:
    desk = filled(5)
    desk.journal.commit_to(4)
    desk.journal.add(entry(6), 6, 1)
    desk.sync()
    journal = desk.reopened()
    assert contents(journal) == contents(desk.journal)
    assert (journal.term, journal.voted_for, journal.commit_index) == (1, 2, 4)
    assert journal.durable_index == 6


def test_what_was_not_flushed_is_not_there_after_a_crash() -> None:
    desk = filled(3)
    desk.journal.add(entry(4), 4, 1)
    assert desk.reopened().last_index == 3


def test_a_replaced_entry_is_not_durable_because_its_predecessor_was() -> None:
    desk = filled(5)
    desk.journal.truncate_from(4)
    desk.journal.add(entry(40), 4, 2)
    assert desk.journal.durable_index == 3
    desk.sync()
    assert desk.journal.durable_index == 4


def test_a_write_in_flight_does_not_count_for_what_replaced_it() -> None:
    desk = filled(3)
    desk.journal.add(entry(4), 4, 1)
    desk.writer.flush()
    desk.scheduler.run_for_ms(1)
    desk.journal.truncate_from(4)
    desk.journal.add(entry(40), 4, 2)
    desk.writer.flush()
    desk.scheduler.run_for_ms(LATENCY_MS)
    assert desk.reports == 2
    assert desk.journal.durable_index == 3
    desk.scheduler.run_for_ms(2 * LATENCY_MS)
    assert desk.journal.durable_index == 4


def test_truncation_and_what_replaces_it_are_one_submission() -> None:
    desk = filled(5)
    before = desk.disk.submitted_seq
    desk.journal.set_term(2, None)
    desk.journal.truncate_from(4)
    desk.journal.add(entry(40), 4, 2)
    desk.sync()
    assert desk.disk.submitted_seq == before + 1
    assert desk.reopened().last_index == 4
    assert desk.reopened().term_at(4) == 2


def test_a_committed_entry_is_never_dropped() -> None:
    desk = filled(5)
    desk.journal.commit_to(4)
    with pytest.raises(ValueError, match="committed"):
        desk.journal.truncate_from(4)


@pytest.mark.parametrize(("term", "voted_for"), [(1, 3), (1, None), (0, 2)])
def test_a_cast_vote_stands_and_a_term_never_goes_back(term: int, voted_for: NodeId | None) -> None:
    desk = filled(3)
    with pytest.raises(ValueError, match="after a vote for 2 in 1"):
        desk.journal.set_term(term, voted_for)


def test_a_gap_is_never_written() -> None:
    desk = filled(5)
    with pytest.raises(ValueError, match="cannot follow"):
        desk.journal.add(entry(7), 7, 1)


def test_snapshot_and_trim_are_one_submission() -> None:
    desk = filled(9)
    before = desk.disk.submitted_seq
    desk.journal.commit_to(8)
    desk.journal.compact(Snapshot(index=8, term=1, state=b"state at 8"), 6)
    desk.sync()
    journal = desk.reopened()
    assert desk.disk.submitted_seq == before + 1
    assert (journal.first_index, journal.last_index) == (6, 9)
    assert journal.snapshot == Snapshot(index=8, term=1, state=b"state at 8")


def test_an_installed_snapshot_replaces_everything_in_one_submission() -> None:
    desk = filled(5)
    before = desk.disk.submitted_seq
    desk.journal.set_term(4, None)
    desk.journal.install(Snapshot(index=70, term=4, state=b"s"))
    assert desk.journal.durable_index == 0
    desk.sync()
    journal = desk.reopened()
    assert desk.disk.submitted_seq == before + 1
    assert (journal.first_index, journal.last_index, journal.last_term) == (70, 70, 4)
    assert journal.commit_index == 70


def test_entries_are_handed_out_whole_and_at_least_one() -> None:
    desk = filled(9)
    assert [e[1] for e in desk.journal.entries_from(3, count_max=2)] == [3, 4]
    assert [e[1] for e in desk.journal.entries_from(3, count_max=9, bytes_max=1)] == [3]
    assert [e[1] for e in desk.journal.entries_from(3, count_max=9, bytes_max=2 * len(entry(3)))] == [3, 4]
    assert desk.journal.entries_from(10, count_max=9) == []


def test_size_follows_every_change() -> None:
    desk = filled(9)
    desk.journal.truncate_from(8)
    whole = sum(len(e[0]) for e in contents(desk.journal))
    assert (desk.journal.grown_bytes, desk.journal.bytes_from(1)) == (whole, whole)
    assert desk.journal.bytes_from(6) == len(entry(6)) + len(entry(7))
    desk.journal.compact(Snapshot(index=7, term=1, state=b""), 5)
    assert desk.journal.grown_bytes == 0
    desk.journal.add(entry(8), 8, 1)
    assert desk.journal.grown_bytes == len(entry(8))
    desk.journal.truncate_from(8)
    assert desk.journal.grown_bytes == 0
    desk.journal.install(Snapshot(index=70, term=4, state=b"s"))
    assert (desk.journal.grown_bytes, desk.journal.bytes_from(70)) == (
        0,
        sum(len(e[0]) for e in contents(desk.journal)),
    )


# ------------------------------------------------------------------------------------------------------- damage
def key(index: int) -> bytes:
    return index.to_bytes(8, "big")


@pytest.mark.parametrize("index", [1, 4, 6])
def test_a_flipped_bit_in_an_entry_names_its_index(index: int) -> None:
    image = filled(6).disk.image
    rows = image.tables[Table.RAFT_LOG]
    for position in range(len(rows[key(index)])):
        flipped = image.copy()
        value = bytearray(rows[key(index)])
        value[position] ^= 4
        flipped.tables[Table.RAFT_LOG][key(index)] = bytes(value)
        with pytest.raises(DataDamaged, match=f"index {index}"):
            Desk(flipped)


@pytest.mark.parametrize("index", [1, 4, 6])
def test_a_missing_entry_is_damage_even_the_last(index: int) -> None:
    image = filled(6).disk.image
    del image.tables[Table.RAFT_LOG][key(index)]
    with pytest.raises(DataDamaged, match=f"index {index}: .*missing|index {index}: the journal should end with 6"):
        Desk(image)


def test_a_cut_entry_is_damage_and_so_are_two_that_changed_places() -> None:
    image = filled(6).disk.image
    rows = image.tables[Table.RAFT_LOG]
    rows[key(6)] = rows[key(6)][:7]
    with pytest.raises(DataDamaged, match="index 6"):
        Desk(image)
    rows[key(4)], rows[key(5)] = rows[key(5)], rows[key(4)]
    with pytest.raises(DataDamaged, match="index 4"):
        Desk(image)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"vote", "vote"),
        (b"journal", "journal"),
        (b"marks", "the count of writes is missing"),
        (b"snapshot", "snapshot"),  # of a journal that was trimmed
    ],
)
def test_a_lost_row_is_damage_and_never_a_fresh_start_and_says_what_to_do(name: bytes, words: str) -> None:
    desk = filled(9)
    desk.journal.compact(Snapshot(index=8, term=1, state=b"state at 8"), 6)
    desk.sync()
    image = desk.disk.image
    del image.tables[Table.RAFT_META][name]
    with pytest.raises(DataDamaged, match=words) as damaged:
        Desk(image)
    assert "fetched from them" in str(damaged.value)


@pytest.mark.parametrize("name", [b"vote", b"journal", b"snapshot", b"marks"])
def test_a_flipped_bit_in_the_meta_data_names_its_key(name: bytes) -> None:
    desk = filled(9)
    desk.journal.compact(Snapshot(index=8, term=1, state=b"state at 8"), 6)
    desk.sync()
    rows = desk.disk.image.tables[Table.RAFT_META]
    for position in range(len(rows[name])):
        flipped = desk.disk.image.copy()
        value = bytearray(rows[name])
        value[position] ^= 16
        flipped.tables[Table.RAFT_META][name] = bytes(value)
        with pytest.raises(DataDamaged, match=name.decode()):
            Desk(flipped)


def test_every_write_of_raft_is_counted_once_it_is_durable() -> None:
    desk = filled(3)
    assert (desk.journal.base_writes, desk.journal.durable_writes) == (0, 1)
    desk.journal.set_term(2, None)
    desk.writer.flush()
    assert desk.journal.durable_writes == 1
    desk.sync()
    assert desk.journal.durable_writes == 2
    assert (desk.reopened().base_writes, desk.reopened().durable_writes) == (2, 2)


def test_the_count_continues_over_a_snapshot_and_a_truncation() -> None:
    desk = filled(3)
    desk.journal.install(Snapshot(index=9, term=1, state=b"state at 9"))
    desk.writer.flush()
    desk.journal.add(entry(10), 10, 1)
    desk.writer.flush()
    desk.journal.truncate_from(10)
    desk.sync()
    assert desk.journal.durable_writes == 4
    assert desk.reopened().base_writes == 4


def test_what_others_reported_is_kept_with_the_next_write_or_alone_and_counts_as_none() -> None:
    desk = filled(3)
    desk.journal.keep_marks(b"heard")
    assert desk.reopened().marks == b""
    desk.writer.flush_marks()
    submitted = desk.disk.submitted_seq
    desk.sync()
    assert (desk.reopened().marks, desk.reopened().base_writes) == (b"heard", 1)
    desk.writer.flush_marks()
    assert desk.disk.submitted_seq == submitted, "they have not changed"
    desk.journal.keep_marks(b"more")
    desk.journal.add(entry(4), 4, 1)
    desk.sync()
    assert (desk.reopened().marks, desk.reopened().base_writes) == (b"more", 2)


def test_what_others_reported_is_never_alone_on_the_disk_of_a_new_node() -> None:
    desk = Desk()
    desk.journal.keep_marks(b"heard")
    desk.writer.flush_marks()
    desk.sync()
    assert len(desk.reopened()) == 0


def test_a_start_that_is_made_again_on_emptied_tables_takes_nothing_of_the_first_for_durable() -> None:
    """What the engine reads behind the journal may be damaged, too: then the tables are set aside, and read again."""
    desk = Desk(filled(3).disk.image.copy())
    journal = desk.journal
    assert journal.durable_index == 3
    desk.disk.submit(set_aside(desk.disk))
    desk.sync()
    for _ in journal.load(desk.disk):
        pass
    assert (len(journal), journal.durable_index, journal.base_writes) == (0, 0, 0)
