"""One live history: a cluster, clients, faults one after another, heal, a full read of every replica, the verdict.

Owns the course of a run, and the decision whether it is valid. It leaves a directory with the history, the plan, the
nodes' logs and `summary.json`, from which `report` makes a page. The checkers are those of the simulation.
"""

import json
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from chaos_tests.checkers.judge import judge
from chaos_tests.live.environment import sockets
from chaos_tests.live.faults.kinds import FAILOVERS, Arena, end_everything
from chaos_tests.live.faults.plan import Step
from chaos_tests.live.fleet import Fleet
from chaos_tests.live.load.groups import Team, TeamWatcher
from chaos_tests.live.load.grpc import (
    Client,
    GroupMember,
    Partition,
    Producer,
    RangeReader,
    Reader,
    SharedRecorder,
    World,
    grpc_clients,
    stop,
)
from chaos_tests.live.load.kafka import kafka_clients
from chaos_tests.live.load.kept import (
    KEPT,
    KeptConsumer,
    StartWatcher,
    create_kept,
    kept_clients,
    partitions_of,
    topic_of,
    wait_kept,
)
from chaos_tests.live.load.spark import SparkRead
from chaos_tests.live.report.summary import SUMMARY, Struck, Summary, count, failover_ms
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError
from smq.testing.node_client import Unanswered
from smq.testing.node_process import ClusterError, tail, wait_for

TOPIC: Final = "chaos"
SPARK: Final = "spark"  # directory of the streaming query
PARTITIONS: Final = 3
WATCH_S: Final = 0.25
WORKLOAD_S: Final = 20.0  # of a run without faults
WARM_S: Final = 60.0  # until every partition has acknowledged a record
PROGRESS_S: Final = 30.0  # with an untouched majority, every partition acknowledges within this time
SERVED_S: Final = 2.0  # for one read at a leader
RECOVERY_S: Final = 90.0  # after a fault: every partition acknowledges, every node is ready, every replica complete
SETTLE_S: Final = 120.0  # after the heal: all replicas agree
IN_FLIGHT_NS: Final = 200_000_000  # an acknowledgement this soon after a fault may have been under way before it
ACKED_MIN: Final = 200  # sends; a run with less traffic proves nothing
# Before each fault there is something for it to destroy, however slow the machine is: this many acknowledgements since
# the last one, and enough for the whole run.
ACKED_BEFORE_FAULT: Final = 100
FRESH_S: Final = 2.0  # for one more acknowledgement; without any the fault strikes all the same
TRAFFIC_S: Final = 120.0  # a machine that is slower than that must do with fewer
FINAL_POLLS_MAX: Final = 20_000


def topics_of(topic: str) -> tuple[str, ...]:
    """The topics of a run: one with records, one with storage=external, and those that keep only some of theirs."""
    return topic, f"{topic}-offsets", *(topic_of(topic, kept) for kept in KEPT)


class LateReader(Protocol):
    """Reads during the faults, and continues after all other clients have stopped, until it has read everything."""

    group: str

    def start(self) -> str | None:
        """The reason why it cannot start; None once it reads."""

    def drain(self, ends: Mapping[str, int], timeout_s: float) -> str | None:
        """Waits until everything below `ends` is read; returns the reason if that takes too long."""

    def stop(self) -> None:
        """May be called more than once."""


class Watcher:
    """A thread that notes which node leads Raft, and whose process has ended without a fault. While `expect_deaths` is
    set, a fault is under way and a process may end. It must never change anything."""

    def __init__(self, fleet: Fleet, recorder: SharedRecorder) -> None:
        self.expect_deaths = False
        self._fleet = fleet
        self._recorder = recorder
        self._leads: set[tuple[int, int]] = set()
        self._dead: set[tuple[int, int]] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(WATCH_S):
            for node, member in self._fleet.nodes.items():
                if not member.is_alive():
                    self._died(node)
                    continue
                status = self._fleet.status(node)
                if status is not None and status.raft_leader == node and (node, status.raft_term) not in self._leads:
                    self._leads.add((node, status.raft_term))
                    self._recorder.note("lead", n=node, term=status.raft_term)

    def _died(self, node: int) -> None:
        member = self._fleet.nodes[node]
        if self.expect_deaths or member.process is None or (node, member.starts) in self._dead:
            return
        self._dead.add((node, member.starts))
        last = tail(member.log).splitlines()[-1:]
        self._recorder.note("died", n=node, err=f"ended with {member.process.poll()}: {' '.join(last)}")


