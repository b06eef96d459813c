"""Each anomaly: a hand-made history without it passes, the same history with it is found, by its name."""

import pytest

from chaos_tests.checkers.base import index
from chaos_tests.checkers.judge import judge
from chaos_tests.history import Event, HistoryError, pair
from tests.sim.checkers.support import LOG, Story, anomaly_of, batch

SETTING = {"name": "num.partitions", "n": 1}


def sound() -> Story:
    story = Story().send([10, 11], 0).poll(0, [LOG[0]], hwm=2).range(2, next_=3).send([12], 2)
    story.send([99], None, kind="fail").send([98], None, kind="info").range(3)
    story.commit("a", 1).fetch("a", 1).commit("b", 0).fetch("b", 0)
    story.note("lead", n=1, term=1).note("lead", n=2, term=2)
    story.note("digest", n=1, i=40, d="x").note("digest", n=2, i=40, d="x")
    story.op("mirror", MIRRORED).op("own", OWN, o=7).op("copy", COPY, b=[[5, 7, 5], [7, 8, 9]], hwm=8)
    return story.note("settled", ok=True, why="", took_ms=1.0).final(LOG, hwm=3)


def changed(value: str, kind: str = "ok") -> Story:
    """A setting of the cluster."""
    return Story().op("set", {"name": "num.partitions", "v": value}, kind)


def placed(*replicas: list[int]) -> Story:
    """A partition of the topic with each of these."""
    story = Story()
    for nodes in replicas:
        story.op("place", {"name": "p", "r": [nodes]})
    return story


MIRRORED = {"k": "m/0", "o": 5, "e": 7, "d": 5, "wrong": False}
COPY = {"k": "m/0", "n": 2}
OWN = {"k": "m/0", "d": 9}


def mirrored() -> Story:
    """A batch of another cluster, and a copy with it."""
    return Story().op("mirror", MIRRORED).op("copy", {"k": "m/0", "n": 1}, b=[[5, 7, 5]], hwm=7)


def settled() -> Story:
    return Story().note("settled", ok=True, why="", took_ms=5)


def test_sound_history_passes_every_judge() -> None:
    assert sound().anomalies() == set()


