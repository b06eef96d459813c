"""The judge of transactions finds each anomaly in the shortest story of it, and accepts what may happen."""

from typing import Any, Self

import pytest

from tests.sim.checkers.support import Story, anomaly_of

Record = tuple[int, int]  # offset, value


class Transactions(Story):
    """Of the ledger's partitions l/0 and l/1."""

    def transact(self, values: list[int], kind: str = "ok", out: str = "commit", off: int | None = None) -> Self:
        """`values` alternate between the two partitions."""
        request = {"l/0": values[::2], "l/1": values[1::2]}
        reply = {"out": out} if kind == "ok" else {"err": "NOT_COMMITTED"}
        return self.op("txn", {"id": "tx", "v": {k: v for k, v in request.items() if v}, "off": off}, kind, **reply)

    def read(self, key: str, start: int, following: int, *records: Record, node: int = 1, final: bool = False) -> Self:
        reply: dict[str, Any] = {"r": [list(record) for record in records], "next": following, "lso": following}
        return self.op("tpoll", {"k": key, "o": start, "n": node, "final": final}, "ok", **reply)

    def unread(self, key: str, error: str, node: int = 1) -> Self:
        """By the final read."""
        return self.op("tpoll", {"k": key, "o": 0, "n": node, "final": True}, "fail", err=error)

    def read_all(self, first: list[Record], second: list[Record], *, off: int | None = None) -> Self:
        for node in (1, 2, 3):
            self.read("l/0", 0, 9, *first, node=node, final=True).read("l/1", 0, 9, *second, node=node, final=True)
        return self.op("toffset", {"id": "tx"}, "ok", off=off)

    def stable(self, lso: int) -> Self:
        return self.op("tstable", {"k": "l/0"}, "ok", lso=lso)


def committed() -> Transactions:
    return Transactions().transact([1, 2])


WHOLE: tuple[list[Record], list[Record]] = [(0, 1)], [(0, 2)]

FOUND = {
    "torn-transaction: half of it": committed().read_all([(0, 1)], []),
    "torn-transaction: replicas differ": committed().read_all(*WHOLE).read("l/0", 0, 9, node=4, final=True),
    "lost-transaction: gone": committed().read_all([], []),
    "aborted-read: an aborted one": Transactions().transact([1, 2], out="abort").read_all(*WHOLE),
    "aborted-read: one that never was committed": Transactions().transact([1, 2], kind="fail").read_all(*WHOLE),
    "doubled-record: twice": committed().read_all([(0, 1), (4, 1)], [(0, 2)]),
    "dirty-read: and gone": Transactions().transact([1, 2], kind="info").read("l/0", 0, 1, (0, 1)).read_all([], []),
    "skipped-record: passed over": committed().read("l/0", 0, 2).read_all(*WHOLE),
    "torn-offsets: without the transaction": Transactions()
    .transact([1, 2], out="abort", off=7)
    .read_all([], [], off=7),
    "torn-offsets: missing": Transactions().transact([1, 2], off=7).read_all(*WHOLE),
    "torn-offsets: older": Transactions()
    .transact([1, 2], off=7)
    .transact([3, 4], off=8)
    .read_all([(0, 1), (2, 3)], [(0, 2), (2, 4)], off=7),
    "lso-back: it falls": Transactions().stable(5).stable(4),
    "no-progress: an offset is unknown in the end": Transactions()
    .note("settled", ok=True, why="", took_ms=5)
    .op("toffset", {"id": "tx"}, "fail", err="NODE_NOT_READY"),
    "lost-transaction: no replica can be read": committed()
    .unread("l/0", "OFFSET_OUT_OF_RANGE")
    .unread("l/1", "OFFSET_OUT_OF_RANGE"),
    "lost-transaction: one replica cannot be read": committed().read_all(*WHOLE).unread("l/0", "DATA_DAMAGED", 4),
    "lost-transaction: a read stops before the end": committed()
    .read_all(*WHOLE)
    .op("tpoll", {"k": "l/1", "o": 0, "n": 3, "final": True}, "ok", r=[], next=0, lso=9),
}


@pytest.mark.parametrize("name", FOUND)
def test_anomaly_of_transactions_is_found(name: str) -> None:
    assert anomaly_of(name) in FOUND[name].anomalies()


def everything_in_order() -> Transactions:
    story = Transactions().stable(0).transact([1, 2], off=7).read("l/0", 0, 2, (0, 1))
    story.transact([3, 4], out="abort", off=8)
    story.transact([5, 6], kind="info", off=9)  # it was committed
    story.transact([7, 8], kind="info", off=10)  # it was not
    story.transact([9], kind="fail").read("l/0", 2, 6, (4, 5)).stable(6)
    return story.read_all([(0, 1), (4, 5)], [(0, 2), (4, 6)], off=9)


ALLOWED = {
    "everything in order": everything_in_order(),
    "read again after a failure": committed().unread("l/0", "NODE_NOT_READY").read_all(*WHOLE),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_may_happen_is_accepted(name: str) -> None:
    assert ALLOWED[name].anomalies() == set()
