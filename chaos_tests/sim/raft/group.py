"""Whole Raft groups of production engines in one process under a seed: faults, and what must hold nevertheless.

It finds what the simulation of whole clusters cannot. It reads every message on the wire and compares it with the
sender's disk at that moment. It makes small what is large in production (messages of 40 bytes, chunks of 100, windows
of 800, a snapshot every 25 entries), so that each seed meets the edges within seconds. It crashes a node at a chosen
step, repeats votes, runs five nodes, and tests build histories with it step by step. Bugs that only it is sure to find
are in planted.py.

Owns the little world around the engines: the simulation's clock, network and disk, a state machine that is only
a history, a client that proposes, and the checks. The faults are in faults.py; seeds.py runs many seeds.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from smq.raft_state.ids import DiskId, LogIndex, NodeId
from smq.raft_state.replies import Applied, Done
from smq.replication.ports import Buffer, Channel, Committed, ProposalLost, Table
from smq.replication.raft.messages import Append, AppendReply, Message, RequestVote, SnapshotChunk, Vote, decode
from smq.replication.raft.raft import Raft
from smq.replication.raft.timing import RaftTiming
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.disk import DiskImage, FakeDisk
from smq.testing.virtual.network import LinkProfile, SimNetwork, SimPort
from smq.testing.virtual.rng import Streams

SETTLE_MS = 15_000  # after the last fault: pending keep-alives (3 s), an election or two, catching up


class Violation(AssertionError):
    """Something that must never happen has happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. `calm` runs without faults other than those a test injects."""

    seed: int
    nodes: int = 3
    faults_ms: int = 8_000
    calm: bool = False
    inspects_wire: bool = True
    timing: RaftTiming = field(default_factory=lambda: RaftTiming(snapshot_entries=25))
    repeats_votes: bool = False  # the network delivers votes twice, which no real session does
    tick_ms: float = 20.0
    only: tuple[str, ...] = ()  # these faults, where any are named, and often
    disk_latency_ms: tuple[float, float] | None = None  # None: drawn


class History:
    """The state machine: nothing but what was applied, and at which index."""

    def __init__(self, world: "World", node: NodeId) -> None:
        self._world = world
        self._node = node
        self.entries: list[tuple[int, str]] = []
        self._disks: dict[NodeId, DiskId] = {}
        self._unsettled = 0

    def apply(self, index: LogIndex, command: bytes) -> Applied:
        if self._unsettled:
            raise Violation(f"entry {index} is applied before the one before it has settled")
        self._unsettled = index % 4
        self.entries.append((index, command.decode()))
        self._note_disk(command.decode())
        self._world.note_applied(self._node, index, command.decode())
        return Applied(reply=Done())

    def pass_over(self, index: LogIndex) -> None:
        self._world.committed_max = max(self._world.committed_max, index)

    def disks(self) -> dict[NodeId, DiskId]:
        """Those that were registered: by the command `registration` makes. Asked for several times in each turn."""
        return self._disks

    def _note_disk(self, command: str) -> None:
        if command.startswith("disk "):
            _, node, disk = command.split()
            self._disks[NodeId(int(node))] = DiskId(bytes.fromhex(disk))

    def snapshot(self) -> Iterator[bytes]:
        """In three pieces. An entry applied between two of them would lie in one and not in the other."""
        for part in range(3):
            text = json.dumps(self.entries)
            yield text[part * len(text) // 3 : (part + 1) * len(text) // 3].encode()

    def settle(self) -> bool:
        """In up to three steps, by the entry's number."""
        self._unsettled = max(self._unsettled - 1, 0)
        return not self._unsettled

    def restore(self, index: LogIndex, snapshot: bytes) -> Iterator[None]:
        """In a few steps, before and behind the one that replaces the state."""
        self._unsettled = 0
        for _ in range(index % 9):
            yield
        self.entries, self._disks = [(i, command) for i, command in json.loads(snapshot)], {}
        for i, command in self.entries:
            self._note_disk(command)
            self._world.note_applied(self._node, i, command)
        if self.entries and self.entries[-1][0] > index:
            raise Violation(f"a snapshot of index {index} holds entry {self.entries[-1][0]}")
        for _ in range(index % 7):
            yield


def registration(host: "Host") -> str:
    """The command that makes the host's present disk its voter."""
    return f"disk {host.node} {host.disk_id.hex()}"