FOUND = {
    "lost-write: beyond the end": Story().send_log().final(LOG[:1], hwm=2),
    "lost-write: in the middle": Story().send_log().final([LOG[0], batch(2, [77])], hwm=3),
    "lost-write: on one replica": Story()
    .send([10, 11], 0)
    .final(LOG[:1], hwm=2, nodes=(1, 2))
    .final([], hwm=0, nodes=(3,)),
    "lost-write: every replica is damaged": Story().send([10, 11], 0).final([], hwm=2).damaged(0, 1, 2, 3),
    "lost-write: nothing can be read of one replica": Story()
    .send([10, 11], 0)
    .final(LOG[:1], hwm=2, nodes=(1, 2))
    .damaged(0, 3),
    "lost-write: no replica can be read": Story().send([10, 11], 0).damaged(0, 1, 2, 3),
    # Rot is repaired: by the end no replica says that it is damaged.
    "lost-write: one replica reports damage": Story()
    .send_log()
    .final(LOG, hwm=3, nodes=(1, 2))
    .poll(0, LOG[:1], hwm=3, node=3, final=True)
    .damaged(2, 3),
    "aborted-read: a refused record": Story().send([10, 11], None, kind="fail").final(LOG[:1], hwm=2),
    "inconsistent-offsets: two values": Story().poll(0, LOG[:1], hwm=2).poll(0, [batch(0, [10, 66])], hwm=2, node=2),
    "inconsistent-offsets: acknowledged elsewhere": Story().send([12], 7).poll(0, LOG, hwm=3),
    "divergent-replica: another value": Story()
    .final(LOG, hwm=3, nodes=(1, 2))
    .final([LOG[0], batch(2, [66])], hwm=3, nodes=(3,)),
    "divergent-replica: a hole": Story().final(LOG, hwm=3, nodes=(1, 2)).final(LOG[1:], hwm=3, nodes=(3,)),
    "offset-reuse: two acknowledgements": Story().send([12], 2).send([13], 2),
    "offset-reuse: another was read there": Story().send([13], 2).poll(0, LOG, hwm=3),
    "duplicate: of a value": Story().poll(0, [*LOG, batch(3, [12])], hwm=4),
    "duplicate-sequence: an idempotent value": Story().send([12], 2, idem=True).poll(0, [*LOG, batch(3, [12])], hwm=4),
    "duplicate-sequence: in two batches": Story().final(
        [batch(0, [1], producer=5, sequence=0), batch(1, [2], producer=5, sequence=0)], hwm=2
    ),
    "sequence-gap: one is missing": Story().final(
        [batch(0, [1], producer=5, sequence=0), batch(1, [2], producer=5, sequence=3)], hwm=2
    ),
    "poll-skip: at the start": Story().poll(0, LOG[1:], hwm=3),
    "poll-skip: inside": Story().poll(0, [LOG[0], batch(3, [13])], hwm=4),
    "nonmonotonic-poll: backwards": Story().poll(2, [LOG[1], LOG[0]], hwm=3),
    "nonmonotonic-poll: below the requested offset": Story().poll(2, [LOG[0]], hwm=3),
    "read-above-hwm: by a poll": Story().poll(0, LOG, hwm=2),
    "precommitted-read: another one was committed": Story().poll(0, LOG, hwm=3).final([LOG[0], batch(2, [44])], hwm=3),
    "nonmonotonic-ts: backwards": Story().poll(0, [LOG[0], batch(2, [12], ts=5)], hwm=3),
    "inconsistent-ts: at two nodes": Story().poll(0, LOG[:1], hwm=2).poll(0, [batch(0, [10, 11], ts=1)], hwm=2, node=2),
    "false-out-of-range: it is there": Story().send([10, 11], 0).refuse(1, "OFFSET_OUT_OF_RANGE", lo=0, hi=0, node=2),
    "false-damage: it is intact": Story().send([10, 11], 0).refuse(1, "DATA_DAMAGED", node=2),
    "false-damage: on a sound disk": Story().note("false-damage", n=1, found=2),
    "nonmonotonic-send: backwards": Story().send([12], 2).send([10, 11], 0),
    "stale-hwm: below an acknowledgement": Story().send([10, 11], 0).range(1),
    "stale-hwm: backwards": Story().range(3).range(2),
    "stale-hwm: in disorder": Story().range(3, next_=2),
    "stale-hwm: a range of the future": Story().range(3).send_log().final(LOG, hwm=3),
    "stale-hwm: a poll of the future": Story().poll(0, [], hwm=2).send([10, 11], 0),
    "stale-hwm: above what is sent later and never acknowledged": Story()
    .send([12], None, kind="info")
    .range(3)
    .send([10, 11], None, kind="info")
    .final(LOG, hwm=3),
    "stale-hwm: below the earlier of two answers": Story()
    .begin("slow", "poll", k="t/0", o=3, n=1)
    .poll(2, [], hwm=2)
    .range(1)
    .end("slow", b=[], lo=0, hwm=3),
    "wrong-time-offset: a later one": Story()
    .send_log()
    .op("time", {"k": "t/0", "ts": 900, "n": 1}, o=2, ts_found=1002)
    .final(LOG, hwm=3),
    "wrong-time-offset: missed": Story()
    .send([10, 11], 0)
    .op("time", {"k": "t/0", "ts": 900, "n": 1}, o=0, ts_found=-1)
    .final(LOG[:1], hwm=2),
    "stale-setting: the one before": changed("1")
    .op("set", {"name": "num.partitions", "v": "2"})
    .op("setting", SETTING, seen="1"),
    "stale-setting: lost": changed("1").op("setting", SETTING, seen=""),
    "stale-setting: of a refused change": changed("1", "fail").op("setting", SETTING, seen="1"),
    "wrong-replicas: in another order": placed([2, 1]).op("placed", {"name": "p", "n": 1}, seen=[[1, 2]]),
    "wrong-replicas: a new partition elsewhere": placed([2, 1], [3, 1]).op(
        "placed", {"name": "p", "n": 1}, seen=[[2, 1], [1, 2]]
    ),
    "wrong-address: of an earlier process": Story()
    .note("advertise", n=1, address="a:1")
    .note("advertise", n=1, address="b:1")
    .note("told", n=2, of=1, seen=["a:1"]),
    "mirror-differs: other bytes were acknowledged": mirrored().op("mirror", {**MIRRORED, "d": 6, "wrong": True}),
    "mirror-differs: at another offset": mirrored().op("copy", COPY, b=[[6, 8, 5]], hwm=8),
    "mirror-differs: a hole": mirrored()
    .op("mirror", {**MIRRORED, "o": 9, "e": 10})
    .op("copy", COPY, b=[[5, 7, 5], [9, 10, 5]], hwm=10),
    "mirror-differs: after a producer's": Story()
    .op("mirror", {**MIRRORED, "o": 6})
    .op("own", OWN, o=5)
    .op("copy", COPY, b=[[5, 6, 9], [6, 7, 5]], hwm=7),
    "mirror-differs: a producer's twice": Story().op("own", OWN, o=5).op("copy", COPY, b=[[5, 6, 9], [6, 7, 9]], hwm=7),
    "mirror-lost: a producer's": mirrored().op("own", OWN, o=5).op("copy", COPY, b=[[5, 7, 5]], hwm=7),
    "mirror-lost: on one replica": mirrored().op("copy", COPY, b=[], hwm=5),
    "stale-commit: the one before": Story().commit("a", 1).commit("b", 2).fetch("a", 1),
    "stale-commit: one that flickers": Story()
    .begin("slow", "commit", g="g", k="t/0", o=5, tag="c")
    .commit("a", 1)
    .fetch("c", 5)
    .fetch("a", 1)
    .fetch("c", 5)
    .end("slow"),
    "stale-commit: nothing after one": Story().commit("a", 1).fetch("", -1),
    "stale-commit: a failed one": Story().commit("a", 1, kind="fail").fetch("a", 1),
    "stale-commit: another offset": Story().commit("a", 1).fetch("a", 2),
    "stale-commit: before it was made": Story().fetch("a", 1).commit("a", 1),
    "inconsistent-offsets: a consumer is given another value": Story()
    .op("kpoll", {"c": "c"}, r=[["t/0", 2, 77]])
    .final(LOG, hwm=3),
    "two-leaders-in-term: of Raft": Story().note("lead", n=1, term=3).note("lead", n=2, term=3),
    "digest-mismatch: of the state": Story().note("digest", n=1, i=40, d="x").note("digest", n=2, i=40, d="y"),
    "log-mismatch: of entries": Story().note("entry", n=1, i=40, d=1).note("entry", n=2, i=40, d=2),
    "hwm-regression: at another node": Story().local(i=7, hwm=5, epoch=1).local(n=2, i=9, hwm=4, epoch=1),
    "digest-mismatch: of marks": Story().local(i=7, hwm=5, epoch=1).local(n=2, i=7, hwm=4, epoch=1),
    "no-progress: it does not settle": Story().note("settled", ok=False, why="t/0 has no leader", took_ms=40_000),
    "no-progress: an operation fails after the heal": settled().send([1], None, kind="info"),
    "no-progress: a probe fails": settled().send([1], None, kind="info").note("settled", ok=True, why="", took_ms=5),
    "process-died: by itself": Story().note("died", n=1, err="AssertionError"),
    "queue-over-bound: of a disk": Story().note("queue", n=1, size=11, bound=10),
    "overtaken: a later batch is stored first": Story().note("overtaken", err="OUT_OF_ORDER_SEQUENCE"),
}