class HistoryRun:
    """`say` gets lines of progress."""

    def __init__(
        self,
        directory: Path,
        fleet: Fleet,
        steps: Sequence[Step],
        summary: Summary,
        say: Callable[[str], None],
        *,
        with_kafka: bool = True,
        with_spark: bool = False,
        topic: str = TOPIC,
    ) -> None:
        self.directory = directory
        self.fleet = fleet
        self.steps = steps
        self.summary = summary
        self._print = say
        self._with_kafka = with_kafka
        self._with_spark = with_spark
        self.topic = topic
        self._sink = (directory / "history.jsonl").open("w", encoding="utf-8")
        self.recorder = SharedRecorder(self._sink)
        self._start_ns: int = self.recorder.note("begin")["t"]  # the zero of the summary's times; also in the history
        self._rng = random.Random(f"run/{summary.seed}")
        self._clocks_jump = any(step.fault.family == "clock" for step in steps)
        self._failed: list[str] = []
        self._acks_at_last_fault = 0

    # ---------------------------------------------------------------------------------------------- the course
    def run(self) -> Summary:
        """Never raises for a failure of the cluster: that is a violation. The cluster is gone afterwards."""
        watcher: Watcher | None = None
        clients: list[Client] = []
        late: list[LateReader] = []
        world: World | None = None
        try:
            self._print_line(f"{self.fleet.size} nodes, {self.fleet.network.name}, {self.fleet.disks.name}")
            self.fleet.start()
            self.summary.nodes = self.fleet.size  # of an external cluster it is known only now
            world = self._world()
            watcher = Watcher(self.fleet, self.recorder)
            watcher.start()
            clients = grpc_clients(world)
            clients += kept_clients(world, with_kafka=self._with_kafka, clocks_jump=self._clocks_jump)
            if self._with_kafka:
                clients += [*kafka_clients(world), TeamWatcher(world, "team-watcher")]
            for client in clients:
                client.thread.start()
            late = self._late_readers(world)
            for reader in late:
                problem = reader.start()
                if problem is not None:
                    raise ClusterError(f"{reader.group}: {problem}")
            self._wait_acks(world, self._start_ns, WARM_S, "after the start")
            for step in self.steps:
                self._strike(world, step, watcher)
            if not self.steps:
                self._print_line(f"no faults: only the workload, for {WORKLOAD_S:g} s")
                time.sleep(WORKLOAD_S)
            self._heal(watcher)
            stop(world, clients)
            clients = []
            self._drain(world, late)
            if self._settle("after the heal"):
                self._final(world)
        except ClusterError as e:
            self.recorder.note("settled", ok=False, why=str(e))
            self._print_line(f"FAILED: {e}")
        except Exception as e:  # noqa: BLE001 - a bug of the harness: this run proves nothing, but the next one may
            self._failed.append(f"the harness has failed: {e!r}")
            self._print_line(traceback.format_exc())
        finally:
            if world is not None:
                stop(world, clients)
                for reader in late:
                    reader.stop()
                self._failed += world.failures
            if watcher is not None:
                watcher.stop()
            self.fleet.close()
            self._sink.close()
        self._conclude(world)
        return self.summary

    def _world(self) -> World:
        raws = {node: member.raw for node, member in self.fleet.nodes.items()}
        if self._with_kafka and not all(member.kafka for member in self.fleet.nodes.values()):
            self._with_kafka = False
            self._print_line("without Kafka clients: not every node has a Kafka port")
        kafka = ",".join(member.kafka for member in self.fleet.nodes.values()) if self._with_kafka else ""
        first = next(iter(raws.values()))
        # Replicated on all nodes: a majority of the nodes is then a majority of each partition.
        records, offsets, *_ = topics_of(self.topic)
        first.create_topic(records, PARTITIONS, timeout_ms=20_000, replication_factor=self.fleet.size)
        first.create_topic(offsets, 1, timeout_ms=20_000, config={"storage": "external"})
        create_kept(first, self.topic, self.recorder, replicas=self.fleet.size, clocks_jump=self._clocks_jump)
        partitions = [Partition(records, index) for index in range(PARTITIONS)]
        for found in sockets.unexpected(self.fleet):
            self._violate(f"bound-beyond: {found}")
        external = [Partition(offsets, 0)]
        tls = next(iter(self.fleet.nodes.values())).tls
        kept = partitions_of(self.topic)
        return World(self.recorder, raws, kafka, partitions, self._rng, external, kept, tls=tls)

    def _late_readers(self, world: World) -> list[LateReader]:
        late: list[LateReader] = []
        if self._with_kafka:
            late.append(Team(world))
        if self._with_spark:
            late.append(SparkRead(world, self.directory / SPARK))
        self.summary.workload = [
            "gRPC",
            *(["Kafka"] if self._with_kafka else []),
            *(["Spark"] if self._with_spark else []),
        ]
        return late

    def _strike(self, world: World, step: Step, watcher: Watcher) -> None:
        fault = step.fault
        self._wait_traffic(world)
        arena = Arena(self.fleet, self._rng)
        leaders = self.fleet.leaders()
        watcher.expect_deaths = True
        begun_ns = time.monotonic_ns()
        struck = Struck(fault.name, fault.family, [], [], self._since(begun_ns), says=fault.says)
        struck.keeps_majority = fault.keeps_majority
        self.summary.faults.append(struck)
        self.recorder.note("fault", what=fault.name, phase="begin")
        try:
            self._wait_fresh_ack(world)
            struck.nodes = fault.strike(arena)
            struck_ns = time.monotonic_ns()
            struck.led = sorted(key for key, node in leaders.items() if node in struck.nodes)
            self.recorder.note("fault", what=fault.name, phase="struck", nodes=struck.nodes)
            time.sleep(step.hold_s)
            if fault.keeps_majority:
                self._wait_acks(world, struck_ns + IN_FLIGHT_NS, PROGRESS_S, f"during {fault.name}")
                self._wait_served(world, PROGRESS_S, f"during {fault.name}")
        finally:
            ended_ns = time.monotonic_ns()
            struck.end_s = self._since(ended_ns)
            struck.acks_during = sum(begun_ns <= ack.at_ns <= ended_ns for ack in list(world.acks))
            self._acks_at_last_fault = len(world.acks)
            fault.undo(arena, struck.nodes)
            struck.flips, struck.told = arena.flips, arena.remarks
            arena.end_helpers()
            self.recorder.note("fault", what=fault.name, phase="end", nodes=struck.nodes)
        self._wait_acks(world, ended_ns, RECOVERY_S, f"after {fault.name}")
        self._restart_dead_nodes(fault.name)
        self.fleet.wait_ready(timeout_s=RECOVERY_S)
        self.fleet.wait_complete(RECOVERY_S)
        struck.recovery_ms = (time.monotonic_ns() - ended_ns) / 1e6
        watcher.expect_deaths = False
        if fault.family in FAILOVERS and struck.led and fault.keeps_majority:
            struck.failover_ms = failover_ms(world.acks, struck, struck_ns, ended_ns)
        failover = f", failover {struck.failover_ms:.0f} ms" if struck.failover_ms is not None else ""
        self._print_line(
            f"{fault.name} of {struck.nodes}: {struck.end_s - struck.start_s:.1f} s, {struck.acks_during} acks "
            f"meanwhile{failover}, healthy {struck.recovery_ms:.0f} ms after it"
        )
        time.sleep(step.calm_s)

    def _restart_dead_nodes(self, fault: str) -> None:
        """Restarts nodes that ended themselves in a fault (a failed commit must end a node), as a supervisor does."""
        for node, member in self.fleet.nodes.items():
            if not member.is_alive():
                code = member.process.poll() if member.process is not None else None
                self._print_line(f"node {node} had ended with {code} in {fault}")
                self.fleet.run(node)

    def _heal(self, watcher: Watcher) -> None:
        watcher.expect_deaths = True
        end_everything(Arena(self.fleet, self._rng))
        self.recorder.note("heal")
        self.fleet.wait_ready(timeout_s=RECOVERY_S)
        watcher.expect_deaths = False

    def _drain(self, world: World, late: list[LateReader]) -> None:
        """Waits until the late readers have reached the log's end as of the last producer's stop."""
        ends: dict[str, int] = {}
        for partition in world.partitions:
            wait_for("a range after the heal", partial(self._knows_end, partition, ends), RECOVERY_S)
        for reader in late:
            begun = time.monotonic()
            problem = reader.drain(ends, SETTLE_S)
            if problem is None:
                self.recorder.note("gdrained", g=reader.group, ends=ends)
                self._print_line(f"{reader.group} has read all: {(time.monotonic() - begun) * 1000:.0f} ms")
            else:
                self._violate(f"no-progress: {reader.group}: {problem}")
            reader.stop()

    def _knows_end(self, partition: Partition, ends: dict[str, int]) -> bool:
        node = self._rng.choice(list(self.fleet.nodes.values()))
        try:
            ends[partition.key] = node.raw.range_info(partition.topic, partition.index).hwm
        except (SmqError, Unanswered):
            return False
        return True

    def _settle(self, when: str) -> bool:
        begun = time.monotonic()
        problem: str | None = "not checked yet"
        while problem is not None and time.monotonic() - begun < SETTLE_S:
            time.sleep(0.1)
            problem = self.fleet.disagreement()
        took_ms = (time.monotonic() - begun) * 1000
        if self.summary.settle_ms is None:
            self.summary.settle_ms = took_ms
        self.recorder.note("settled", ok=problem is None, why=problem or when, took_ms=took_ms)
        self._print_line(f"replicas agree {when}: {took_ms:.0f} ms" if problem is None else f"NO AGREEMENT: {problem}")
        return problem is None

    def _final(self, world: World) -> None:
        """Probes of every kind, agreement again, the full read of every replica, the digests."""
        world.stopping.clear()
        producer, ranges, member = Producer(world, "probe"), RangeReader(world, "probe"), GroupMember(world, "probe")
        for client in (producer, ranges, member):
            for partition in [*world.partitions, *world.kept] if client is not member else world.partitions:
                client.any_partition = lambda p=partition: p  # type: ignore[method-assign, misc]  # each in turn
                client.step()
        if not self._settle("after the probes"):
            return
        begun = time.monotonic()
        for problem in wait_kept(world, SETTLE_S):
            self._print_line(f"NOT DONE: {problem}")  # the checkers find it, too
        self._print_line(f"nothing more is due after {(time.monotonic() - begun) * 1000:.0f} ms")
        reader = Reader(world, "final")
        for partition in [*world.partitions, *world.kept]:
            for node in self.fleet.nodes:
                self._read_all(reader, partition, node)
        if self._with_kafka:
            consumer = KeptConsumer(world, "final-consumer")
            for partition in world.kept:
                consumer.read_all(partition)
            consumer.close()
        watcher = StartWatcher(world, "final-start", clocks_jump=self._clocks_jump)
        for partition in world.kept:
            watcher.watch(partition)
        for node in self.fleet.nodes:
            status = self.fleet.status(node, with_digest=True)
            if status is not None:
                self.recorder.note("digest", n=node, i=status.applied_index, d=status.digest)

    def _read_all(self, reader: Reader, partition: Partition, node: int) -> None:
        position = 0
        for _ in range(FINAL_POLLS_MAX):
            after = reader.poll(partition, node, position, final=True)
            if after == position and position >= partition.hwm:
                return
            position = after
        self._violate(f"no-progress: the full read of {partition.key} on node {node} does not end")

    # ----------------------------------------------------------------------------------------------- measuring
    def _wait_acks(self, world: World, since_ns: int, timeout_s: float, when: str) -> None:
        """Waits until every partition has acknowledged a record since then; ClusterError if one does not in time."""
        missing = {partition.key for partition in [*world.partitions, *world.kept]}

        def have_all() -> bool:
            for ack in reversed(list(world.acks)):
                if ack.at_ns <= since_ns:
                    break
                missing.discard(ack.key)
            return not missing or bool(world.failures)

        try:
            wait_for(f"acknowledgements {when}", have_all, timeout_s)
        except ClusterError as e:
            raise ClusterError(f"{e}; nothing was acknowledged in {', '.join(sorted(missing))}") from None

    def _wait_served(self, world: World, timeout_s: float, when: str) -> None:
        """Waits until the leader of every partition has served its newest known record."""
        missing = [partition for partition in world.partitions if partition.hwm]

        def have_all() -> bool:
            leaders = self.fleet.leaders()
            missing[:] = [p for p in missing if not self._serves(p, leaders.get(p.key))]
            return not missing or bool(world.failures)

        try:
            wait_for(f"reads {when}", have_all, timeout_s)
        except ClusterError as e:
            raise ClusterError(f"{e}; no leader served {', '.join(sorted(p.key for p in missing))}") from None

    def _serves(self, partition: Partition, leader: int | None) -> bool:
        if leader is None:
            return False
        wanted = pb.FetchPartition(topic=partition.topic, partition=partition.index, offset=partition.hwm - 1)
        try:
            found = self.fleet.nodes[leader].raw.fetch_once(pb.FetchRequest(partitions=[wanted]), SERVED_S)
        except (SmqError, Unanswered):
            return False
        return bool(found.batches)

    def _wait_traffic(self, world: World) -> None:
        """Waits for acknowledgements since the last fault. Too few are no violation: the summary says so."""
        wanted = max(ACKED_BEFORE_FAULT, -(-ACKED_MIN // len(self.steps)))
        since = self._acks_at_last_fault

        def have_enough() -> bool:
            return len(world.acks) - since >= wanted or bool(world.failures)

        try:
            wait_for(f"{wanted} acknowledgements before a fault", have_enough, TRAFFIC_S)
        except ClusterError as e:
            self._print_line(f"{e}; there were {len(world.acks) - since}")

    def _wait_fresh_ack(self, world: World) -> None:
        """Returns right after an acknowledgement, when as little as possible has been written since: what a fault can
        take from it is then the most."""
        count, deadline = len(world.acks), time.monotonic() + FRESH_S
        while len(world.acks) == count and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _conclude(self, world: World | None) -> None:
        summary, events = self.summary, self.recorder.events
        summary.seconds = self._since(time.monotonic_ns())
        summary.fault_seconds = sum(f.end_s - f.start_s for f in summary.faults)
        count(summary, events)
        violations = judge(events)  # fills in what compaction removed
        summary.anomalies = dict(Counter(v.anomaly for v in violations) + Counter(v.split(":")[0] for v in self._found))
        summary.violations = [str(v) for v in violations] + self._found
        if summary.acked_sends < ACKED_MIN:
            summary.invalid.append(f"{summary.acked_sends} acknowledged sends, at least {ACKED_MIN} are needed")
        summary.invalid += self._failed
        fresh = self.directory / f"{SUMMARY}.new"
        fresh.write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
        fresh.replace(self.directory / SUMMARY)  # a history with a summary is complete, and is not run again

    @property
    def _found(self) -> list[str]:
        return [event["why"] for event in self.recorder.events if event["f"] == "found"]

    def _violate(self, what: str) -> None:
        self.recorder.note("found", why=what)
        self._print_line(what)

    def _since(self, at_ns: int) -> float:
        return (at_ns - self._start_ns) / 1e9

    def _print_line(self, line: str) -> None:
        self._print(f"[{self._since(time.monotonic_ns()):6.1f} s] {line}")
