"""The judge of compacted ledgers: what compaction may remove is put back, and nothing else."""

from typing import Any, Self

import pytest

from chaos_tests.keyed import is_tombstone
from tests.sim.checkers.support import Story, anomaly_of

Record = tuple[int, int]  # offset, value
PLAIN = [value for value in range(100) if not is_tombstone(value)]
TOMBSTONE = next(value for value in range(100) if is_tombstone(value))


class Ledger(Story):
    """Of one partition, in which every record has the same key."""

    def __init__(self, tombstone_ms: int = 0) -> None:
        super().__init__()
        self.note("compaction", keys=1, tombstone_ms=tombstone_ms)

    def transact(self, value: int, at: int, kind: str = "ok", *, out: str = "commit", off: int | None = None) -> Self:
        """One record."""
        request = {"id": "tx", "v": {"l/0": [value]}, "off": off}
        return self.op("txn", request, kind, **_reply(kind, {"out": out}, {"l/0": at}))

    def attempt(self, at: dict[int, int], kind: str = "ok", *, replay: bool = False) -> Self:
        """At the same batch, with a task for each value, staged at these offsets."""
        request = {"app": "app", "id": 0, "v": list(at), "tasks": [{"l/0": [value]} for value in at]}
        offsets = [{"l/0": offset} for offset in at.values()]
        return self.op("batch", request, kind, **_reply(kind, {"replay": replay}, offsets))

    def read(self, start: int, following: int, *records: Record, node: int = 1, final: bool = False) -> Self:
        reply: dict[str, Any] = {"r": [list(record) for record in records], "next": following, "lso": following}
        return self.op("tpoll", {"k": "l/0", "o": start, "n": node, "final": final}, "ok", **reply)

    def read_all(self, *records: Record, off: int | None = None) -> Self:
        for node in (1, 2, 3):
            self.read(0, 99, *records, node=node, final=True)
        return self.op("toffset", {"id": "tx"}, "ok", off=off)

    def read_at_4(self) -> Self:
        """The last replica to be read has nothing."""
        return self.read(0, 99, node=4, final=True)


def _reply(kind: str, done: dict[str, Any], offsets: object) -> dict[str, Any]:
    replies = {"ok": done | {"o": offsets}, "info": {"o": offsets}, "fail": {"err": "NOT_COMMITTED"}}
    return replies[kind]


V0, V1, V2 = PLAIN[:3]

FOUND = {
    "lost-key: the last is gone": Ledger().transact(V0, 0).transact(V1, 2).read_all((0, V0)),
    "lost-key: an aborted one excuses nothing": Ledger().transact(V0, 0).transact(V1, 2, out="abort").read_all(),
    "lost-key: on one replica": Ledger().transact(V0, 0).read_all((0, V0)).read_at_4(),
    "early-tombstone: gone": Ledger(tombstone_ms=1_000).transact(TOMBSTONE, 0).read_all(),
    "resurrected: what a tombstone deleted": Ledger().transact(V0, 0).transact(TOMBSTONE, 2).read_all((0, V0)),
    "dirty-read: an aborted one": Ledger()
    .transact(V0, 0, out="abort")
    .read(0, 2, (0, V0))
    .transact(V1, 2)
    .read_all((2, V1)),
    "aborted-read: visible": Ledger().transact(V0, 0, "fail").transact(V1, 2).read_all((0, V0), (2, V1)),
    "skipped-record: the last": Ledger().transact(V0, 0).read(0, 2).read_all((0, V0)),
    "torn-offsets: no transaction had it": Ledger().transact(V0, 0, off=5).read_all((0, V0), off=6),
    "lost-key: the last of a batch": Ledger().attempt({V0: 0, V1: 2}).read_all((0, V0)),
    "aborted-read: an aborted batch": Ledger().attempt({V0: 0, V1: 2}, "fail").read_all((0, V0), (2, V1)),
    "dirty-read: an uncommitted attempt": Ledger()
    .attempt({V0: 0}, "fail")
    .attempt({V0: 2})
    .read(0, 2, (0, V0))
    .read_all((2, V0)),
    "repeated-batch: twice": Ledger().attempt({V0: 0}).attempt({V0: 2}, replay=True).read_all((2, V0)),
}


@pytest.mark.parametrize("name", FOUND)
def test_anomaly_of_compacted_ledgers_is_found(name: str) -> None:
    assert anomaly_of(name) in FOUND[name].anomalies()


def everything_in_order() -> Ledger:
    story = Ledger().transact(V0, 0, off=5).read(0, 2, (0, V0)).transact(V1, 2, out="abort")
    story.transact(V2, 4, "info")  # it was committed: a client has seen it
    story.read(0, 6, (4, V2))  # and the first was gone
    story.transact(PLAIN[3], 6)
    story.transact(PLAIN[4], 8, "info", off=9)  # it was committed, and gone before any client saw it
    return story.transact(PLAIN[5], 10).read_all((10, PLAIN[5]), off=9)


ALLOWED = {
    "everything in order": everything_in_order(),
    # It was committed, and has gone with what it deleted.
    "a tombstone in doubt": Ledger().transact(V0, 0).transact(TOMBSTONE, 2, "info").read_all(),
    "a tombstone that goes between two final reads": Ledger()
    .transact(TOMBSTONE, 0)
    .transact(V0, 2)
    .transact(TOMBSTONE, 4)
    .read_all((4, TOMBSTONE))
    .read_at_4(),
    "a batch of which a part is left": Ledger().attempt({V0: 0, V1: 2, V2: 4}).read_all((4, V2)),
    # Its first attempt was the one, and no client ever saw it.
    "a batch of which nothing is left": Ledger()
    .attempt({V0: 0, V1: 2}, "info")
    .attempt({V0: 4, V1: 6}, replay=True)
    .transact(V2, 8)
    .read_all((8, V2)),
    "a batch whose second attempt was seen": Ledger()
    .attempt({V0: 0, V1: 2}, "info")
    .attempt({V0: 4, V1: 6}, "info")
    .read(0, 8, (4, V0), (6, V1))
    .transact(V2, 8)
    .read_all((8, V2)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_compaction_may_do_is_accepted(name: str) -> None:
    assert ALLOWED[name].anomalies() == set()