class Host:
    """One node: a machine with a disk, and the process that runs on it, if one does."""

    def __init__(self, world: "World", node: NodeId) -> None:
        self.world = world
        self.node = node
        self.replace_disk()
        self.machine = Machine(rate=world.rng.choice([1.0, 1.001, 0.999]))
        self.steps_left: int | None = None
        self.starts = 0
        self.fatal: list[BaseException] = []
        self.process: Process | None = None
        self.disk: FakeDisk
        self.engine: Raft
        self.history: History
        self.port: SimPort

    def replace_disk(self) -> None:
        """By an empty one. The next process runs on it."""
        self.image = DiskImage()
        self.disk_id = DiskId(self.world.streams.stream(f"disk id/{self.node}").randbytes(16))

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def is_running(self) -> bool:
        return self.is_up and self.process is not None and not self.process.paused

    def start(self) -> None:
        world, self.starts = self.world, self.starts + 1
        process = Process(world.scheduler, f"node{self.node}", self._on_error)
        process.on_step = self._on_step
        self.process, self.steps_left = process, None
        clock = SimClock(process, self.machine)
        self.disk = FakeDisk(
            clock,
            world.streams.stream(f"disk/{self.node}"),
            image=self.image,
            latency_ms=world.disk_latency_ms,
            on_fatal=self._on_fatal,
        )
        self.history = History(world, self.node)
        self.port = SimPort(world.network, self.node, process)
        self.engine = Raft(
            node_id=self.node,
            peers=[peer for peer in world.nodes if peer != self.node],
            clock=clock,
            rng=world.streams.stream(f"engine/{self.node}"),
            disk=self.disk,
            machine=self.history,
            send=self._send,
            flush=lambda: None,
            timing=world.plan.timing,
            disk_id=lambda: self.disk_id,
            registered_disk=lambda node: self.history.disks().get(node),
            born_disk=world.born.get,
            on_leader_change=lambda: world.trace(f"{self.node} follows {self.engine.leader} in {self.engine.term}"),
            on_fatal=self._on_fatal,
        )

        def begin() -> None:
            for _ in self.engine.start():
                pass
            self.port.start(self)
            tick()

        def tick() -> None:
            self.engine.tick()
            clock.call_later(world.plan.tick_ms, tick)

        clock.call_soon(begin)

    def crash(self, *, silently: bool) -> None:
        if not self.is_up or self.process is None:
            return
        self.world.trace(f"crash {self.node}")
        self.process.kill()
        self.image = self.disk.crash()
        self.world.network.detach(self.node, silently=silently)

    def _on_step(self) -> bool:
        if self.steps_left is None:
            return False
        self.steps_left -= 1
        if self.steps_left > 0:
            return False
        self.crash(silently=True)
        return True

    def _on_error(self, error: Exception) -> None:
        raise error

    def _on_fatal(self, error: BaseException) -> None:
        self.fatal.append(error)
        if isinstance(error, OSError):
            self.crash(silently=False)
        elif not self.world.plan.calm:
            raise error

    # --------------------------------------------------------------------------------------------------- network
    def on_session_open(self, peer: NodeId, channel: Channel) -> None:
        if channel is Channel.CONTROL:
            self.engine.on_session_open(peer)

    def on_session_close(self, peer: NodeId, channel: Channel) -> None:
        if channel is Channel.CONTROL:
            self.engine.on_session_close(peer)

    def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        self.engine.on_message(peer, payload)

    def _send(self, peer: NodeId, parts: Sequence[Buffer]) -> None:
        payload = b"".join(parts)
        message = decode(payload)
        self.world.note_sent(self, peer, message)
        self.port.send(peer, Channel.CONTROL, [payload])
        if isinstance(message, Vote) and self.world.plan.repeats_votes:
            self.port.send(peer, Channel.CONTROL, [payload])


