"""The speed of the judges: a million operations, as a live run or a campaign would write them.

Owns a generated history of a correct system (sends, polls of several batches, ranges, commits and fetches of offsets,
and the final read of three replicas) and the time that all judges take for it. Needs no cluster.
"""

import time
from random import Random
from typing import Final

from benchmarks.report import Report
from chaos_tests.checkers.judge import judge
from chaos_tests.history import Recorder

PARTITIONS: Final = 8
REPLICAS: Final = (1, 2, 3)
CLIENTS: Final = 64
RECORDS_A_BATCH: Final = 2
BATCHES_A_POLL: Final = 2
BATCHES_A_FINAL_POLL: Final = 100

StoredBatch = list[object]  # in a poll: base, ts, values, producer, sequence, producer epoch


class _GeneratedHistory:
    """A generated history. Clients act one after another, so that everything is in order."""

    def __init__(self, seed: int) -> None:
        self.recorder = Recorder(self._tick)
        self.polled = 0
        self._rng = Random(seed)
        self._now_ns = 0
        self._values = 0
        self._logs: list[list[StoredBatch]] = [[] for _ in range(PARTITIONS)]
        self._ends = [0] * PARTITIONS
        self._positions = [[0] * PARTITIONS for _ in range(CLIENTS + 1)]  # by client and log, in batches
        self._committed: dict[int, tuple[int, str]] = {}
        self._clients = [self.recorder.new_process() for _ in range(CLIENTS)]

    def _tick(self) -> int:
        self._now_ns += 1000
        return self._now_ns

    def operation(self) -> None:
        client, at = self._rng.choice(self._clients), self._rng.randrange(PARTITIONS)
        dice = self._rng.random()
        if dice < 0.45:
            self._send(client, at)
        elif dice < 0.9:
            self._poll(client, at, self._rng.choice(REPLICAS), BATCHES_A_POLL)
        elif dice < 0.94:
            self._range(client, at)
        elif dice < 0.97:
            self._commit(client, at)
        else:
            self._fetch(client, at)

    def _send(self, client: int, at: int) -> None:
        base, values = self._ends[at], list(range(self._values, self._values + RECORDS_A_BATCH))
        self._values += RECORDS_A_BATCH
        self._ends[at] += RECORDS_A_BATCH
        self.recorder.invoke(client, "send", k=f"t/{at}", v=values, acks=-1, idem=True)
        self._logs[at].append([base, self._now_ns, values, 7, base, 0])
        self.recorder.ok(client, "send", o=base, ts=self._now_ns, dup=False, ep=0)

    def _poll(self, client: int, at: int, node: int, batches: int, *, final: bool = False) -> int:
        positions = self._positions[0 if final else client]
        taken = self._logs[at][positions[at] : positions[at] + batches]
        requested = {"k": f"t/{at}", "o": taken[0][0] if taken else self._ends[at], "n": node}
        self.recorder.invoke(client, "poll", **requested, **({"final": True} if final else {}))
        # A reader decodes its own copy: judges must not rely on equal batches being one object.
        copies = [[*batch[:2], list(batch[2]), *batch[3:]] for batch in taken]  # type: ignore[call-overload]  # the third is a list
        self.recorder.ok(client, "poll", b=copies, lo=0, hwm=self._ends[at])
        positions[at] += len(taken)
        self.polled += len(taken) * RECORDS_A_BATCH
        return len(taken)

    def _range(self, client: int, at: int) -> None:
        self.recorder.invoke(client, "hwm", k=f"t/{at}", n=1)
        self.recorder.ok(client, "hwm", lo=0, hwm=self._ends[at], next=self._ends[at], epoch=0)

    def _commit(self, client: int, at: int) -> None:
        tag = f"{client}-{self._now_ns}"
        self._committed[at] = (self._ends[at], tag)
        self.recorder.invoke(client, "commit", g="g", k=f"t/{at}", o=self._ends[at], tag=tag)
        self.recorder.ok(client, "commit")

    def _fetch(self, client: int, at: int) -> None:
        offset, tag = self._committed.get(at, (-1, ""))
        self.recorder.invoke(client, "fetch", g="g", k=f"t/{at}", n=1)
        self.recorder.ok(client, "fetch", o=offset, tag=tag)

    def final_read(self) -> int:
        """Reads every replica of every partition; returns the number of operations."""
        count = 0
        for at in range(PARTITIONS):
            for node in REPLICAS:
                self._positions[0][at] = 0
                while self._poll(self._clients[0], at, node, BATCHES_A_FINAL_POLL, final=True):
                    count += 1
                count += 1
        return count


def measure(report: Report, *, operations: int) -> None:
    made = _GeneratedHistory(seed=1)
    for _ in range(operations):
        made.operation()
    total = operations + made.final_read()
    started = time.perf_counter()
    violations = judge(made.recorder.events)
    seconds = time.perf_counter() - started
    assert not violations, f"the generated history is correct, but was judged otherwise: {violations[0]}"
    value = f"{seconds:.1f} s for {total:,} operations, {made.polled:,} polled records"
    report.add("judging a history", value, operations=total, polled_records=made.polled, seconds=seconds)
