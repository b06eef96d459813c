"""The state machine's share of turns: in order, and a snapshot that is installed ends everything else."""

from collections.abc import Iterator

from smq.raft_state.ids import LogIndex
from smq.raft_state.replies import Applied, Done
from smq.replication.raft.applier import Applier
from smq.replication.raft.journal import RaftJournal, Snapshot
from smq.replication.raft.messages import NO_OP, REGULAR
from smq.replication.raft.ready import Apply, Install

RESTORE_STEPS = 10  # more than one turn takes


class Machine:
    """Notes what it is made to do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stuck_at = 0  # this entry does not settle
        self._index = 0

    def apply(self, index: LogIndex, _command: bytes) -> Applied:
        self._index = index
        self.log.append(f"apply {index}")
        return Applied(reply=Done())

    def settle(self) -> bool:
        return self._index != self.stuck_at

    def pass_over(self, index: LogIndex) -> None:
        self.log.append(f"pass over {index}")

    def snapshot(self) -> Iterator[bytes]:
        yield from (b"a", b"b", b"c")

    def restore(self, index: LogIndex, _snapshot: bytes) -> Iterator[None]:
        self.log.append(f"restore {index}")
        for _ in range(RESTORE_STEPS):
            yield
        self._index = index


def applier(entries: int, *, snapshot_entries: int = 100) -> tuple[Applier, Machine, RaftJournal]:
    machine, journal = Machine(), RaftJournal()
    for index in range(1, entries + 1):
        journal.add(bytes([REGULAR if index > 1 else NO_OP]), index, 1)
    return Applier(machine, journal, snapshot_entries, lambda: None), machine, journal


def snapshot(index: int) -> Snapshot:
    return Snapshot(index=index, term=1, state=b"state")


def install(subject: Applier, journal: RaftJournal, wanted: Snapshot) -> None:
    while subject.run(Install(wanted)).installed is None:
        pass
    journal.install(wanted)
    for index in range(wanted.index + 1, wanted.index + 3):
        journal.add(bytes([REGULAR]), index, 1)


def test_an_entry_waits_until_the_one_before_it_has_settled() -> None:
    subject, machine, _ = applier(4)
    machine.stuck_at = 2
    for _ in range(2):
        report = subject.run(Apply(LogIndex(4)))
        assert (report.up_to, report.entries, machine.log) == (1, (), ["apply 2"])
    machine.stuck_at = 0
    report = subject.run(Apply(LogIndex(4)))
    assert (report.up_to, [entry.index for entry in report.entries]) == (4, [2, 3, 4])
    assert machine.log == ["apply 2", "apply 3", "apply 4"]


def test_an_entry_that_had_not_settled_when_a_snapshot_came_does_not_settle_after_it() -> None:
    subject, machine, journal = applier(4)
    machine.stuck_at = 2
    subject.run(Apply(LogIndex(4)))
    install(subject, journal, snapshot(20))
    report = subject.run(Apply(LogIndex(21)))
    assert (report.up_to, [entry.index for entry in report.entries]) == (21, [21])
    assert machine.log == ["apply 2", "restore 20", "apply 21"]


def test_nothing_is_applied_while_a_snapshot_is_taken_which_is_of_the_last_entry_applied() -> None:
    subject, machine, _ = applier(6, snapshot_entries=2)
    report = subject.run(Apply(LogIndex(3)))
    while report.is_taking_snapshot:
        assert report.up_to == 3
        report = subject.run(Apply(LogIndex(6)))
    assert report.taken == Snapshot(index=3, term=1, state=b"abc")
    assert machine.log == ["apply 2", "apply 3"]


def test_no_snapshot_is_taken_of_an_entry_that_has_not_settled() -> None:
    subject, machine, _ = applier(4, snapshot_entries=2)
    machine.stuck_at = 4
    report = subject.run(Apply(LogIndex(4)))
    assert (report.up_to, report.is_taking_snapshot) == (3, False)
    machine.stuck_at = 0
    report = subject.run(Apply(LogIndex(4)))
    assert (report.up_to, report.is_taking_snapshot) == (4, True)


def test_a_snapshot_being_taken_ends_when_another_is_installed() -> None:
    subject, _, journal = applier(6, snapshot_entries=2)
    assert subject.run(Apply(LogIndex(3))).is_taking_snapshot
    install(subject, journal, snapshot(20))
    report = subject.run(Apply(LogIndex(21)))
    assert (report.up_to, report.taken, report.is_taking_snapshot) == (21, None, False)


def test_an_installation_continues_with_the_same_snapshot_and_counts_only_at_its_end() -> None:
    subject, machine, journal = applier(3)
    wanted = snapshot(20)
    assert subject.run(Install(wanted)).installed is None
    assert subject.applied_index == 1
    install(subject, journal, wanted)
    assert (subject.applied_index, machine.log) == (20, ["restore 20"])
