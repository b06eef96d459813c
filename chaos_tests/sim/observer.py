"""Observes the nodes of a run: leaders, applied entries and rare events.

Owns the observations in the history (the observer's notes) and the counters. It only reads: a run takes the same course
with it and without it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Any
from zlib import crc32

from chaos_tests.checkers.compaction import LATE_RECORDS_MAX
from chaos_tests.checkers.membership import SESSION_MS
from chaos_tests.history import Recorder
from chaos_tests.sim.cluster import Cluster, SimHost
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.lag_monitor import LagMonitor
from smq.raft_state.cluster_config import CONSUMER_SESSION_MS, PRODUCER_EXPIRATION_MS
from smq.raft_state.command_codec import decode_command
from smq.raft_state.commands import Assignment, AssignOffsets, Partitions
from smq.raft_state.ids import Incarnation, LogIndex, NodeId, Offset, PartitionId, RequestId
from smq.raft_state.replies import Applied, HwmsAdvanced, LeaderElected, OffsetsAssigned
from smq.raft_state.state import ClusterState, GroupKind, GroupState, PartitionState
from smq.raft_state.topic_config import retention
from smq.records import decode_batch, parse_header
from smq.replication.api import Cancel, DoneFn
from smq.replication.commands.applied_state import AppliedState
from smq.replication.commands.proposer import _Pending
from smq.replication.log.compaction import segment_writer
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.segments import HeldSegments
from smq.replication.node import Node
from smq.replication.node_config import NodeConfig
from smq.replication.ports import Channel, Clock, DataDamaged
from smq.testing.virtual.loop import SimLoop

DIGEST_EVERY = 40  # applied indexes between two digests of a node: a digest costs about as much as 20 applies
SAMPLE_MS = 200.0
BATCHES_ABOVE_BOUND = 600  # bytes: each half of a node's queue ends at most one batch above its bound
SEGMENTS_QUEUED = 2  # a compaction's own, and a fetched one
BACKLOGS_NOTED = 5  # of a compacted log
GROUP_DELAY_MS = 200  # an empty group waits this long for more members

RARE = (
    "leader_changes",
    "leader_changes_with_tail",
    "truncations",
    "snapshots_taken",
    "snapshot_installs",
    "damage_met",
    "quick_restarts_of_a_leader",
    "duplicates_answered",
    "producers_expired",
    "producers_refused",
    "hwm_of_a_dead_epoch_rejected",
    "log_starts_moved",
    "records_compacted_away",
    "control_batches_removed",
    "damaged_messages_refused",
    "levels_raised",
    "waits_for_an_upgrade",
)


class Observer:
    """One per run."""

    def __init__(
        self, recorder: Recorder, *, producer_expiration_ms: int = 0, keys: int = 0, has_consumers: bool = False
    ) -> None:
        """Every node's state begins with this expiration, if it is not 0. `keys`: of the records, if topics are
        compacted. `has_consumers`: there are consumer groups, which then have short sessions."""
        self.recorder = recorder
        self.producer_expiration_ms = producer_expiration_ms
        self.keys = keys
        self.has_consumers = has_consumers
        self.counts: Counter[str] = Counter()
        self.cluster: Cluster | None = None
        self._entries: dict[int, tuple[int, NodeId]] = {}
        self._leaders: dict[int, NodeId] = {}
        self._marks: dict[str, dict[int, tuple[int, int, int]]] = {}
        self._log_starts: dict[PartitionId, Offset] = {}  # that any node has applied
        self._elected_index: set[int] = set()
        self._dead_advances: set[int] = set()
        self._over_bound: set[tuple[NodeId, int]] = set()  # processes
        self._consumers: dict[str, tuple[int, Any]] = {}  # by group: at which index, and what was noted
        self._waiting: set[tuple[NodeId, int]] = set()  # processes that wait for an upgrade
        self._noted: dict[tuple[NodeId, int], int] = {}  # the last anomaly of each process that is in the history
        self._fenced: set[tuple[NodeId, Incarnation]] = set()  # processes that were ever fenced
        self._damage: dict[tuple[NodeId, int], int] = {}  # batches and index rows found damaged by each process

    # ------------------------------------------------------------------------------------------ nodes
    def factory(self, config: NodeConfig, **parts: Any) -> "WatchedNode":
        return WatchedNode(self, config, **parts)

    def on_applied(self, node: "WatchedNode", index: LogIndex, command: bytes, applied: Applied) -> None:
        checksum = crc32(command)
        first = self._entries.setdefault(index, (checksum, node.node_id))
        if first[0] != checksum:
            self.recorder.note("entry", n=first[1], i=index, d=first[0])
            self.recorder.note("entry", n=node.node_id, i=index, d=checksum)
        if index % DIGEST_EVERY == 0:
            self.note_digest(node, index)
        if self.has_consumers:
            self._note_consumers(node.state, index)
        self._fenced.update((known.node, known.incarnation) for known in node.state.nodes.values() if known.fenced)
        if isinstance(applied.reply, HwmsAdvanced) and not all(applied.reply.accepted):
            self._dead_advances.add(index)
            self.counts["hwm_of_a_dead_epoch_rejected"] = len(self._dead_advances)
        for pid in applied.touched:
            part = node.state.partition(pid)
            if part is not None and part.log_start > self._log_starts.get(pid, 0):
                self._log_starts[pid] = part.log_start  # before any log is trimmed to it
                self._note_local(node, index, part)
            if part is not None:
                self._note_kept(node, part)
        if isinstance(applied.reply, LeaderElected) and index not in self._elected_index:
            self._elected_index.add(index)
            self.counts["leader_changes"] += 1
            self._count_tail(applied)

    def _count_tail(self, applied: Applied) -> None:
        """Counts the election if some replica holds more than the new epoch starts with."""
        assert self.cluster is not None
        reply = applied.reply
        assert isinstance(reply, LeaderElected)
        for host in self.cluster.up():
            for pid in applied.touched:
                replica = host.api.replica_status(pid) if host.api is not None else None
                if replica is not None and replica.appended_end > reply.start:
                    self.counts["leader_changes_with_tail"] += 1
                    return

    def fenced(self) -> frozenset[tuple[NodeId, Incarnation]]:
        return frozenset(self._fenced)

    def note_digest(self, node: "WatchedNode", index: LogIndex) -> None:
        self.recorder.note("digest", n=node.node_id, i=index, d=node.watched.digest())

    def note_compacted(self, key: str, pid: PartitionId, keys: int) -> None:
        """The bytes of every replica up to the high water mark that all nodes have applied, and how much of what is
        compacted is older than a record of the same key."""
        assert self.cluster is not None
        states = [host.api.state.partition(pid) for host in self.cluster.up()]
        stop = min((part.hwm for part in states if part is not None), default=Offset(0))
        for host in self.cluster.up():
            log = host.api.replicas.log(pid)
            part = host.api.state.partition(pid)
            if log is None or part is None or log.appended_end <= part.log_start:
                continue
            total, at, newest, records, markers = sha256(), part.log_start, {}, 0, 0
            sizes: list[tuple[Offset, int]] = []
            while at < stop:
                for stored in log.read(at, stop, 1 << 20):
                    total.update(stored.value)
                    sizes.append((max(stored.base, part.log_start), len(stored.value)))
                    at = stored.end
                    header = parse_header(stored.batch)
                    markers += header.is_control and at <= part.compacted_end
                    for record in decode_batch(stored.batch) if header.count and not header.is_control else ():
                        if part.log_start <= record.offset < part.compacted_end:
                            newest[record.key] = record.offset
                            records += 1
            self.recorder.note("log-digest", n=host.node, k=key, d=total.hexdigest())
            for place in range(0, len(sizes), 1 + len(sizes) // BACKLOGS_NOTED):
                at, stored_size = sizes[place][0], sum(size for _, size in sizes[place:])
                with suppress(DataDamaged):  # an index row that nothing has read since it rotted
                    size = log.backlog_bytes(at, stop)
                    self.recorder.note("backlog", n=host.node, k=key, o=at, size=size, stored=stored_size)
            self.recorder.note("compacted", n=host.node, k=key, twice=records - len(newest), left=_left(part))
            left_there = records + markers
            self.counts["records_compacted_away"] += max(0, part.compacted_end - part.log_start) - left_there

    def awaited_segments(self, pids: Iterable[PartitionId]) -> int:
        """Of these partitions, as the freshest node knows them."""
        assert self.cluster is not None
        node, logs = self.freshest(), [host.api.replicas for host in self.cluster.up()]
        parts = [] if node is None else [node.state.partition(pid) for pid in pids]
        held = [[log.segments for of in logs if (log := of.log(part.pid)) is not None] for part in parts if part]
        return sum(count_awaited(part, found) for part, found in zip(filter(None, parts), held, strict=True))

    def note_addresses(self, node: "WatchedNode") -> None:
        """What clients of the outside get from this node."""
        for number, known in sorted(node.state.nodes.items()):
            self.recorder.note("told", n=node.node_id, of=number, seen=[x.kafka_address for x in known.listeners])

    # ------------------------------------------------------------------------------------------ samples
    def sample(self) -> None:
        """Notes the leaders and marks of all running nodes as they are now."""
        assert self.cluster is not None
        for host in self.cluster.up():
            if host.api is not None and host.process is not None and not host.process.paused:
                self._sample_node(host)

    def _sample_node(self, host: SimHost) -> None:
        assert self.cluster is not None
        node = host.api
        self._check_queue(host)
        self._take_anomalies(host)
        if damage := node.replicas.repairs.counts.found:
            self._damage[host.node, host.starts] = damage
            self.counts["damage_met"] = sum(self._damage.values())
            if not host.image.is_damaged:
                self.recorder.note("false-damage", n=host.node, found=damage)
        if node.engine.is_leader:
            term = int(node.engine.term)
            if self._leaders.setdefault(term, host.node) != host.node:
                self.recorder.note("lead", n=self._leaders[term], term=term)
                self.recorder.note("lead", n=host.node, term=term)
        if node.waiting and (host.node, host.starts) not in self._waiting:
            self._waiting.add((host.node, host.starts))
            self.counts["waits_for_an_upgrade"] += 1
            self.recorder.note("waits", n=host.node, known=host.has_known, why=node.waiting)
        if node.waiting and any(self._is_connected(host.node, peer) for peer in self.cluster.hosts):
            self.recorder.note("died", n=host.node, err="it waits for an upgrade, and has a session with another node")
        self.counts["levels_raised"] |= node.state.feature_level > 1
        index = int(node.applied.index)
        for topic in node.state.topics.values():
            for part in topic.partitions:
                self._note_local(node, index, part)

    def _note_local(self, node: "WatchedNode", index: int, part: PartitionState) -> None:
        """What a node has applied of a partition, once for each index."""
        assert self.cluster is not None
        state, mark = node.state, (part.hwm, part.log_start, part.epoch)
        key = f"{state.topic_names[part.topic_id]}/{part.index}"
        known = self._marks.setdefault(key, {})
        if known.get(index) != mark:
            known[index] = mark
            self.recorder.note(
                "local",
                n=node.node_id,
                inc=self.cluster.hosts[node.node_id].starts,
                i=index,
                k=key,
                hwm=part.hwm,
                lo=part.log_start,
                epoch=part.epoch,
                clock=state.expiry_clock_ms,
            )

    def _note_kept(self, node: "WatchedNode", part: PartitionState) -> None:
        """The committed bytes that a moved log start leaves, of a topic with a limit of bytes, as the leader counts
        them before it deletes anything."""
        replica, name = node.replicas.get(part.pid), node.state.topic_names[part.topic_id]
        limits = retention(node.state.topics[name].config)
        if limits is None or limits.bytes is None or replica is None or replica.leading != part.epoch:
            return
        if part.log_start > replica.log.log_start:
            size = replica.log.backlog_bytes(part.log_start, part.hwm)
            key, least = f"{name}/{part.index}", limits.bytes
            self.recorder.note("kept", n=node.node_id, k=key, lo=part.log_start, hwm=part.hwm, size=size, least=least)

    def _note_consumers(self, state: ClusterState, index: int) -> None:
        """The consumer groups that this entry has changed, by the first node that has applied it."""
        for name, group in state.groups.items():
            before, known = self._consumers.get(name, (0, None))
            if group.kind is GroupKind.CONSUMER and index > before:
                found = _owners(state, group)
                self._consumers[name] = (index, found)
                if found != known:
                    self.recorder.note("consumers", g=name, i=index, **found)

    def _take_anomalies(self, host: SimHost) -> None:
        """What the node's own watch has noted."""
        process = (host.node, host.starts)
        for seen in host.api.anomalies():
            if seen.number > self._noted.get(process, 0):
                self._noted[process] = seen.number
                self.recorder.note("watched", n=host.node, kind=seen.kind.value, text=seen.text)

    def _check_queue(self, host: SimHost) -> None:
        """The records that wait for a disk are bounded, whatever the node leads and follows."""
        assert host.disk is not None
        config = host.api.config
        bound = config.append_inflight_bytes_max + config.replica_inflight_bytes_max + BATCHES_ABOVE_BOUND
        bound += SEGMENTS_QUEUED * config.compaction_segment_bytes * 5 // 4 if self.keys else 0
        size = host.disk.queued_record_bytes_peak
        if size > bound and (host.node, host.starts) not in self._over_bound:
            self._over_bound.add((host.node, host.starts))
            self.recorder.note("queue", n=host.node, size=size, bound=bound)

    def _is_connected(self, node: NodeId, peer: NodeId) -> bool:
        assert self.cluster is not None
        return any(self.cluster.network.is_open(node, peer, channel) for channel in Channel)

    # ------------------------------------------------------------------------------------------ leaders
    def freshest(self) -> Any:
        """The running node that has applied the most, or None."""
        assert self.cluster is not None
        nodes = [host.api for host in self.cluster.up() if host.api is not None]
        return max(nodes, key=lambda node: int(node.engine.applied_index), default=None)

    def seen_leaders(self) -> tuple[NodeId | None, list[NodeId]]:
        assert self.cluster is not None
        best: tuple[int, NodeId] | None = None
        for host in self.cluster.up():
            if host.api is not None and host.api.engine.is_leader:
                best = max(best or (-1, host.node), (int(host.api.engine.term), host.node))
        node = self.freshest()
        leaders: list[NodeId] = []
        if node is not None:
            leaders = [part.leader for topic in node.state.topics.values() for part in topic.partitions]
        return (best[1] if best is not None else None), leaders

    def on_started(self, host: SimHost) -> None:
        """Called when a process boots: counts it if the cluster still takes its predecessor for a leader."""
        node = self.freshest()
        if node is None:
            return
        known = node.state.nodes.get(host.node)
        _, leaders = self.seen_leaders()
        if known is not None and not known.fenced and host.node in leaders:
            self.counts["quick_restarts_of_a_leader"] += 1

    def epochs(self) -> dict[str, int]:
        """The epoch of every partition, as the freshest node knows it."""
        node = self.freshest()
        if node is None:
            return {}
        topics = node.state.topics.values()
        return {f"{topic.name}/{part.index}": int(part.epoch) for topic in topics for part in topic.partitions}


