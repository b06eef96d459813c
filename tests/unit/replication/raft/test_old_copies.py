"""Rule 18: an old copy of a disk is recognised by what the disk reported that it remembers."""

from random import Random

import pytest

from smq.raft_state.ids import DiskId, NodeId
from smq.replication.net.disk_marks import DISKS_KEPT_MAX, MARKS, Mark
from smq.replication.raft.journal import RaftJournal
from smq.replication.raft.voters import DiskMarks, has_forgotten

A, B, C = NodeId(1), NodeId(2), NodeId(3)
DISK = DiskId(b"b" * 16)
ANOTHER = DiskId(b"n" * 16)


def journal_of(base: int, durable: int) -> RaftJournal:
    journal = RaftJournal()
    journal.base_writes, journal.durable_writes = base, durable
    return journal


def start(number: int) -> bytes:
    return number.to_bytes(8, "big")


def mark_of_b(number: int, base: int, writes: int, disk: DiskId = DISK) -> Mark:
    """Of B's disk, by its process of this number."""
    return Mark(B, disk, start(number), base, writes)


OF_C = Mark(C, DiskId(b"c" * 16), start(1), 0, 1)


def third(kept: RaftJournal | None = None) -> DiskMarks:
    """What C knows."""
    return DiskMarks(
        C, (A, B), lambda: OF_C.disk, lambda _node: DISK, OF_C.start, journal_of(1, 1) if kept is None else kept
    )


def second(base: int, writes: int, number: int = 9) -> DiskMarks:
    """B, which found `base` writes on its disk."""
    return DiskMarks(B, (A, C), lambda: DISK, lambda _node: None, start(number), journal_of(base, writes))


@pytest.fixture
def marks() -> DiskMarks:
    """What C knows."""
    return third()


def test_an_old_copy_is_doubted_by_a_node_that_the_disk_had_reported_more_to(marks: DiskMarks) -> None:
    marks.receive(B, mark_of_b(1, 10, 50), [])
    assert not marks.doubts(B, DISK)
    marks.session_over(B)
    marks.receive(B, mark_of_b(2, 49, 49), [])
    assert marks.doubts(B, DISK)
    assert marks.known == (mark_of_b(1, 10, 50),), "the evidence stays"
    marks.receive(B, mark_of_b(2, 49, 80), [])
    assert marks.doubts(B, DISK), "however much it writes"


def test_a_restart_that_remembers_everything_is_not_doubted(marks: DiskMarks) -> None:
    marks.receive(B, mark_of_b(1, 10, 50), [])
    for number, base in ((2, 50), (3, 53)):
        marks.receive(B, mark_of_b(number, base, base), [])
        assert not marks.doubts(B, DISK)
        marks.receive(B, mark_of_b(number, base, base + 3), [])
        assert not marks.doubts(B, DISK)
    assert marks.known == (mark_of_b(3, 53, 56),)


def test_a_third_node_passes_on_the_reports_that_it_got(marks: DiskMarks) -> None:
    marks.receive(A, Mark(A, ANOTHER, start(1), 0, 0), [mark_of_b(1, 10, 50)])
    marks.receive(B, mark_of_b(2, 20, 21), [])
    assert marks.doubts(B, DISK)


def test_old_news_of_a_process_that_is_gone_is_no_evidence(marks: DiskMarks) -> None:
    marks.receive(B, mark_of_b(2, 60, 61), [])
    marks.receive(A, Mark(A, ANOTHER, start(1), 0, 0), [mark_of_b(1, 10, 50)])
    assert not marks.doubts(B, DISK)
    assert second(60, 61).receive(A, Mark(A, ANOTHER, start(1), 0, 0), [mark_of_b(1, 10, 50)]) is None


def test_the_old_copy_learns_what_it_is_from_any_node_that_knows() -> None:
    assert second(49, 49).receive(C, OF_C, [mark_of_b(1, 10, 50)]) == mark_of_b(1, 10, 50)
    assert second(50, 50).receive(C, OF_C, [mark_of_b(1, 10, 50)]) is None
    assert second(49, 49).receive(C, OF_C, [mark_of_b(1, 10, 50, ANOTHER)]) is None


