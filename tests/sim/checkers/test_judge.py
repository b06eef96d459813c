"""Each anomaly: a hand-made history without it passes, the same history with it is found, by its name."""

from collections.abc import Callable
from typing import Any

import pytest

from chaos_tests.checkers.base import index
from chaos_tests.checkers.judge import judge
from chaos_tests.history import Event, HistoryError, Recorder, pair


class Story:
    """Writes histories in the order of its calls, one microsecond a step."""

    def __init__(self) -> None:
        self.now = 0
        self.recorder = Recorder(self._tick)

    def _tick(self) -> int:
        self.now += 1000
        return self.now

    def begin(self, function: str, **request: Any) -> int:
        process = self.recorder.new_process()
        self.recorder.invoke(process, function, **request)
        return process

    def send(
        self, values: list[int], offset: int | None, *, acks: int = -1, kind: str = "ok", idem: bool = False
    ) -> None:
        process = self.begin("send", k="t/0", v=values, acks=acks, idem=idem)
        self.end_send(process, offset, kind)

    def end_send(self, process: int, offset: int | None, kind: str = "ok") -> None:
        reply = {"o": offset, "ts": 1, "dup": False} if kind == "ok" else {"err": "X"}
        self.recorder.add(process, kind, "send", reply)

    def poll(
        self, offset: int, batches: list[list[Any]], *, hwm: int, lo: int = 0, node: int = 1, final: bool = False
    ) -> None:
        request = {"k": "t/0", "o": offset, "n": node} | ({"final": True} if final else {})
        self.recorder.ok(self.begin("poll", **request), "poll", b=batches, lo=lo, hwm=hwm)

    def final(self, batches: list[list[Any]], *, hwm: int, lo: int = 0, nodes: tuple[int, ...] = (1, 2, 3)) -> None:
        for node in nodes:
            self.poll(lo, batches, hwm=hwm, lo=lo, node=node, final=True)

    def consume(self, at: int, *read: tuple[int, int], hwm: int) -> None:
        self.recorder.ok(self.begin("kpoll", c="c", k="t/0", o=at), "kpoll", r=[["t/0", *r] for r in read], hwm=hwm)

    def range(self, hwm: int, *, lo: int = 0, next_: int | None = None) -> None:
        process = self.begin("hwm", k="t/0", n=1)
        self.recorder.ok(process, "hwm", lo=lo, hwm=hwm, next=hwm if next_ is None else next_, epoch=0)

    def commit(self, tag: str, offset: int, kind: str = "ok") -> None:
        self.recorder.add(self.begin("commit", g="g", k="t/0", o=offset, tag=tag), kind, "commit", {})

    def fetch(self, tag: str, offset: int) -> None:
        self.recorder.ok(self.begin("fetch", g="g", k="t/0", n=1), "fetch", o=offset, tag=tag)

    def note(self, function: str, **fields: Any) -> None:
        self.recorder.note(function, **fields)


def batch(base: int, values: list[int], *, ts: int | None = None, producer: int = -1, sequence: int = -1) -> list[Any]:
    return [base, 1000 + base if ts is None else ts, values, producer, sequence, 0]


def anomalies(tell: Callable[[Story], None]) -> set[str]:
    story = Story()
    tell(story)
    return {violation.anomaly for violation in judge(story.recorder.events)}


LOG = [batch(0, [10, 11]), batch(2, [12])]


def sound(s: Story) -> None:
    s.send([10, 11], 0)
    s.poll(0, [LOG[0]], hwm=2)
    s.range(2, next_=3)
    s.send([12], 2)
    s.send([99], None, kind="fail")
    s.send([98], None, kind="info")
    s.range(3)
    s.commit("a", 1)
    s.fetch("a", 1)
    s.commit("b", 0)
    s.fetch("b", 0)
    s.note("lead", n=1, term=1)
    s.note("lead", n=2, term=2)
    s.note("digest", n=1, i=40, d="x")
    s.note("digest", n=2, i=40, d="x")
    s.note("settled", ok=True, why="", took_ms=1.0)
    s.final(LOG, hwm=3)


def test_sound_history_passes_every_judge() -> None:
    assert anomalies(sound) == set()