class Network(SimNetwork):
    """Also forgets a session that was ending already when the last of its two processes died."""

    def detach(self, node: NodeId, *, silently: bool) -> None:
        ending = [session for key in self._keys_of(node) if (session := self._sessions.get(key)) is not None]
        super().detach(node, silently=silently)
        for session in ending:
            self._forget_if_closed(session)


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.streams = Streams(plan.seed)
        self.rng: Random = self.streams.stream("world")
        self.scheduler = Scheduler()
        self.nodes = tuple(NodeId(n + 1) for n in range(plan.nodes))
        self.digest = hashlib.sha256()
        # Every run is another mixture (swarm testing): some faults often, some never, fast and slow disks and links.
        drawn_ms = self.rng.choice([(0.1, 1.0), (0.1, 4.0), (1.0, 25.0), (0.1, 120.0)])
        self.disk_latency_ms = plan.disk_latency_ms or drawn_ms
        self.proposal_gap_ms = self.rng.choice([3.0, 12.0, 40.0])
        delay_ms, tail_probability = self.rng.choice([0.1, 0.5, 3.0, 20.0]), self.rng.choice([0.0, 0.01, 0.1])
        if plan.calm:
            delay_ms, tail_probability = 0.1, 0.0
        profile = LinkProfile(delay_ms_mean=delay_ms, reconnect_ms_max=40.0, tail_probability=tail_probability)
        self.network = Network(self.scheduler, self.streams, self.nodes, profile, self.trace)
        self.hosts = {node: Host(self, node) for node in self.nodes}
        self.born = {node: host.disk_id for node, host in self.hosts.items()}  # the disks of the first start
        self.leader_of_term: dict[int, NodeId] = {}
        self.votes: dict[tuple[NodeId, int], NodeId] = {}  # (voter, term) -> candidate
        self.applied: dict[int, str] = {}  # index -> command, over all nodes
        self.acked: dict[str, int] = {}  # command -> index
        self.refused: set[str] = set()  # definitely not in the log
        self.proposed = 0
        self.committed_max = 0  # the highest index that any node has applied
        self.reads = 0  # read indexes that were given
        self.is_faulty = True
        for host in self.hosts.values():
            host.start()

    def trace(self, line: str) -> None:
        self.digest.update(f"{self.scheduler.now_ns} {line}\n".encode())

    # ---------------------------------------------------------------------------------------------------- checks
    def note_applied(self, node: NodeId, index: int, command: str) -> None:
        self.trace(f"apply {node} {index} {command}")
        self.committed_max = max(self.committed_max, index)
        if self.applied.setdefault(index, command) != command:
            raise Violation(f"index {index}: node {node} applied {command}, another {self.applied[index]}")
        if command in self.refused:
            raise Violation(f"{command} was refused for good and is applied at {index}")

    def note_sent(self, host: Host, peer: NodeId, message: Message) -> None:
        if isinstance(message, Append | SnapshotChunk):
            leader = self.leader_of_term.setdefault(message.term, host.node)
            if leader != host.node:
                raise Violation(f"two leaders in term {message.term}: {leader} and {host.node}")
        if isinstance(message, Vote | RequestVote):
            candidate = peer if isinstance(message, Vote) else host.node
            if self.votes.setdefault((host.node, message.term), candidate) != candidate:
                raise Violation(f"{host.node} votes twice in term {message.term}")
        if self.plan.inspects_wire:
            check_is_durable(host, peer, message)

    def propose(self, node: NodeId) -> None:
        """One command, never the same again."""
        self.proposed += 1
        command = f"{self.proposed}-{'x' * self.rng.choice([0, 0, 0, 30, 300])}"
        answered = False

        def done(outcome: Committed | ProposalLost) -> None:
            nonlocal answered
            if answered:
                raise Violation(f"{command} was answered twice")
            answered = True
            self.note_answer(command, outcome)

        self.hosts[node].engine.propose(command.encode(), done)

    def read(self, node: NodeId) -> None:
        """Whatever index is given covers all that any node had applied when it was asked for."""
        committed, answered = self.committed_max, False

        def done(outcome: LogIndex | ProposalLost) -> None:
            nonlocal answered
            if answered:
                raise Violation("a read was answered twice")
            answered = True
            self.trace(f"read {node} {outcome}")
            if not isinstance(outcome, ProposalLost):
                self.reads += 1
                if outcome < committed:
                    raise Violation(f"a stale read: index {outcome} for what began when {committed} was committed")

        self.hosts[node].engine.read_index(done)

    def check_quorum(self, leader: Host) -> None:
        """What a leader says of its voters is true of their disks. A voter that has adopted its term keeps in this term
        what it acknowledged in it. While a snapshot replaces a journal, no index of the new one is on disk yet."""
        quorum = leader.engine.quorum()
        assert quorum is not None, "the node leads"
        now_ms = max(replica.caught_up_ms for replica in quorum.voters if replica.node == leader.node)
        for replica in quorum.voters:
            host = self.hosts[replica.node]
            is_same = host.is_running and host.engine.term == quorum.term and host.disk_id == replica.disk
            durable = host.engine.journal.durable_index if is_same and host is not leader else 0
            if durable and replica.end > durable + 1:
                raise Violation(f"voter {replica.node} is said to have {replica.end - 1} entries on its disk")
            if max(replica.heard_ms, replica.caught_up_ms) > now_ms:
                raise Violation(f"voter {replica.node} was heard in the future")

    def note_answer(self, command: str, outcome: Committed | ProposalLost) -> None:
        if isinstance(outcome, Committed):
            self.trace(f"ack {command} {outcome.index}")
            if self.applied.get(outcome.index) != command:
                raise Violation(f"{command} acknowledged at {outcome.index}, which holds something else")
            self.acked[command] = outcome.index
        elif outcome is ProposalLost.NOT_LEADER:
            self.refused.add(command)

    # ---------------------------------------------------------------------------------------------------- driving
    def leader(self) -> Host | None:
        leaders = [h for h in self.hosts.values() if h.is_running and h.engine.is_leader]
        return max(leaders, key=lambda h: h.engine.term, default=None)

    def run_ms(self, ms: float, stop: Callable[[], bool] | None = None) -> bool:
        return self.scheduler.run_for_ms(ms, stop=stop)

    def start_client(self) -> None:
        def step() -> None:
            up = [host for host in self.hosts.values() if host.is_running]
            leaders = [host for host in up if host.engine.is_leader]
            chosen = leaders if leaders and self.rng.random() < 0.95 else up
            for _ in range(self.rng.choice([1, 1, 1, 2, 8])):
                if chosen:
                    self.propose(self.rng.choice(chosen).node)
            for host in leaders:
                self.read(host.node)
                self.check_quorum(host)
            if self.is_faulty:
                self.scheduler.after_ms(self.rng.expovariate(1 / self.proposal_gap_ms), step)

        step()

    def run(self, schedule_faults: Callable[["World"], None]) -> "World":
        """Faults for a while, then peace; everything that was acknowledged must be everywhere."""
        self.start_client()
        if not self.plan.calm:
            schedule_faults(self)
        self.run_ms(self.plan.faults_ms)
        self.is_faulty = False
        self.heal()
        self.settle()
        return self

    def heal(self) -> None:
        self.trace("heal")
        self.network.heal_all()
        self.network.profile.delay_ms_mean, self.network.profile.tail_probability = 0.1, 0.0
        self.disk_latency_ms = (0.1, 1.0)
        for host in self.hosts.values():
            if host.process is not None and host.process.paused:
                host.process.resume()
                self.network.resumed(host.node)
            host.steps_left = None
            host.disk.latency_ms = self.disk_latency_ms
            if not host.is_up:
                host.start()

    def settle(self) -> None:
        """Progress after the heal, reads included, then equal histories that hold every acknowledged command."""
        acked_before, reads_before = len(self.acked), self.reads

        def is_settled() -> bool:
            hosts = list(self.hosts.values())
            if (
                len(self.acked) <= acked_before
                or self.reads <= reads_before
                or any(host.engine.applied_index == 0 for host in hosts)
            ):
                return False
            return len({(host.engine.applied_index, host.engine.commit_index) for host in hosts}) == 1

        for _ in range(SETTLE_MS // 100):
            for host in self.hosts.values():
                if not host.is_up:
                    host.start()  # a disk failure that was armed before the heal struck after it
            leader = self.leader()
            if leader is not None and len(self.acked) <= acked_before:
                self.propose(leader.node)
            if leader is not None and self.reads <= reads_before:
                self.read(leader.node)
            if self.run_ms(100, stop=is_settled):
                break
        self.check_final(acked_before, reads_before)

    def check_final(self, acked_before: int, reads_before: int) -> None:
        if len(self.acked) <= acked_before or self.reads <= reads_before:
            states = [(h.node, h.engine.term, h.engine.leader, h.engine.applied_index) for h in self.hosts.values()]
            raise Violation(f"no progress after the heal: {states}")
        histories = {node: host.history.entries for node, host in self.hosts.items()}
        reference = histories[self.nodes[0]]
        for node, entries in histories.items():
            if entries != reference:
                raise Violation(f"node {node} has {len(entries)} entries, node {self.nodes[0]} {len(reference)}")
        present = {command: index for index, command in reference}
        if len(present) != len(reference):
            raise Violation("a command was applied twice")
        for command, index in self.acked.items():
            if present.get(command) != index:
                raise Violation(f"{command} was acknowledged at {index} and is lost")


# ------------------------------------------------------------------------------------------- durability on the wire
def check_is_durable(host: Host, peer: NodeId, message: Message) -> None:
    """No message leaves that a power failure at this moment would make untrue."""
    term, meta, rows = message.term, host.image.tables[Table.RAFT_META], host.image.tables[Table.RAFT_LOG]
    stored_term, voted_for = struct.unpack_from(">QQ", meta[b"vote"], 5) if b"vote" in meta else (0, 0)
    if isinstance(message, RequestVote | Vote | AppendReply | Append | SnapshotChunk) and stored_term < term:
        raise Violation(f"{host.node} speaks in term {term}, on its disk is {stored_term}")
    if isinstance(message, RequestVote) and (stored_term, voted_for) != (term, host.node) and stored_term == term:
        raise Violation(f"{host.node} asks for votes before its own is on disk")
    if isinstance(message, Vote) and (stored_term, voted_for) != (term, peer) and stored_term == term:
        raise Violation(f"{host.node} votes for {peer} before that is on disk")
    # An answer of a term that is over describes the past, as if the network had held it back: a later leader's
    # truncation may have reached the disk in the same commit as the entries. Within a term nothing is taken back.
    if isinstance(message, AppendReply) and message.success and message.next_index > 1 and term == stored_term:
        first, last = struct.unpack_from(">QQ", meta[b"journal"], 5)
        if last < message.next_index - 1 or len(rows) != last - first + 1:
            raise Violation(f"{host.node} acknowledges {message.next_index - 1}, on its disk are {first}..{last}")