def test_a_process_that_went_back_in_time_with_its_machine_learns_it_too() -> None:
    assert second(10, 49).receive(C, OF_C, [mark_of_b(9, 10, 50)]) == mark_of_b(9, 10, 50)
    assert second(10, 50).receive(C, OF_C, [mark_of_b(9, 10, 50)]) is None


def test_a_disk_that_has_been_given_up_does_not_count_though_its_last_words_come_late(marks: DiskMarks) -> None:
    marks.receive(B, mark_of_b(2, 10, 10, ANOTHER), [])
    assert marks.doubts(B, DISK)
    assert not marks.doubts(B, ANOTHER)


def test_before_a_session_has_begun_no_node_is_doubted() -> None:
    assert not third().doubts(B, DISK)


def test_reports_are_kept_and_read_again_by_the_next_process() -> None:
    kept = RaftJournal()
    third(kept).receive(B, mark_of_b(1, 10, 50), [])
    later = third(kept)
    later.load()
    later.receive(B, mark_of_b(2, 30, 31), [])
    assert later.doubts(B, DISK)


def test_only_some_disks_per_node_are_kept_and_none_of_unknown_nodes(marks: DiskMarks) -> None:
    for n in range(DISKS_KEPT_MAX + 2):
        marks.receive(B, mark_of_b(n, 0, 1, DiskId(bytes([n]) * 16)), [Mark(NodeId(77), DISK, start(1), 0, 1)])
    assert [mark.disk[0] for mark in marks.known] == list(range(2, DISKS_KEPT_MAX + 2))


def test_peers_that_know_other_old_disks_do_not_talk_each_other_out_of_the_present_one() -> None:
    """The fifth disk of B came while C was away. B says nothing; the two others tell each other what they know."""
    disks = [DiskId(bytes([n]) * 16) for n in range(DISKS_KEPT_MAX + 1)]
    of_a = Mark(A, ANOTHER, start(1), 0, 1)
    present = mark_of_b(9, 0, 50, disks[-1])
    first = DiskMarks(A, (B, C), lambda: ANOTHER, lambda _node: disks[-1], start(1), RaftJournal())
    last = DiskMarks(C, (A, B), lambda: OF_C.disk, lambda _node: disks[-1], OF_C.start, RaftJournal())
    for n, disk in enumerate(disks):
        first.receive(B, mark_of_b(n, 0, 50, disk), [])
        if disk is not disks[-1]:
            last.receive(B, mark_of_b(n, 0, 50, disk), [])
    first.receive(B, present, [])
    for _ in range(DISKS_KEPT_MAX + 1):
        of_first, of_last = first.known, last.known
        first.receive(C, OF_C, of_last)
        last.receive(A, of_a, of_first)
    for marks in (first, last):
        marks.receive(B, mark_of_b(10, 49, 49, disks[-1]), [])
        assert marks.doubts(B, disks[-1])


def test_no_order_of_news_makes_a_true_disk_doubted_and_an_old_copy_is_found() -> None:
    """B restarts again and again; its reports reach C in any order, those of its present process last."""
    for seed in range(300):
        rng = Random(seed)
        writes, news = 1, []
        for number in range(rng.randint(1, 6)):
            base = writes
            for _ in range(rng.randint(1, 4)):
                news.append(mark_of_b(number, base, writes))
                writes += rng.randint(0, 3)
        marks = third()
        for mark in rng.sample(news, len(news)):
            marks.receive(A, Mark(A, ANOTHER, start(1), 0, 0), [mark])
        marks.receive(B, mark_of_b(99, writes, writes), [])
        assert not marks.doubts(B, DISK)
        copied = max(mark.writes for mark in news) - 1
        marks.receive(B, mark_of_b(100, copied, copied), [])
        assert marks.doubts(B, DISK)


def test_a_process_has_not_forgotten_what_it_wrote_itself() -> None:
    assert not has_forgotten(mark_of_b(1, 10, 50), start(1), 10)


def test_marks_come_back_as_they_were_packed_and_nothing_else_does() -> None:
    marks = (mark_of_b(1, 10, 50), OF_C)
    assert MARKS.unpack(MARKS.pack(marks)) == marks
    with pytest.raises(ValueError, match="43 bytes are left over"):
        MARKS.unpack(MARKS.pack(marks)[:-1])
