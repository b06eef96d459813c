"""Hand-made histories: one call for each operation or observation, in their order."""

from typing import Any, Self

from chaos_tests.checkers.judge import judge
from chaos_tests.history import Recorder


def batch(base: int, values: list[int], *, ts: int | None = None, producer: int = -1, sequence: int = -1) -> list[Any]:
    return [base, 1000 + base if ts is None else ts, values, producer, sequence, 0]


LOG = [batch(0, [10, 11]), batch(2, [12])]


class Story:
    """A history of the partition t/0 and the group g, one microsecond a step."""

    def __init__(self) -> None:
        self.now = 0
        self.recorder = Recorder(self._tick)
        self._open: dict[str, tuple[int, str]] = {}

    def _tick(self) -> int:
        self.now += 1000
        return self.now

    def wait(self, ms: float) -> Self:
        self.now += int(ms * 1_000_000)
        return self

    def note(self, function: str, /, **fields: Any) -> Self:
        self.recorder.note(function, **fields)
        return self

    def op(self, function: str, request: dict[str, Any], kind: str = "ok", /, **reply: Any) -> Self:
        return self.begin(function, function, **request).end(function, kind, **reply)

    def begin(self, name: str, function: str, /, **request: Any) -> Self:
        """An operation that ends later, by `end`."""
        process = self.recorder.new_process()
        self.recorder.invoke(process, function, **request)
        self._open[name] = process, function
        return self

    def end(self, name: str, kind: str = "ok", /, **reply: Any) -> Self:
        process, function = self._open.pop(name)
        self.recorder.add(process, kind, function, reply)
        return self

    # ---- operations
    def send(
        self, values: list[int], offset: int | None, *, acks: int = -1, kind: str = "ok", idem: bool = False
    ) -> Self:
        reply = {"o": offset, "ts": 1, "dup": False} if kind == "ok" else {"err": "X"}
        return self.op("send", {"k": "t/0", "v": values, "acks": acks, "idem": idem}, kind, **reply)

    def send_log(self) -> Self:
        """LOG, batch by batch."""
        return self.send([10, 11], 0).send([12], 2)

    def poll(
        self, offset: int, batches: list[list[Any]], *, hwm: int, lo: int = 0, node: int = 1, final: bool = False
    ) -> Self:
        return self.op("poll", _poll(offset, node, final=final), b=batches, lo=lo, hwm=hwm)

    def refuse(
        self,
        offset: int,
        error: str,
        *,
        lo: int | None = None,
        hi: int | None = None,
        node: int = 1,
        final: bool = False,
    ) -> Self:
        """A poll."""
        return self.op("poll", _poll(offset, node, final=final), "fail", err=error, lo=lo, hi=hi)

    def damaged(self, offset: int, *nodes: int) -> Self:
        """What the final read of these replicas says."""
        for node in nodes:
            self.refuse(offset, "DATA_DAMAGED", node=node, final=True)
        return self

    def final(self, batches: list[list[Any]], *, hwm: int, lo: int = 0, nodes: tuple[int, ...] = (1, 2, 3)) -> Self:
        for node in nodes:
            self.poll(lo, batches, hwm=hwm, lo=lo, node=node, final=True)
        return self

    def consume(self, at: int, *read: tuple[int, int], hwm: int) -> Self:
        return self.op("kpoll", {"c": "c", "k": "t/0", "o": at}, r=[["t/0", *r] for r in read], hwm=hwm)

    def range(self, hwm: int, *, lo: int = 0, next_: int | None = None) -> Self:
        return self.op("hwm", {"k": "t/0", "n": 1}, lo=lo, hwm=hwm, next=hwm if next_ is None else next_, epoch=0)

    def trim(self, offset: int) -> Self:
        return self.op("trim", {"k": "t/0", "o": offset})

    def commit(self, tag: str, offset: int, kind: str = "ok") -> Self:
        return self.op("commit", {"g": "g", "k": "t/0", "o": offset, "tag": tag}, kind)

    def fetch(self, tag: str, offset: int) -> Self:
        return self.op("fetch", {"g": "g", "k": "t/0", "n": 1}, o=offset, tag=tag)

    def forget_group(self, kind: str = "ok") -> Self:
        return self.op("gdelete", {"g": "g"}, kind)

    # ---- observations
    def local(self, *, hwm: int, lo: int = 0, i: int = 9, n: int = 1, epoch: int = 0, clock: int = 0) -> Self:
        """What node `n` has applied of the partition, at this index."""
        return self.note("local", n=n, inc=1, i=i, k="t/0", hwm=hwm, lo=lo, epoch=epoch, clock=clock)

    def anomalies(self) -> set[str]:
        return {violation.anomaly for violation in judge(self.recorder.events)}


def _poll(offset: int, node: int, *, final: bool) -> dict[str, Any]:
    return {"k": "t/0", "o": offset, "n": node} | ({"final": True} if final else {})


def anomaly_of(name: str) -> str:
    """A row of a table is named `anomaly: how it comes about`."""
    return name.partition(": ")[0]
