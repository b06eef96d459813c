"""Running producers, and the judgement of their acknowledgements: each record at its offset on every replica.

Owns an idempotent producer over raw gRPC, so that a fault of smq.clients cannot hide one of the server. Values are
unique over the whole run. Sends and answers become a history, which the checkers of the simulation judge too; beside
them stands a plain comparison. The cluster tests and the failover benchmark use it.
"""

import threading
import time
from dataclasses import dataclass, field

from chaos_tests.checkers.judge import judge
from chaos_tests.history import Recorder
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError
from smq.testing.cluster import Cluster
from smq.testing.node_client import Unanswered, batch_of
from smq.testing.node_process import Node, wait_for

RECORDS_PER_BATCH = 5
ANSWER_MS = 2_000  # waiting longer for a dead leader would hide the fault
VALUES_PER_PARTITION = 1_000_000_000  # keeps the values of partitions apart
PAUSE_S = 0.005  # as long as a batch takes: a kill still meets one on its way, and nodes that start get the processor
GIVE_UP_S = 90.0  # three nodes start and elect within that on any machine: a batch that takes longer has failed


@dataclass
class Outcome:
    """One producer's results so far."""

    acked: dict[int, int] = field(default_factory=dict)  # offset -> value of every acknowledged record
    retries: int = 0
    duplicates: int = 0  # answers that said "an earlier attempt had been stored"
    leaders: list[int] = field(default_factory=list)  # nodes that acknowledged, changes only
    acks: list[tuple[float, int]] = field(default_factory=list)  # (monotonic seconds, node) of each batch
    failure: BaseException | None = None


