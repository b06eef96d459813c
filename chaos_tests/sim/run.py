"""One seed of one scenario: build the world, inject the faults, heal, read everything back, judge.

Owns the course of a run and its result. It is deterministic: the same seed and scenario give the same history and trace
in any process.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from chaos_tests.checkers.base import Violation
from chaos_tests.checkers.judge import judge
from chaos_tests.history import Event, Recorder, uncollected
from chaos_tests.sim.clients.administrator import (
    Defaulter,
    Noter,
    Placer,
    QuotaOwner,
    RuleOwner,
    SettingOwner,
    UserOwner,
)
from chaos_tests.sim.clients.base import Known, World
from chaos_tests.sim.clients.batch_writer import BatchWriter
from chaos_tests.sim.clients.connected import Connected
from chaos_tests.sim.clients.consumer import Consumer
from chaos_tests.sim.clients.consumer_members import CONSUMERS, ConsumerMember
from chaos_tests.sim.clients.consumer_members import probe as probe_consumers
from chaos_tests.sim.clients.groups import BRIEF, GROUP, STATIC, GroupConsumer
from chaos_tests.sim.clients.lag import LagWatcher
from chaos_tests.sim.clients.ledger import LedgerReader
from chaos_tests.sim.clients.mirror import Mirror
from chaos_tests.sim.clients.pace import ACKED_MIN, Pace
from chaos_tests.sim.clients.producer import Crowd, Pipeline, Producer
from chaos_tests.sim.clients.remaker import Remaker, Repeater
from chaos_tests.sim.clients.services import Assigner, GroupMember, GroupWatcher, RangeReader, TopicOwner, Trimmer
from chaos_tests.sim.clients.streamer import Streamer
from chaos_tests.sim.clients.transactor import SHARERS, Holder, Rival, Transactor
from chaos_tests.sim.cluster import CLUSTER_ID, Cluster, SimHost
from chaos_tests.sim.faults.catalogue import Arena
from chaos_tests.sim.faults.schedule import Storm, Strike, heal
from chaos_tests.sim.levels import LEVEL_TWO, level_two
from chaos_tests.sim.observer import SAMPLE_MS, Observer, awaits_a_pass, count_log_events
from chaos_tests.sim.rpc import Actor, ClientNet, ClientProfile, Script, Sleep
from chaos_tests.sim.scenario import Scenario
from smq.raft_state.command_codec import FEATURE_LEVEL
from smq.raft_state.ids import NodeId
from smq.raft_state.topic_config import (
    CLEANUP_POLICY,
    DELETE_RETENTION_MS,
    MIN_CLEANABLE_DIRTY_RATIO,
    RETENTION_BYTES,
    RETENTION_MS,
    RETENTION_RECORDS,
)
from smq.replication.api import Acks
from smq.replication.node_config import NodeConfig
from smq.replication.partition.compaction.segment_catch_up import lowest_behind
from smq.testing.virtual.clock import NS_PER_MS, Machine, Scheduler
from smq.testing.virtual.disk import DiskImage
from smq.testing.virtual.network import LinkProfile, SimNetwork
from smq.testing.virtual.rng import Streams

BOOT_MS_MAX = 20_000.0  # from power on to a quorum that answers
RETENTION_MS_MAX = 3_000.0  # several looks at each partition
SETTLE_MS_MAX = 40_000.0  # from the heal to agreement: several election and session time-outs in a row
WALL_OFFSET_MS_MAX = 500  # of a node's clock at first
GIVE_UP_MS_MAX = 6_000.0  # more for each segment that is lost then: three attempts to fetch it, and its patience
# Coarser or smaller than the defaults of production. With those, idle ticks are a third of a run's events.
TIMINGS: dict[str, Any] = {
    "heartbeat_interval_ms": 400,
    "session_timeout_ms": 1500,
    "tick_interval_ms": 100,
    "election_timeout_min_ms": 480,
    "election_timeout_max_ms": 960,
    "raft_heartbeat_ms": 150,
    "tail_bytes_kept": 1_000,  # logs are short here, and most reads should come from the disk
}
LONGEST = 3.0  # times its seconds: a storm may last this long if it lacks acknowledged operations
ELECT_MS_MAX = 10_000.0  # of one probe for a preferred leader: hand-overs take a few round trips
ELECT_RETRY_MS = 500.0
FINAL_MS_MAX = 60_000.0  # the full read of all replicas


@contextmanager
def silence() -> Iterator[None]:
    """Switches logging off for the time of a run, as tests share the process: hundreds of faults are expected here, and
    are in the trace."""
    logger, configuration = logging.getLogger("smq"), structlog.get_config()
    level = logger.level
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        structlog.configure(**configuration)


@dataclass(slots=True)
class Result:
    """The result of one seed."""

    seed: int
    scenario: str
    violations: list[Violation]
    virtual_s: float
    operations: int
    acked: int
    events: int
    counts: Counter[str]
    history: list[Event] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    strikes: tuple[Strike, ...] = ()  # the schedule of the faults that struck

    @property
    def digest(self) -> str:
        """Of the history: equal for equal runs."""
        lines = (json.dumps(event, sort_keys=True).encode() for event in self.history)
        return hashlib.sha256(b"\n".join(lines)).hexdigest()


class Simulation:
    """The world of one seed."""

    def __init__(
        self, scenario: Scenario, seed: int, *, trace: bool = False, schedule: tuple[Strike, ...] | None = None
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.scheduler = Scheduler()
        self.streams = Streams(seed)
        self.recorder = Recorder(lambda: self.scheduler.now_ns)
        settings = scenario.cluster
        self.observer = Observer(
            self.recorder,
            producer_expiration_ms=settings.producer_expiration_ms,
            keys=settings.compaction_keys,
            has_consumers=bool(scenario.clients.consumer_members),
        )
        self.trace: list[str] = []
        self._clients_at_work = 0
        self.nodes = tuple(NodeId(n) for n in range(1, scenario.cluster.nodes + 1))
        tracer = (lambda line: self.trace.append(f"{self.scheduler.now_ns} {line}")) if trace else None
        network = SimNetwork(self.scheduler, self.streams, self.nodes, LinkProfile(**scenario.network), tracer)
        self.cluster = Cluster(
            self.scheduler, self.streams, network, self.recorder, self.observer.factory, self._configs()
        )
        self.observer.cluster = self.cluster
        self.cluster.on_started.append(self.observer.on_started)
        self._make_hosts()
        self.net = ClientNet(
            self.scheduler,
            self.streams,
            dict(self.cluster.hosts),
            replace(ClientProfile(), **scenario.client_network),
            self._report_violation,
        )
        pace = Pace(self.scheduler, self.streams.stream("clients/pace"), scenario.cluster.seconds)
        self.world = World(
            self.scheduler, self.streams, self.recorder, self.nodes, self._report_violation, self._spawn, pace
        )
        limits = {
            RETENTION_RECORDS: settings.retention_records,
            RETENTION_MS: settings.retention_ms,
            RETENTION_BYTES: settings.retention_bytes,
        }
        limited = {key: str(limit) for key, limit in limits.items() if limit}
        self.world.topic_config = tuple((limited | settings.topic_config).items())
        self.world.keys = settings.compaction_keys
        if settings.compaction_keys:
            policy = "compact,delete" if limited else "compact"
            self.world.topic_config += (
                (CLEANUP_POLICY, policy),
                (MIN_CLEANABLE_DIRTY_RATIO, "0"),
                (DELETE_RETENTION_MS, str(settings.tombstone_ms)),
            )
        self.arena = self._make_arena()
        self.storm = Storm(self.arena, scenario.faults, schedule)

    def _configs(self) -> dict[NodeId, NodeConfig]:
        peers = {node: ("127.0.0.1", 10_000 + node) for node in self.nodes}
        profile = self.scenario.cluster
        return {
            node: NodeConfig(
                node_id=node,
                cluster_id=CLUSTER_ID,
                peers=peers,
                grpc_address=f"127.0.0.1:{20_000 + node}",
                kafka_address=f"127.0.0.1:{30_000 + node}" if self.scenario.clients.members else "",
                rack=f"rack-{node}",
                raft_snapshot_entries=profile.snapshot_entries,
                **{**TIMINGS, **profile.node},
            )
            for node in self.nodes
        }

    def _make_hosts(self) -> None:
        profile, rng = self.scenario.cluster, self.streams.stream("machines")
        for node in self.nodes:
            machine = Machine(
                rate=1.0 + rng.uniform(-profile.drift_max, profile.drift_max),
                wall_offset_ns=int(rng.uniform(-WALL_OFFSET_MS_MAX, WALL_OFFSET_MS_MAX) * NS_PER_MS),
            )
            self.cluster.hosts[node] = SimHost(node, machine, DiskImage(), profile.disk_ms)

    def _report_violation(self, node: NodeId, what: str) -> None:
        self.recorder.note("died", n=node, err=what)

    # ------------------------------------------------------------------------------------------ the course
    def run(self) -> Result:
        stop_counting = count_log_events(self.observer.counts)
        try:
            if self._boot():
                self._storm()
                self._destroy_disks()
                heal(self.arena)
                if self._settle("converged"):
                    self._final_work()
        finally:
            stop_counting()
        return self._result()

    def _boot(self) -> bool:
        if self.scenario.cluster.first_start_strikes:
            rng = self.streams.stream("first start")
            asked = rng.sample(self.nodes, rng.randint(1, len(self.nodes)))
            for host in self.cluster.hosts.values():
                host.is_founding = host.node in asked
        for node in self.nodes:
            self.cluster.start(node)
        self._sample()
        self._strike_first_start(self.scenario.cluster.first_start_strikes)
        self.scheduler.run_for_ms(BOOT_MS_MAX, stop=self._are_all_ready)
        owner = TopicOwner(self.world, "main", think_ms=0)
        made: list[bool] = []
        Actor(self.net, self._make_topics(owner), lambda: made.append(True))
        done = self.scheduler.run_for_ms(BOOT_MS_MAX, stop=lambda: bool(made))
        if not done or not self.world.partitions:
            self.recorder.note("settled", ok=False, why="no topic could be created after the start")
            return False
        for known in self.world.partitions:
            self._learn_replicas(known)
        return True

    def _strike_first_start(self, strikes: int) -> None:
        """Power goes on one node or on all, a link is cut, or one node comes back with an empty disk, always the same.
        The command that begins the cluster is the same again."""
        rng, network = self.streams.stream("first start/strikes"), self.cluster.network
        for _ in range(strikes):
            self.scheduler.run_for_ms(rng.choice((rng.uniform(0, 30), rng.uniform(0, 600))))
            struck = rng.choice((self.nodes, (self.arena.victim,), (rng.choice(self.nodes),), ()))
            for node in struck:
                self.cluster.crash(node, power=True, why="first start")
                if node == self.arena.victim and rng.random() < 0.5:
                    self.cluster.hosts[node].image = DiskImage()
                self.cluster.start_later(node, rng.uniform(0, 50))
            network.heal_all()
            if rng.random() < 0.5:
                network.cut(*rng.sample(self.nodes, 2))
        network.heal_all()

    def _are_all_ready(self) -> bool:
        return all(host.api is not None and host.api.is_ready for host in self.cluster.hosts.values())

    def _make_topics(self, owner: TopicOwner) -> Script:
        profile = self.scenario.cluster
        if profile.retention_records or profile.retention_ms or profile.retention_bytes:
            self.recorder.note(
                "retention",
                records=profile.retention_records,
                ms=profile.retention_ms,
                bytes=profile.retention_bytes,
            )
        if profile.compaction_keys:
            self.recorder.note("compaction", keys=profile.compaction_keys, tombstone_ms=self._tombstone_ms())
        for number in range(profile.topics):
            for attempt in range(5):
                ok = yield from owner.create(
                    f"t{number}-{attempt}",
                    partitions=profile.partitions,
                    replication=profile.replication,
                    start=self.scenario.clients.start_offset,
                    deadline_ms=BOOT_MS_MAX / 4,
                )
                if ok:
                    break
        if self.scenario.clients.assigners:
            for attempt in range(5):
                name, wait_ms = f"x-{attempt}", BOOT_MS_MAX / 4
                yield from owner.create(name, partitions=1, replication=0, deadline_ms=wait_ms, is_external=True)
                if self.world.externals:
                    break

    def _tombstone_ms(self) -> int:
        """How long tombstones stay at least. One clock stamps them, and another may end their time. Clocks that jump
        end it at any moment."""
        if any(fault.what == "clock_jump" for fault in self.scenario.faults):
            return 0
        return max(0, self.scenario.cluster.tombstone_ms - 2 * WALL_OFFSET_MS_MAX)

    def _learn_replicas(self, known: Known) -> None:
        node = self.observer.freshest()
        part = node.state.partition(known.pid) if node is not None else None
        if part is not None:
            known.replicas = part.replicas

    def _sample(self) -> None:
        self.observer.sample()
        self.scheduler.after_ms(SAMPLE_MS, self._sample)

    def _make_arena(self) -> Arena:
        victim = self.streams.stream("fault/victim").choice(self.world.nodes)
        newest = LEVEL_TWO if self.scenario.cluster.upgrades else FEATURE_LEVEL
        seen = self.observer
        return Arena(self.cluster, self.world, self.net, seen.seen_leaders, seen.epochs, seen.fenced, newest, victim)

    def _storm(self) -> None:
        for script in self._client_scripts():
            self._spawn(script)
        self.storm.begin()
        pace, seconds = self.world.pace, self.scenario.cluster.seconds
        pace.begin()
        self.scheduler.run_for_ms(seconds * 1000)
        self.scheduler.run_for_ms(seconds * (LONGEST - 1) * 1000, stop=lambda: pace.acked >= ACKED_MIN)
        self.world.stopped = True
        pace.stop()

    def _spawn(self, script: Script) -> None:
        self._clients_at_work += 1
        Actor(self.net, script, self._client_ended)

    def _client_ended(self) -> None:
        self._clients_at_work -= 1

    def _client_scripts(self) -> list[Script]:
        mix, world = self.scenario.clients, self.world
        think = mix.think_ms
        made: list[Script] = []
        kinds = (
            ("idempotent", mix.idempotent, Acks.ALL, True),
            ("plain", mix.plain, Acks.ALL, False),
            ("leader", mix.leader_acks, Acks.LEADER, True),
            ("none", mix.no_acks, Acks.NONE, False),
        )
        for kind, count, acks, idempotent in kinds:
            made += [
                Producer(world, f"{kind}-{i}", acks=acks, idempotent=idempotent, think_ms=think).run()
                for i in range(count)
            ]
        made += [Crowd(world, i, think_ms=think).run() for i in range(mix.crowds)]
        made += [Pipeline(world, f"pipeline-{i}", think_ms=think * 1.5).run() for i in range(mix.pipelines)]
        made += [Connected(world, f"connected-{i}", think_ms=think).run() for i in range(mix.connected)]
        made += [Consumer(world, f"consumer-{i}", think_ms=think).run() for i in range(mix.consumers)]
        made += [RangeReader(world, f"ranges-{i}", think_ms=think * 2).run() for i in range(mix.ranges)]
        made += [GroupMember(world, f"member-{i}", "g", think_ms=think * 2).run() for i in range(mix.groups)]
        made += [LagWatcher(world, f"lag-{i}", "g", think_ms=think).run() for i in range(mix.lag_watchers)]
        made += [
            GroupConsumer(world, f"group-{i}", instance=STATIC if i == 0 else "").run() for i in range(mix.members)
        ]
        if mix.members:
            made.append(GroupWatcher(world, "group-watcher", GROUP, think_ms=think).run())
        made += [GroupConsumer(world, f"brief-{i}", group=BRIEF).run() for i in range(mix.brief_members)]
        made += [
            ConsumerMember(world, f"consumer-member-{i}", instance=STATIC if i < 2 else "").run()
            for i in range(mix.consumer_members)
        ]
        if mix.consumer_members:
            made.append(GroupWatcher(world, "consumers-watcher", CONSUMERS, think_ms=think).run())
        made += [
            Trimmer(world, f"trimmer-{i}", think_ms=mix.trim_think_ms, to_hwm=mix.trim_to_hwm).run()
            for i in range(mix.trimmers)
        ]
        made += [Holder(world, i, think_ms=think).run() for i in range(mix.holders)]
        made += [Transactor(world, i, think_ms=think).run() for i in range(mix.transactors)]
        ids = mix.transactors // SHARERS
        made += [Rival(world, i, ids, think_ms=think).run() for i in range(mix.rivals)]
        made += [BatchWriter(world, i, think_ms=think).run() for i in range(mix.batch_writers)]
        made += [LedgerReader(world, f"ledger-{i}", think_ms=think).run() for i in range(mix.ledger_readers)]
        made += [TopicOwner(world, f"extra-{i}", think_ms=1500).run() for i in range(mix.topic_owners)]
        made += [SettingOwner(world, i, think_ms=think).run() for i in range(mix.setting_owners)]
        made += [Placer(world, f"placed-{i}", think_ms=think).run() for i in range(mix.placers)]
        made += [Defaulter(world, f"defaulter-{i}", think_ms=think).run() for i in range(mix.defaulters)]
        made += [UserOwner(world, f"admin-{i}", think_ms=think).run() for i in range(mix.user_owners)]
        made += [RuleOwner(world, f"rights-{i}", think_ms=think).run() for i in range(mix.rule_owners)]
        made += [QuotaOwner(world, f"quotas-{i}", think_ms=think).run() for i in range(mix.quota_owners)]
        made += [Noter(world, f"noter-{i}", think_ms=think).run() for i in range(mix.noters)]
        made += [Streamer(world, f"streamer-{i}", think_ms=think).run() for i in range(mix.streamers)]
        made += [Remaker(world, f"again-{i}", think_ms=think).run() for i in range(mix.remakers)]
        made += [Repeater(world, f"repeater-{i}", think_ms=think).run() for i in range(mix.repeaters)]
        made += [Mirror(world, i, think_ms=think).run() for i in range(mix.mirrors)]
        made += [
            Assigner(world, f"assigner-{i}", known, think_ms=think).run()
            for i in range(mix.assigners)
            for known in world.externals[:1]
        ]
        return made

    # ------------------------------------------------------------------------------------------ the end
    def _destroy_disks(self) -> None:
        """P1: every acknowledged record survives while a majority of the disks does."""
        count = self.scenario.cluster.lost_forever
        if not count:
            return
        for node in self.nodes:
            self.cluster.crash(node, power=True, why="the end of the storm")
        lost = self.streams.stream("funeral").sample(self.nodes, count)
        self.recorder.note("fault", what="lost-forever", nodes=lost)
        for node in lost:
            self.cluster.destroy(node)
        self.nodes = tuple(node for node in self.nodes if node not in lost)
        self.world.nodes = self.nodes

    def _settle(self, why: str) -> bool:
        """Waits, up to a bound, until all replicas agree and the clients' last operations have ended."""
        start_ns = self.scheduler.now_ns
        problem = self._wait_for_agreement(SETTLE_MS_MAX)
        pids = [known.pid for known in [*self.world.partitions, *self.world.ledgers]]
        if problem is not None and (awaited := self.observer.awaited_segments(pids)):
            problem = self._wait_for_agreement(awaited * GIVE_UP_MS_MAX)
        took_ms = (self.scheduler.now_ns - start_ns) / NS_PER_MS
        self.recorder.note("settled", ok=problem is None, why=problem or why, took_ms=took_ms)
        return problem is None

    def _wait_for_agreement(self, ms_max: float) -> str | None:
        until_ns = self.scheduler.now_ns + ms_max * NS_PER_MS
        problem: str | None = "it was not looked at"
        while problem is not None and self.scheduler.now_ns < until_ns:
            self.scheduler.run_for_ms(100)
            problem = self._disagreement()
        return problem

    def _disagreement(self) -> str | None:
        """Why the cluster has not converged yet; None once it has."""
        if self._clients_at_work:
            return f"{self._clients_at_work} clients have not ended"
        hosts = self.cluster.up()
        if len(hosts) < len(self.nodes) or any(host.api is None for host in hosts):
            return "a node is down"
        unready = [host.node for host in hosts if not host.api.is_ready]
        if unready:
            return f"nodes {unready} are not ready"
        leaving = [host.node for host in hosts if host.api.liveness.is_leaving(host.node, host.api.incarnation)]
        if leaving:
            return f"nodes {leaving} are about to stop"
        levels = {int(host.api.state.feature_level) for host in hosts}
        if self.scenario.cluster.upgrades and levels != {LEVEL_TWO}:
            return f"every node knows feature level {LEVEL_TWO}, and the cluster is at {levels}"
        hanging = [t.transactional_id for t in hosts[0].api.state.transactions.values() if t.partitions or t.offsets]
        if hanging:
            return f"transactions of {hanging} have not ended"
        for known in [*self.world.partitions, *self.world.ledgers, *self.world.mirrored]:
            ends, compacted = [], set()
            for host in hosts:
                part = host.api.state.partition(known.pid)
                if part is None:
                    if known.dropped:
                        continue
                    return f"{known.key} is missing on node {host.node}"
                if self.world.keys and known not in self.world.mirrored and awaits_a_pass(part):
                    return f"{known.key} awaits a pass of its compaction"
                if part.is_opening:
                    return f"{known.key} is not open for producers yet"
                compacted.add((part.compactions, part.compacted_end))
                status = host.api.replica_status(known.pid)
                if status is not None:
                    ends.append((host.node, status))
            if any(not s.hwm == s.appended_end == s.verified_end for _, s in ends):
                seen = [(n, s.hwm, s.appended_end, s.verified_end, s.epoch) for n, s in ends]
                return f"{known.key}: (node, hwm, appended, verified, epoch) are {seen}"
            if len({(s.hwm, s.epoch, s.log_start) for _, s in ends}) > 1:
                return f"{known.key}: hwm or epoch differ: {[(n, s.hwm, s.epoch) for n, s in ends]}"
            if len(compacted) > 1:
                return f"{known.key}: nodes know of these compactions, and of them up to there: {sorted(compacted)}"
            if ends and not any(s.is_leader for _, s in ends):
                return f"{known.key} has no leader"
            for host in hosts:
                replica = host.api.replicas.get(known.pid)
                if replica is not None and replica.log.is_installing:
                    return f"{known.key} on node {host.node} is installing a segment"
                if replica is not None and (behind := lowest_behind(replica)) is not None:
                    return f"{known.key} on node {host.node} has other bytes at {behind[:2]} than were agreed"
        return None

    def _final_work(self) -> None:
        """Probes of every kind, agreement again, then the full read. What the storm has written last may have to go
        first: retention looks at a partition periodically, and at what Raft's mark has passed."""
        profile = self.scenario.cluster
        if profile.retention_records or profile.retention_ms or profile.retention_bytes:
            self.scheduler.run_for_ms(RETENTION_MS_MAX)
        if self._run_script(self._probes(), "probes") and self._settle("converged after the probes"):
            self._run_script(self._read_all(), "the final read")
            if self.world.keys and self._settle("converged after the final read"):
                for known in [*self._live(), *self.world.ledgers]:
                    self.observer.note_compacted(known.key, known.pid, self.world.keys)
            for host in self.cluster.up():
                self.observer.note_digest(host.api, host.api.applied.index)
                self.observer.note_addresses(host.api)

    def _run_script(self, script: Script, what: str) -> bool:
        ended: list[bool] = []
        Actor(self.net, script, lambda: ended.append(True))
        if not self.scheduler.run_for_ms(FINAL_MS_MAX, stop=lambda: bool(ended)):
            self.recorder.note("settled", ok=False, why=f"{what} did not end in {FINAL_MS_MAX} ms")
            return False
        return True

    def _live(self) -> list[Known]:
        return [known for known in self.world.partitions if not known.dropped]

    def _probes(self) -> Script:
        has_room = not self.scenario.clients.crowds  # otherwise a new idempotent producer may be one too many
        producer = Producer(self.world, "probe", acks=Acks.ALL, idempotent=has_room, think_ms=0)
        ranges = RangeReader(self.world, "probe-range", think_ms=0)
        member = GroupMember(self.world, "probe-member", "g", think_ms=0)
        watcher = LagWatcher(self.world, "probe-lag", "g", think_ms=0)
        for known in self._live():
            yield from producer.send(known)
            yield from ranges.range(known)
            yield from ranges.time(known)
            yield from member.commit(known)
            yield from member.fetch(known)
            yield from watcher.probe(known)
        if self.scenario.clients.members:
            yield from GroupConsumer(self.world, "probe-group").probe()
        if self.scenario.clients.consumer_members:
            yield from probe_consumers(self.world)
        for known in self._live():
            yield from self._elect_preferred(known)

    def _elect_preferred(self, known: Known) -> Script:
        """While all nodes are healthy, an operator gets the preferred leader through whichever node."""
        reached = self.cluster.hosts[self.streams.stream(f"probe-election/{known.key}").choice(self.nodes)]
        started_ns = self.scheduler.now_ns
        while self.scheduler.now_ns - started_ns < ELECT_MS_MAX * NS_PER_MS:
            state = self.observer.freshest().state
            part = state.partition(known.pid)
            if part is None or part.replicas[0] not in self.nodes or part.leader == part.replicas[0]:
                return
            if state.nodes[part.replicas[0]].drained:
                return  # nothing waits for the end of a drain
            reached.api.request_preferred_leader(known.pid)
            yield Sleep(ELECT_RETRY_MS)
        self.recorder.note("settled", ok=False, why=f"{known.key} is not led by its preferred replica")

    def _read_all(self) -> Generator[Any, Any, None]:
        reader = Consumer(self.world, "final", think_ms=0)
        for known in self._live():
            self._learn_replicas(known)
            for node in known.replicas:
                if node not in self.nodes:
                    continue
                yield from reader.read_all(known, node)
        for known in self.world.ledgers:
            self._learn_replicas(known)
        ledger = LedgerReader(self.world, "final-ledger", think_ms=0)
        yield from ledger.read_all()
        yield from ledger.read_offsets([f"tx-{n}" for n in range(self.scenario.clients.transactors // SHARERS)])
        mirror = Mirror(self.world, 0, think_ms=0)
        for known in self.world.mirrored:
            self._learn_replicas(known)
            for node in known.replicas:
                if node in self.nodes:
                    yield from mirror.read_all(known, node)
        self.observer.sample()  # log starts that the final read met

    def _result(self) -> Result:
        violations = judge(self.recorder.events)
        counts = self.observer.counts
        counts["damaged_messages_refused"] = self.cluster.network.damage_refused
        counts["duplicates_answered"] = self.world.duplicates
        counts["producers_refused"] = self.world.producers_refused
        counts["log_starts_moved"] = sum(1 for e in self.recorder.events if e["f"] == "trim" and e["ty"] == "ok")
        return Result(
            seed=self.seed,
            scenario=self.scenario.name,
            violations=violations,
            virtual_s=self.scheduler.now_ns / 1e9,
            operations=sum(1 for event in self.recorder.events if event["ty"] == "invoke"),
            acked=self.world.pace.acked,
            events=self.scheduler.executed,
            counts=counts,
            history=self.recorder.events,
            trace=self.trace,
            strikes=tuple(self.storm.strikes),
        )


def simulate(
    scenario: Scenario, seed: int, *, trace: bool = False, schedule: tuple[Strike, ...] | None = None
) -> Result:
    """Runs one seed to its verdict; the strikes of a schedule, if given, replace the seed's own."""
    with silence(), uncollected(), level_two() if scenario.cluster.upgrades else nullcontext():
        return Simulation(scenario, seed, trace=trace, schedule=schedule).run()
