"""Anomalies of consumer groups: a hand-made history without it passes, the same with it is found, by its name."""

from typing import Any, Self

import pytest

from chaos_tests.checkers.ownership import OWNERLESS_NS
from tests.sim.checkers.support import Story

OWNERLESS_MS = OWNERLESS_NS / 1e6
HAS: dict[str, tuple[int, list[str], list[str]]] = {"a": (2, ["t/0"], []), "b": (2, ["t/1"], [])}


class Group(Story):
    def state(self, **members: tuple[int, list[str], list[str]]) -> Self:
        return self.note("consumers", g="g", members=HAS | members, wanted=["t/0", "t/1"])

    def beat(self, member: str, *parts: str, had: tuple[str, ...] = (), epoch: int = 2, code: str = "NONE") -> Self:
        request = {"g": "g", "w": member, "i": "", "epoch": epoch, "owned": list(had)}
        return self.op("cbeat", request, "ok", code=code, w=member, epoch=epoch, parts=list(parts))

    def commit_in(self, member: str, epoch: int) -> Self:
        request: dict[str, Any] = {"g": "g", "w": member, "epoch": epoch, "k": "t/0", "o": 1, "tag": f"{self.now}"}
        return self.op("commit", request)


def healthy() -> Group:
    group = Group().note("heal").state(a=(1, ["t/0", "t/1"], []), b=(0, [], []))
    group.beat("a", "t/0", "t/1", epoch=1).state(a=(1, ["t/0"], ["t/1"]), b=(2, [], []))
    group.beat("a", "t/0", had=("t/0", "t/1"), epoch=1).beat("b")
    group.state(b=(2, [], [])).beat("a", "t/0", had=("t/0",)).state().beat("b", "t/1")
    return group.commit_in("a", 2)


ANOMALIES = [
    ("none", healthy(), None),
    ("two hold it", healthy().state(b=(2, [], ["t/0"])), "shared-partition"),
    ("two in one epoch", healthy().state(a=(3, ["t/0"], []), b=(2, ["t/0"], [])).beat("b", "t/0"), "shared-partition"),
    (
        "another still has it",
        healthy().state(a=(2, [], []), b=(3, ["t/0"], [])).beat("b", "t/0", epoch=3).beat("a", had=("t/0",)),
        "shared-partition",
    ),
    ("not what it has", healthy().beat("a"), "wrong-assignment"),
    ("what it had", healthy().state(a=(3, ["t/0"], [])).wait(4_000).beat("a", "t/0"), "wrong-assignment"),
    ("no owner", healthy().state(a=(2, [], [])).wait(OWNERLESS_MS + 1).state(a=(2, [], [])), "ownerless"),
    ("soon an owner", healthy().state(a=(2, [], [])).wait(OWNERLESS_MS / 2).state().wait(OWNERLESS_MS), None),
    ("late commit", healthy().commit_in("a", 1), "stale-generation"),
    ("removed", healthy().beat("a", had=("t/0",), code="UNKNOWN_MEMBER_ID"), "evicted-alive"),
    ("slow", healthy().wait(5_000).beat("a", had=("t/0",), code="UNKNOWN_MEMBER_ID"), None),
]


@pytest.mark.parametrize(("group", "anomaly"), [row[1:] for row in ANOMALIES], ids=[row[0] for row in ANOMALIES])
def test_each_anomaly_of_a_consumer_group_is_found(group: Group, anomaly: str | None) -> None:
    assert anomaly in group.anomalies() if anomaly else group.anomalies() == set()