class WatchedState(AppliedState):
    """The production state, with every apply, snapshot and restore reported to the observer."""

    node: "WatchedNode"  # set by it

    def apply(self, index: LogIndex, command: bytes) -> Applied:
        applied = super().apply(index, command)
        self.node.observer.on_applied(self.node, index, command, applied)
        return applied

    def snapshot(self) -> Iterator[bytes]:
        self.node.observer.counts["snapshots_taken"] += 1
        return super().snapshot()

    def restore(self, index: LogIndex, snapshot: bytes) -> Iterator[None]:
        if self.node.engine.applied_index:  # otherwise it is the node's own: the engine has just begun
            self.node.observer.counts["snapshot_installs"] += 1
        yield from super().restore(index, snapshot)
        self.node.observer.note_digest(self.node, index)

    def digest(self) -> str:
        return self._machine.digest()


class WatchedNode(Node):
    """The production node with a watched state."""

    def __init__(self, observer: Observer, config: NodeConfig, *, clock: Clock, **parts: Any) -> None:
        self.observer = observer
        self.watched = WatchedState(clock, config.feature_level_known)
        self.watched.node = self
        if observer.producer_expiration_ms:
            self.watched.state.config[PRODUCER_EXPIRATION_MS] = str(observer.producer_expiration_ms)
        if observer.has_consumers:
            self.watched.state.config[CONSUMER_SESSION_MS] = str(SESSION_MS)
        super().__init__(config, clock=clock, applied=self.watched, **parts)
        self.groups = GroupCoordinator(self, self.clock, self.rng, initial_delay_ms=lambda: GROUP_DELAY_MS)
        self.loop = SimLoop(self.clock)  # type: ignore[abstract]  # it has what a loop without sockets needs
        self.calls = NodeCalls(self)
        self.lag_monitor = LagMonitor(self)
        self._callers_until_ns: dict[RequestId, int] = {}  # of assignments that this node took
        self._watch_callers()
        self._watch_proposals()

    def start(self) -> None:
        """Starts a coordinator of groups too."""
        super().start()
        self.groups.start()

    def _watch_callers(self) -> None:
        """Notes the deadlines of callers that share a command: the command itself does not show them."""
        assign = self._external.assign

        def noted(item: Assignment, timeout_ms: int, done: DoneFn[OffsetsAssigned]) -> Cancel:
            self._callers_until_ns[item.request_id] = self.clock.monotonic_ns() + timeout_ms * 1_000_000
            return assign(item, timeout_ms, done)

        self._external.assign = noted

    def _deadline_ns(self, pending: _Pending) -> int:
        """Of the first of its callers to go on."""
        command = None if pending.command is None else decode_command(pending.command, self.config.feature_level_known)
        items = command.items if isinstance(command, AssignOffsets) else ()
        return min((self._callers_until_ns[item.request_id] for item in items), default=pending.until_ns)

    def _watch_proposals(self) -> None:
        """Nothing may be proposed, or proposed again, after its caller's deadline."""
        proposer = self._proposer
        attempt = proposer._attempt

        def watched(pending: _Pending) -> None:
            before = pending.sends
            attempt(pending)
            if pending.sends > before and self.clock.monotonic_ns() > self._deadline_ns(pending):
                self.observer.recorder.note("late-proposal", n=self.node_id)

        proposer._attempt = watched  # type: ignore[method-assign]  # a probe of the simulation


