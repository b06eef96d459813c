"""Anomalies of groups with members: a hand-made history without it passes, the same with it is found, by its name."""

from typing import Any

from chaos_tests.checkers.base import index
from chaos_tests.checkers.membership import SESSION_MS, check
from chaos_tests.history import Recorder, pair


class Story:
    """One group "g"; each call is one finished operation, a millisecond long."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.recorder = Recorder(self._tick)

    def _tick(self) -> int:
        self.now_ms += 1
        return self.now_ms * 1_000_000

    def op(self, function: str, request: dict[str, Any], kind: str = "ok", **reply: Any) -> "Story":
        process = self.recorder.new_process()
        self.recorder.invoke(process, function, g="g", **request)
        self.recorder.add(process, kind, function, reply)
        return self

    def join(self, member: str, generation: int, leader: str, *members: str) -> "Story":
        return self.op("gjoin", {"m": member}, m=member, gen=generation, leader=leader, members=list(members))

    def sync(self, member: str, generation: int, *parts: str) -> "Story":
        return self.op("gsync", {"m": member, "gen": generation}, who=member, parts=list(parts))

    def beat(self, member: str, code: str) -> "Story":
        return self.op("gbeat", {"m": member, "gen": 1}, code=code)

    def commit(self, member: str, generation: int) -> "Story":
        return self.op("commit", {"m": member, "gen": generation, "k": "t/0", "o": 1, "tag": f"{self.now_ms}"})

    @property
    def anomalies(self) -> set[str]:
        return {violation.anomaly for violation in check(index(pair(self.recorder.events)))}


def healthy() -> Story:
    story = Story().join("a", 1, "a", "a", "b").join("b", 1, "a")
    return story.sync("a", 1, "t/0").sync("b", 1, "t/1").beat("a", "NONE").commit("a", 1)


def test_healthy_group_has_no_anomaly() -> None:
    assert healthy().join("a", 2, "a", "a").sync("a", 2, "t/0", "t/1").commit("a", 2).anomalies == set()


def test_commit_of_an_earlier_generation_is_stale() -> None:
    assert healthy().join("b", 2, "b", "b").commit("a", 1).anomalies == {"stale-generation"}


def test_generation_with_two_leaders_or_two_sets_of_members_is_split() -> None:
    assert healthy().join("c", 1, "c").anomalies == {"split-generation"}
    assert healthy().join("a", 1, "a", "a", "c").anomalies == {"split-generation"}


def test_partition_of_two_members_is_shared() -> None:
    assert healthy().sync("b", 1, "t/0").anomalies == {"shared-partition"}


def test_member_that_is_unknown_within_its_session_was_evicted_alive() -> None:
    assert healthy().beat("a", "UNKNOWN_MEMBER_ID").anomalies == {"evicted-alive"}
    late = healthy()
    late.now_ms += SESSION_MS
    assert late.beat("a", "UNKNOWN_MEMBER_ID").anomalies == set()
    left = healthy().op("gleave", {"m": "a"}, code="NONE")
    assert left.beat("a", "UNKNOWN_MEMBER_ID").anomalies == set()
    reply = healthy().beat("a", "REBALANCE_IN_PROGRESS")
    assert reply.beat("a", "UNKNOWN_MEMBER_ID").anomalies == set()


def test_member_that_is_alone_and_does_not_get_all_has_a_phantom_beside_it() -> None:
    story = healthy()
    story.recorder.note("galone", g="g", held=["t/0"], live=["t/0", "t/1"])
    assert story.anomalies == {"phantom-member"}
