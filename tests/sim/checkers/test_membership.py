"""Anomalies of groups with members: a hand-made history without it passes, the same with it is found, by its name."""

from typing import Self

from chaos_tests.checkers.membership import SESSION_MS
from tests.sim.checkers.support import Story


class Group(Story):
    """Its members' requests, each a microsecond long."""

    def join(self, member: str, generation: int, leader: str, *members: str) -> Self:
        reply = {"m": member, "gen": generation, "leader": leader, "members": list(members)}
        return self.op("gjoin", {"g": "g", "m": member}, "ok", **reply)

    def sync(self, member: str, generation: int, *parts: str) -> Self:
        return self.op("gsync", {"g": "g", "m": member, "gen": generation}, "ok", who=member, parts=list(parts))

    def beat(self, member: str, code: str) -> Self:
        return self.op("gbeat", {"g": "g", "m": member, "gen": 1}, "ok", code=code)

    def commit_in(self, member: str, generation: int) -> Self:
        request = {"g": "g", "m": member, "gen": generation, "k": "t/0", "o": 1, "tag": f"{self.now}"}
        return self.op("commit", request)


def healthy() -> Group:
    group = Group().join("a", 1, "a", "a", "b").join("b", 1, "a")
    return group.sync("a", 1, "t/0").sync("b", 1, "t/1").beat("a", "NONE").commit_in("a", 1)


def test_healthy_group_has_no_anomaly() -> None:
    group = healthy().join("a", 2, "a", "a").sync("a", 2, "t/0", "t/1").commit_in("a", 2)
    assert group.anomalies() == set()


def test_commit_of_an_earlier_generation_is_stale() -> None:
    assert healthy().join("b", 2, "b", "b").commit_in("a", 1).anomalies() == {"stale-generation"}


def test_generation_with_two_leaders_or_two_sets_of_members_is_split() -> None:
    assert healthy().join("c", 1, "c").anomalies() == {"split-generation"}
    assert healthy().join("a", 1, "a", "a", "c").anomalies() == {"split-generation"}


def test_partition_of_two_members_is_shared() -> None:
    assert healthy().sync("b", 1, "t/0").anomalies() == {"shared-partition"}


def test_member_that_is_unknown_within_its_session_was_evicted_alive() -> None:
    assert healthy().beat("a", "UNKNOWN_MEMBER_ID").anomalies() == {"evicted-alive"}
    late = healthy().wait(SESSION_MS)
    left = healthy().op("gleave", {"g": "g", "m": "a"}, "ok", code="NONE")
    rebalancing = healthy().beat("a", "REBALANCE_IN_PROGRESS")
    for group in (late, left, rebalancing):
        assert group.beat("a", "UNKNOWN_MEMBER_ID").anomalies() == set()


def test_member_that_is_alone_and_does_not_get_all_has_a_phantom_beside_it() -> None:
    assert healthy().note("galone", g="g", held=["t/0"], live=["t/0", "t/1"]).anomalies() == {"phantom-member"}