def _owners(state: ClusterState, group: GroupState) -> dict[str, Any]:
    """Of each member its epoch, what it has, and what it is giving up; and the partitions that any of them wants."""

    def keys(partitions: Partitions) -> list[str]:
        return sorted(
            f"{state.topic_names.get(topic_id, topic_id.hex())}/{i}" for topic_id, ids in partitions for i in ids
        )

    names = {name for m in group.members.values() for name in (*m.subscription.topics, *m.subscription.matched)}
    known = [state.topics[name] for name in sorted(names) if name in state.topics]
    return {
        "members": {name: (m.epoch, keys(m.assigned), keys(m.revoking)) for name, m in group.members.items()},
        "wanted": [f"{topic.name}/{part.index}" for topic in known for part in topic.partitions],
    }


def _left(part: PartitionState) -> int:
    """How many records no compaction has looked at."""
    return part.hwm - max(part.compacted_end, part.log_start)


def count_awaited(part: PartitionState, held: Iterable[HeldSegments]) -> int:
    """How many of a partition's segments no log holds, and one more if any is to be compacted again. Their leader gives
    lost ones up one after another."""
    logs = list(held)
    places = [(segment.start, part.segment_end(number), segment.digest) for number, segment in enumerate(part.segments)]
    lost = sum(not any(log.holds(*place) for log in logs) for place in places)
    return lost + any(segment.is_dirty for segment in part.segments)