@pytest.mark.parametrize("name", FOUND)
def test_anomaly_is_found(name: str) -> None:
    assert anomaly_of(name) in FOUND[name].anomalies()


ALLOWED = {
    "changes that are seen while they are under way": Story()
    .begin("set", "set", name="num.partitions", v="1")
    .begin("place", "place", name="p", r=[[2, 1]])
    .op("setting", SETTING, seen="")
    .op("placed", {"name": "p", "n": 1}, seen=[])
    .op("setting", SETTING, seen="1")
    .op("placed", {"name": "p", "n": 1}, seen=[[2, 1]])
    .end("set")
    .end("place", "info"),
    "overlapping commits in either order": Story()
    .begin("first", "commit", g="g", k="t/0", o=1, tag="a")
    .commit("b", 2)
    .fetch("b", 2)
    .fetch("a", 1)
    .end("first"),
    "an acknowledgement of the leader alone that was lost": Story()
    .send([12], 2, acks=1)
    .send([13], 2)
    .final([*LOG[:1], batch(2, [13])], hwm=3),
    "a mark above a send that is on its way": Story()
    .begin("slow", "send", k="t/0", v=[10, 11], acks=-1)
    .range(2)
    .end("slow", o=0, ts=1, dup=False),
    "a mark above a send whose outcome is unknown": Story()
    .begin("slow", "send", k="t/0", v=[10, 11], acks=-1)
    .poll(0, [LOG[0]], hwm=2)
    .end("slow", "info", err="X")
    .final(LOG[:1], hwm=2),
    "a trimmed prefix": Story()
    .send_log()
    .poll(0, LOG, hwm=3)
    .trim(2)
    .refuse(0, "OFFSET_OUT_OF_RANGE", lo=2, hi=3)
    .final(LOG[1:], hwm=3, lo=2),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_not_reported(name: str) -> None:
    assert ALLOWED[name].anomalies() == set()


def test_witness_is_the_poll_that_showed_it_first() -> None:
    story = Story().send([10, 11], None, kind="fail")
    story.poll(0, LOG[:1], hwm=2, node=2).poll(
        0, LOG[:1], hwm=2, node=3
    )  # the same object, as a simulation may pass it on
    (found,) = (violation for violation in judge(story.recorder.events) if violation.anomaly == "aborted-read")
    assert "'n': 2" in found.witness[1]


def test_final_log_is_the_first_replicas_if_they_differ() -> None:
    story = Story().final([batch(0, [10, 11])], hwm=2, nodes=(1,))
    story.final([batch(0, [10]), batch(1, [21, 22])], hwm=3, nodes=(2,))
    log = index(pair(story.recorder.events)).partitions["t/0"].final_log()
    assert log == {0: 10, 1: 11, 2: 22}


def test_process_that_continues_after_an_unknown_outcome_is_refused() -> None:
    recorder = Story().recorder
    process = recorder.new_process()
    recorder.invoke(process, "send", k="t/0", v=[1], acks=-1)
    recorder.info(process, "send")
    recorder.invoke(process, "send", k="t/0", v=[2], acks=-1)
    with pytest.raises(HistoryError, match="busy or retired"):
        pair(recorder.events)


def test_completion_without_invocation_is_refused() -> None:
    events: list[Event] = [{"t": 1, "p": 1, "ty": "ok", "f": "send"}]
    with pytest.raises(HistoryError, match="never invoked"):
        pair(events)