def lost_beyond_the_end(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.final(LOG[:1], hwm=2)


def lost_in_the_middle(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.final([LOG[0], batch(2, [77])], hwm=3)


def lost_on_one_replica(s: Story) -> None:
    s.send([10, 11], 0)
    s.final(LOG[:1], hwm=2, nodes=(1, 2))
    s.final([], hwm=0, nodes=(3,))


def damaged(s: Story, node: int, offset: int) -> None:
    process = s.begin("poll", k="t/0", o=offset, n=node, final=True)
    s.recorder.fail(process, "poll", err="DATA_DAMAGED", lo=None, hi=None)


def one_replica_that_reports_damage(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.final(LOG, hwm=3, nodes=(1, 2))
    s.poll(0, LOG[:1], hwm=3, node=3, final=True)
    damaged(s, 3, 2)


def every_replica_damaged(s: Story) -> None:
    s.send([10, 11], 0)
    for node in (1, 2, 3):
        s.poll(0, [], hwm=2, node=node, final=True)
        damaged(s, node, 0)


def one_replica_of_which_nothing_can_be_read(s: Story) -> None:
    s.send([10, 11], 0)
    s.final(LOG[:1], hwm=2, nodes=(1, 2))
    damaged(s, 3, 0)


def no_replica_can_be_read(s: Story) -> None:
    s.send([10, 11], 0)
    for node in (1, 2, 3):
        damaged(s, node, 0)


def aborted(s: Story) -> None:
    s.send([10, 11], None, kind="fail")
    s.final(LOG[:1], hwm=2)


def two_values_at_one_offset(s: Story) -> None:
    s.poll(0, LOG[:1], hwm=2, node=1)
    s.poll(0, [batch(0, [10, 66])], hwm=2, node=2)


def acknowledged_elsewhere(s: Story) -> None:
    s.send([12], 7)
    s.poll(0, LOG, hwm=3)


def divergent(s: Story) -> None:
    s.final(LOG, hwm=3, nodes=(1, 2))
    s.final([LOG[0], batch(2, [66])], hwm=3, nodes=(3,))


def hole_in_a_replica(s: Story) -> None:
    s.final(LOG, hwm=3, nodes=(1, 2))
    s.final(LOG[1:], hwm=3, nodes=(3,))


def reused(s: Story) -> None:
    s.send([12], 2)
    s.send([13], 2)


def acknowledged_where_another_was_read(s: Story) -> None:
    s.send([13], 2)
    s.poll(0, LOG, hwm=3)


def value_twice(s: Story) -> None:
    s.poll(0, [*LOG, batch(3, [12])], hwm=4)


def idempotent_value_twice(s: Story) -> None:
    s.send([12], 2, idem=True)
    s.poll(0, [*LOG, batch(3, [12])], hwm=4)


def sequence_again(s: Story) -> None:
    s.final([batch(0, [1], producer=5, sequence=0), batch(1, [2], producer=5, sequence=0)], hwm=2)


def sequence_missing(s: Story) -> None:
    s.final([batch(0, [1], producer=5, sequence=0), batch(1, [2], producer=5, sequence=3)], hwm=2)


def skipped_at_the_start(s: Story) -> None:
    s.poll(0, LOG[1:], hwm=3)


def skipped_inside(s: Story) -> None:
    s.poll(0, [LOG[0], batch(3, [13])], hwm=4)


def read_backwards(s: Story) -> None:
    s.poll(2, [LOG[1], LOG[0]], hwm=3)


def read_below_the_requested_offset(s: Story) -> None:
    s.poll(2, [LOG[0]], hwm=3)


def read_above(s: Story) -> None:
    s.poll(0, LOG, hwm=2)


def read_uncommitted(s: Story) -> None:
    s.poll(0, LOG, hwm=3)
    s.final([LOG[0], batch(2, [44])], hwm=3)


def time_backwards(s: Story) -> None:
    s.poll(0, [LOG[0], batch(2, [12], ts=5)], hwm=3)


def times_differ(s: Story) -> None:
    s.poll(0, LOG[:1], hwm=2, node=1)
    s.poll(0, [batch(0, [10, 11], ts=1)], hwm=2, node=2)


def refused_although_there(s: Story) -> None:
    s.send([10, 11], 0)
    process = s.begin("poll", k="t/0", o=1, n=2)
    s.recorder.fail(process, "poll", err="OFFSET_OUT_OF_RANGE", lo=0, hi=0)


def damaged_although_intact(s: Story) -> None:
    s.send([10, 11], 0)
    process = s.begin("poll", k="t/0", o=1, n=2)
    s.recorder.fail(process, "poll", err="DATA_DAMAGED", lo=None, hi=None)


def damage_on_a_sound_disk(s: Story) -> None:
    s.recorder.note("false-damage", n=1, found=2)


def sends_backwards(s: Story) -> None:
    s.send([12], 2)
    s.send([10, 11], 0)


def stale_range(s: Story) -> None:
    s.send([10, 11], 0)
    s.range(1)


def range_backwards(s: Story) -> None:
    s.range(3)
    s.range(2)


def range_in_disorder(s: Story) -> None:
    s.range(3, next_=2)


def range_of_the_future(s: Story) -> None:
    s.range(3)
    s.send([10, 11], 0)
    s.send([12], 2)
    s.final(LOG, hwm=3)


def poll_of_the_future(s: Story) -> None:
    s.poll(0, [], hwm=2)
    s.send([10, 11], 0)


def mark_above_what_is_sent_later_and_never_acknowledged(s: Story) -> None:
    s.send([12], None, kind="info")
    s.range(3)
    s.send([10, 11], None, kind="info")
    s.final(LOG, hwm=3)


def range_below_the_earlier_of_two_answers(s: Story) -> None:
    slow = s.begin("poll", k="t/0", o=3, n=1)
    s.poll(2, [], hwm=2)
    s.range(1)
    s.recorder.ok(slow, "poll", b=[], lo=0, hwm=3)


def wrong_time(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.recorder.ok(s.begin("time", k="t/0", ts=900, n=1), "time", o=2, ts_found=1002)
    s.final(LOG, hwm=3)


def time_missed(s: Story) -> None:
    s.send([10, 11], 0)
    s.recorder.ok(s.begin("time", k="t/0", ts=900, n=1), "time", o=0, ts_found=-1)
    s.final(LOG[:1], hwm=2)


def stale_fetch(s: Story) -> None:
    s.commit("a", 1)
    s.commit("b", 2)
    s.fetch("a", 1)


def setting_is_stale(s: Story) -> None:
    for value in ("1", "2"):
        s.recorder.ok(s.begin("set", name="num.partitions", v=value), "set")
    s.recorder.ok(s.begin("setting", name="num.partitions", n=1), "setting", seen="1")


def setting_is_lost(s: Story) -> None:
    s.recorder.ok(s.begin("set", name="num.partitions", v="1"), "set")
    s.recorder.ok(s.begin("setting", name="num.partitions", n=1), "setting", seen="")


def setting_of_a_refused_change(s: Story) -> None:
    s.recorder.fail(s.begin("set", name="num.partitions", v="1"), "set", err="X")
    s.recorder.ok(s.begin("setting", name="num.partitions", n=1), "setting", seen="1")


def replicas_in_another_order(s: Story) -> None:
    s.recorder.ok(s.begin("place", name="p", r=[[2, 1]]), "place")
    s.recorder.ok(s.begin("placed", name="p", n=1), "placed", seen=[[1, 2]])


def new_partition_elsewhere(s: Story) -> None:
    s.recorder.ok(s.begin("place", name="p", r=[[2, 1]]), "place")
    s.recorder.ok(s.begin("place", name="p", r=[[3, 1]]), "place")
    s.recorder.ok(s.begin("placed", name="p", n=1), "placed", seen=[[2, 1], [1, 2]])


def address_of_an_earlier_process(s: Story) -> None:
    s.recorder.note("advertise", n=1, address="a:1")
    s.recorder.note("advertise", n=1, address="b:1")
    s.recorder.note("told", n=2, of=1, seen=["a:1"])


def fetch_flickers(s: Story) -> None:
    process = s.begin("commit", g="g", k="t/0", o=5, tag="c")
    s.commit("a", 1)
    s.fetch("c", 5)
    s.fetch("a", 1)
    s.fetch("c", 5)
    s.recorder.ok(process, "commit")


def fetch_of_nothing_after_commit(s: Story) -> None:
    s.commit("a", 1)
    s.fetch("", -1)


def fetch_of_a_failed_commit(s: Story) -> None:
    s.commit("a", 1, kind="fail")
    s.fetch("a", 1)


def fetch_of_another_offset_than_committed(s: Story) -> None:
    s.commit("a", 1)
    s.fetch("a", 2)


def fetch_before_the_commit(s: Story) -> None:
    s.fetch("a", 1)
    s.commit("a", 1)


def consumer_is_given_another_value(s: Story) -> None:
    s.recorder.ok(s.begin("kpoll", c="c"), "kpoll", r=[["t/0", 2, 77]])
    s.final(LOG, hwm=3)


def two_leaders(s: Story) -> None:
    s.note("lead", n=1, term=3)
    s.note("lead", n=2, term=3)


def digests_differ(s: Story) -> None:
    s.note("digest", n=1, i=40, d="x")
    s.note("digest", n=2, i=40, d="y")


def entries_differ(s: Story) -> None:
    s.note("entry", n=1, i=40, d=1)
    s.note("entry", n=2, i=40, d=2)


def mark_falls(s: Story) -> None:
    s.note("local", n=1, inc=1, i=7, k="t/0", hwm=5, lo=0, epoch=1)
    s.note("local", n=2, inc=1, i=9, k="t/0", hwm=4, lo=0, epoch=1)


def marks_differ(s: Story) -> None:
    s.note("local", n=1, inc=1, i=7, k="t/0", hwm=5, lo=0, epoch=1)
    s.note("local", n=2, inc=1, i=7, k="t/0", hwm=4, lo=0, epoch=1)


def stuck(s: Story) -> None:
    s.note("settled", ok=False, why="t/0 has no leader", took_ms=40_000)


def fails_after_the_heal(s: Story) -> None:
    s.note("settled", ok=True, why="", took_ms=5)
    s.send([1], None, kind="info")


def probe_fails(s: Story) -> None:
    s.note("settled", ok=True, why="", took_ms=5)
    s.send([1], None, kind="info")
    s.note("settled", ok=True, why="after the probes", took_ms=5)


def later_batch_is_stored_first(s: Story) -> None:
    s.recorder.note("overtaken", err="OUT_OF_ORDER_SEQUENCE")


def queue_grows(s: Story) -> None:
    s.recorder.note("queue", n=1, size=11, bound=10)


def died(s: Story) -> None:
    s.note("died", n=1, err="AssertionError")


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (lost_beyond_the_end, "lost-write"),
        (lost_in_the_middle, "lost-write"),
        (lost_on_one_replica, "lost-write"),
        (every_replica_damaged, "lost-write"),
        (one_replica_of_which_nothing_can_be_read, "lost-write"),
        (no_replica_can_be_read, "lost-write"),
        (one_replica_that_reports_damage, "lost-write"),  # rot is repaired: by the end no replica says so
        (aborted, "aborted-read"),
        (two_values_at_one_offset, "inconsistent-offsets"),
        (acknowledged_elsewhere, "inconsistent-offsets"),
        (divergent, "divergent-replica"),
        (hole_in_a_replica, "divergent-replica"),
        (reused, "offset-reuse"),
        (acknowledged_where_another_was_read, "offset-reuse"),
        (value_twice, "duplicate"),
        (idempotent_value_twice, "duplicate-sequence"),
        (sequence_again, "duplicate-sequence"),
        (sequence_missing, "sequence-gap"),
        (skipped_at_the_start, "poll-skip"),
        (skipped_inside, "poll-skip"),
        (read_backwards, "nonmonotonic-poll"),
        (read_below_the_requested_offset, "nonmonotonic-poll"),
        (read_above, "read-above-hwm"),
        (read_uncommitted, "precommitted-read"),
        (time_backwards, "nonmonotonic-ts"),
        (times_differ, "inconsistent-ts"),
        (refused_although_there, "false-out-of-range"),
        (damaged_although_intact, "false-damage"),
        (damage_on_a_sound_disk, "false-damage"),
        (sends_backwards, "nonmonotonic-send"),
        (stale_range, "stale-hwm"),
        (range_backwards, "stale-hwm"),
        (range_in_disorder, "stale-hwm"),
        (range_of_the_future, "stale-hwm"),
        (poll_of_the_future, "stale-hwm"),
        (mark_above_what_is_sent_later_and_never_acknowledged, "stale-hwm"),
        (range_below_the_earlier_of_two_answers, "stale-hwm"),
        (wrong_time, "wrong-time-offset"),
        (time_missed, "wrong-time-offset"),
        (setting_is_stale, "stale-setting"),
        (setting_is_lost, "stale-setting"),
        (setting_of_a_refused_change, "stale-setting"),
        (replicas_in_another_order, "wrong-replicas"),
        (new_partition_elsewhere, "wrong-replicas"),
        (address_of_an_earlier_process, "wrong-address"),
        (stale_fetch, "stale-commit"),
        (fetch_flickers, "stale-commit"),
        (fetch_of_nothing_after_commit, "stale-commit"),
        (fetch_of_a_failed_commit, "stale-commit"),
        (fetch_of_another_offset_than_committed, "stale-commit"),
        (fetch_before_the_commit, "stale-commit"),
        (consumer_is_given_another_value, "inconsistent-offsets"),
        (two_leaders, "two-leaders-in-term"),
        (digests_differ, "digest-mismatch"),
        (entries_differ, "log-mismatch"),
        (mark_falls, "hwm-regression"),
        (marks_differ, "digest-mismatch"),
        (stuck, "no-progress"),
        (fails_after_the_heal, "no-progress"),
        (probe_fails, "no-progress"),
        (died, "process-died"),
        (queue_grows, "queue-over-bound"),
        (later_batch_is_stored_first, "overtaken"),
    ],
)
def test_anomaly_is_found(tell: Callable[[Story], None], anomaly: str) -> None:
    assert anomaly in anomalies(tell)


def overlapping_commits_in_either_order(s: Story) -> None:
    first = s.begin("commit", g="g", k="t/0", o=1, tag="a")
    s.commit("b", 2)
    s.fetch("b", 2)
    s.fetch("a", 1)
    s.recorder.ok(first, "commit")


def leader_ack_that_was_lost(s: Story) -> None:
    s.send([12], 2, acks=1)
    s.send([13], 2)
    s.final([*LOG[:1], batch(2, [13])], hwm=3)


def mark_reported_while_the_send_below_it_is_on_its_way(s: Story) -> None:
    process = s.begin("send", k="t/0", v=[10, 11], acks=-1)
    s.range(2)
    s.end_send(process, 0)


def mark_reported_while_an_unknown_send_is_on_its_way(s: Story) -> None:
    process = s.begin("send", k="t/0", v=[10, 11], acks=-1)
    s.poll(0, [LOG[0]], hwm=2)
    s.end_send(process, None, "info")
    s.final(LOG[:1], hwm=2)


def trimmed_prefix(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.poll(0, LOG, hwm=3)
    s.recorder.ok(s.begin("trim", k="t/0", o=2), "trim")
    s.recorder.fail(s.begin("poll", k="t/0", o=0, n=1), "poll", err="OFFSET_OUT_OF_RANGE", lo=2, hi=3)
    s.final(LOG[1:], hwm=3, lo=2)


def changes_seen_while_they_are_under_way(s: Story) -> None:
    setting = s.begin("set", name="num.partitions", v="1")
    placing = s.begin("place", name="p", r=[[2, 1]])
    for value, replicas in (("", []), ("1", [[2, 1]])):
        s.recorder.ok(s.begin("setting", name="num.partitions", n=1), "setting", seen=value)
        s.recorder.ok(s.begin("placed", name="p", n=1), "placed", seen=replicas)
    s.recorder.ok(setting, "set")
    s.recorder.info(placing, "place")


@pytest.mark.parametrize(
    "tell",
    [
        changes_seen_while_they_are_under_way,
        overlapping_commits_in_either_order,
        leader_ack_that_was_lost,
        mark_reported_while_the_send_below_it_is_on_its_way,
        mark_reported_while_an_unknown_send_is_on_its_way,
        trimmed_prefix,
    ],
)
def test_what_is_allowed_is_not_reported(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()


def test_witness_is_the_poll_that_showed_it_first() -> None:
    story = Story()
    story.send([10, 11], None, kind="fail")
    story.poll(0, LOG[:1], hwm=2, node=2)
    story.poll(0, LOG[:1], hwm=2, node=3)  # the same object, as a simulation may pass it on
    (found,) = (violation for violation in judge(story.recorder.events) if violation.anomaly == "aborted-read")
    assert "'n': 2" in found.witness[1]


def test_final_log_is_the_first_replicas_if_they_differ() -> None:
    story = Story()
    story.final([batch(0, [10, 11])], hwm=2, nodes=(1,))
    story.final([batch(0, [10]), batch(1, [21, 22])], hwm=3, nodes=(2,))
    log = index(pair(story.recorder.events)).partitions["t/0"].final_log()
    assert log == {0: 10, 1: 11, 2: 22}


def test_process_that_continues_after_an_unknown_outcome_is_refused() -> None:
    story = Story()
    process = story.begin("send", k="t/0", v=[1], acks=-1)
    story.recorder.info(process, "send")
    story.recorder.invoke(process, "send", k="t/0", v=[2], acks=-1)
    with pytest.raises(HistoryError, match="busy or retired"):
        pair(story.recorder.events)


def test_completion_without_invocation_is_refused() -> None:
    events: list[Event] = [{"t": 1, "p": 1, "ty": "ok", "f": "send"}]
    with pytest.raises(HistoryError, match="never invoked"):
        pair(events)