def awaits_a_pass(part: PartitionState) -> bool:
    """Whether much of a compacted partition is left to its next pass. While a segment's bytes are nowhere there is no
    pass, and the older bytes that take their place are dirty."""
    return _left(part) > LATE_RECORDS_MAX or any(segment.is_dirty for segment in part.segments)


def count_log_events(counts: Counter[str]) -> Callable[[], None]:
    """Counts truncations that cut something, producers that expire, and control batches that compaction removes;
    returns a function that stops the counting."""
    original, original_forget = PartitionLog.truncate, PartitionLog.forget_producers
    original_plain = segment_writer._plain

    def counted(self: PartitionLog, end: Any) -> bool:
        if end < self.appended_end:
            counts["truncations"] += 1
        return original(self, end)

    def counted_forget(self: PartitionLog, start: Any) -> int:
        gone = original_forget(self, start)
        counts["producers_expired"] += gone
        return gone

    def counted_plain(draft: Any) -> Any:
        counts["control_batches_removed"] += draft.header.is_control
        return original_plain(draft)

    segment_writer._plain = counted_plain
    PartitionLog.truncate = counted  # type: ignore[method-assign, assignment]  # a probe of the simulation
    PartitionLog.forget_producers = counted_forget  # type: ignore[method-assign]  # likewise

    def restore() -> None:
        segment_writer._plain = original_plain
        PartitionLog.truncate = original  # type: ignore[method-assign]  # undoes the above
        PartitionLog.forget_producers = original_forget  # type: ignore[method-assign]  # likewise

    return restore