class Traffic:
    """One producer thread per partition, from enter to exit."""

    def __init__(self, cluster: Cluster, topic: str, partitions: int = 1, pause_s: float = PAUSE_S) -> None:
        self.cluster = cluster
        self.topic = topic
        self.pause_s = pause_s  # of each producer, between an acknowledgement and the next batch
        self.outcomes = {partition: Outcome() for partition in range(partitions)}
        self.history = Recorder(time.monotonic_ns)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(partition,), daemon=True) for partition in self.outcomes
        ]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        self.wait_acks(3)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(GIVE_UP_S + 10)
            assert not thread.is_alive(), "a producer hangs"
        for partition, outcome in self.outcomes.items():
            if outcome.failure is not None:
                raise AssertionError(f"the producer of partition {partition} failed") from outcome.failure

    @property
    def acked_records(self) -> int:
        return sum(len(outcome.acked) for outcome in self.outcomes.values())

    def wait_acks(self, batches: int) -> None:
        """Returns once this many more batches are acknowledged in every partition."""
        goals = {
            partition: len(outcome.acked) + batches * RECORDS_PER_BATCH for partition, outcome in self.outcomes.items()
        }

        def reached() -> bool:
            failures = [outcome.failure for outcome in self.outcomes.values() if outcome.failure is not None]
            assert not failures, f"a producer failed: {failures[0]!r}"
            return all(len(self.outcomes[partition].acked) >= goal for partition, goal in goals.items())

        wait_for(f"{batches} more acknowledged batches per partition", reached, GIVE_UP_S + 10)

    # ------------------------------------------------------------------------------------------- one producer
    def _run(self, partition: int) -> None:
        outcome = self.outcomes[partition]
        try:
            session = wait_for("a producer id", self._allocate)
            process = self.history.new_process()
            number = 0
            while not self._stopping.is_set():
                values = [partition * VALUES_PER_PARTITION + number + i for i in range(RECORDS_PER_BATCH)]
                batch = batch_of(
                    [b"%d" % value for value in values],
                    producer_id=session.producer_id,
                    producer_epoch=session.producer_epoch,
                    base_sequence=number,
                )
                self._send(process, partition, batch, values)
                number += RECORDS_PER_BATCH
                time.sleep(self.pause_s)
        except BaseException as failure:  # noqa: BLE001 - kept, and raised where the test can see it
            outcome.failure = failure

    def _allocate(self) -> pb.StartPublishSessionResponse | None:
        for node in self.cluster.alive():
            return node.raw.start_session(self.topic)
        return None

    def _send(self, process: int, partition: int, batch: bytes, values: list[int]) -> None:
        """Sends the same bytes until they are acknowledged."""
        outcome = self.outcomes[partition]
        self.history.invoke(process, "send", k=self._key(partition), v=values, acks=-1, idem=True)
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            node = self._leader(partition)
            try:
                answer = node.raw.publish_batch(
                    self.topic, partition, batch, timeout_ms=ANSWER_MS, deadline_s=ANSWER_MS / 1000 + 1
                )
                break
            except (SmqError, Unanswered) as error:
                if isinstance(error, SmqError) and not error.code.is_retriable:
                    raise
                outcome.retries += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self.history.ok(process, "send", o=answer.base_offset, ts=answer.ts_ns, dup=answer.duplicate)
        assert answer.last_offset - answer.base_offset + 1 == len(values)
        outcome.acked.update(zip(range(answer.base_offset, answer.last_offset + 1), values, strict=True))
        outcome.duplicates += answer.duplicate
        outcome.acks.append((time.monotonic(), node.id))
        if outcome.leaders[-1:] != [node.id]:
            outcome.leaders.append(node.id)

    def _leader(self, partition: int) -> Node:
        def found() -> Node | None:
            info = self.cluster.partition(self.topic, partition)
            return self.cluster.nodes[info.leader] if info is not None else None

        return wait_for(f"a node that knows a leader of {self.topic}/{partition}", found, GIVE_UP_S)

    # --------------------------------------------------------------------------------------------- judgement
    def verify(self) -> None:
        """Asserts after the heal that every acknowledged record is at its offset on every replica, that no
        value is stored twice, that offsets have no gap, and that replicas and state machines are equal."""
        self.cluster.wait_ready()
        self.cluster.wait_converged(self.topic, len(self.outcomes))
        assert len(self.cluster.alive()) == self.cluster.size
        for partition, outcome in self.outcomes.items():
            copies = {node.id: self._read(node, partition) for node in self.cluster.alive()}
            first = next(iter(copies.values()))
            assert all(copy == first for copy in copies.values()), f"replicas of {partition} differ"
            lost = {offset: value for offset, value in outcome.acked.items() if first.get(offset) != value}
            assert lost == {}, f"acknowledged, but not at its offset: {dict(list(lost.items())[:5])}"
            assert list(first) == list(range(len(first))), f"offsets of partition {partition} have a gap"
            assert len(set(first.values())) == len(first), f"a value is stored twice in partition {partition}"
            unacknowledged = len(first) - len(outcome.acked)
            assert 0 <= unacknowledged <= RECORDS_PER_BATCH, f"{unacknowledged} records without an acknowledgement"
        self.cluster.wait_digests_equal()
        assert [str(violation) for violation in judge(self.history.events)] == []

    def _read(self, node: Node, partition: int) -> dict[int, int]:
        """offset -> value as this node serves them; also a final poll in the history."""
        process = self.history.new_process()
        self.history.invoke(process, "poll", k=self._key(partition), o=0, n=node.id, final=True)
        batches = node.raw.read_batches(self.topic, partition)
        info = node.raw.range_info(self.topic, partition)
        served = [
            [
                b.base_offset,
                b.ts_ns,
                [int(value) for value in b.values],
                b.producer_id,
                b.base_sequence,
                b.producer_epoch,
            ]
            for b in batches
        ]
        self.history.ok(process, "poll", b=served, lo=info.log_start, hwm=info.hwm)
        return {offset: int(value) for batch in batches for offset, value in enumerate(batch.values, batch.base_offset)}

    def _key(self, partition: int) -> str:
        return f"{self.topic}/{partition}"
