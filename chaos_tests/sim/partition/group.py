"""One partition on a few nodes, step by step: what no schedule of a whole cluster is sure to draw.

Owns the world of a run: Raft as one list of commands that every node applies with a lag of its own, messages that wait
in the order of their session, proposals that may be committed whenever, elections from any set of seals, disks that
write when they are let. Each step ends with a look at everything that the nodes take for committed. The nodes run
production code; schedules (`chance`) and hand-built courses (`courses`) decide the steps.
"""

import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from chaos_tests.sim.partition.clients import PRODUCE_MS, IdempotentProducer
from chaos_tests.sim.partition.disk_faults import DiskFaults
from chaos_tests.sim.partition.member import Member, Proposal
from chaos_tests.sim.partition.producer_truth import Violation
from chaos_tests.sim.partition.transactions import Transactions
from chaos_tests.sim.partition.truth import Record, Truth
from smq.raft_state.cluster_config import COMMIT_ROUNDS, PRODUCER_EXPIRATION_MS
from smq.raft_state.commands import (
    AdvanceClock,
    AdvanceLogStart,
    AlterClusterConfig,
    AlterTopicConfig,
    ApplyRetention,
    Command,
    CreateTopic,
    ElectLeader,
    RegisterNode,
    Seal,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Incarnation, LogIndex, NodeId, Offset, PartitionIndex, TopicId, partition_id
from smq.raft_state.limits import PRODUCER_EXPIRATION_MS_MIN, default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Rejected, Reply
from smq.raft_state.seals import commit_floor, seals_needed
from smq.raft_state.state import PartitionState
from smq.raft_state.topic_config import (
    CLEANUP_POLICY,
    COMPACT,
    DELETE,
    DELETE_RETENTION_MS,
    MIN_CLEANABLE_DIRTY_RATIO,
    RETENTION_RECORDS,
    BatchRules,
)
from smq.records import encode_batch
from smq.replication.api import Acks, PartitionEnd, Produced
from smq.replication.log.codec import base_of_key
from smq.replication.log.state import partition_key
from smq.replication.membership.controller import RESIGNED_NS
from smq.replication.partition.admission import Offer
from smq.replication.partition.compaction.segments import lowest_behind
from smq.replication.ports import Channel, Table
from smq.testing.virtual.clock import Scheduler

TOPIC: Final = TopicId(b"t" * 16)
END_MS: Final = 5_000
HELD_MS: Final = 1e9
HEAL_TURNS: Final = 800  # 40 s: a node waits up to 30 s for a peer whose answers were late or lost
SCRUB_TURN: Final = 400
TICK_MS: Final = 50.0
STEP_MS: Final = 0.5  # time that a step takes, beside what it asks for


@dataclass(frozen=True, slots=True)
class Report:
    """What a sealed replica has said. It may be used for an election whenever."""

    epoch: Epoch
    node: NodeId
    incarnation: Incarnation
    end: Offset
    good: Offset


class Group(Transactions, DiskFaults):
    def __init__(
        self,
        *,
        nodes: int = 3,
        seed: int = 0,
        rounds: int = 1,
        retention_records: int = 0,
        compacts: bool = False,
        expires: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler()
        self.pid = partition_id(TOPIC, PartitionIndex(0))
        self.members = {NodeId(n): Member(self, NodeId(n)) for n in range(1, nodes + 1)}
        self.truth = Truth(self.pid, list(self.members.values()))
        self.log: list[Command] = []
        self.head = Machine()  # with all of the log applied
        self.proposals: list[Proposal] = []
        self.reports: list[Report] = []
        self.records: list[Record] = []
        self.producers: dict[int, IdempotentProducer] = {}
        self._produced = 0  # also what was refused or parked: each record has a text of its own
        self.sent: dict[tuple[NodeId, NodeId, Channel], deque[bytes]] = {}
        self._errors: list[BaseException] = []
        self._resigned: dict[NodeId, int] = {}
        self.answers = 0  # to questions for the end
        self._without_topic = 0  # entries of Raft's log
        self.append(default_init("group"))
        if rounds != 1:
            self.append(AlterClusterConfig(set_=((COMMIT_ROUNDS, str(rounds)),)))
        if expires:
            self.append(AlterClusterConfig(set_=((PRODUCER_EXPIRATION_MS, str(PRODUCER_EXPIRATION_MS_MIN)),)))
        for registration in [self.start(node) for node in self.members]:
            self.commit(registration)
        self._without_topic = len(self.log)
        config = ((RETENTION_RECORDS, str(retention_records)),) if retention_records else ()
        self.append(
            CreateTopic(
                name="t",
                topic_id=TOPIC,
                partition_count=1,
                replication_factor=nodes,
                start_offset=Offset(0),
                created_ms=0,
                config=config,
            )
        )
        if compacts:
            self.set_compaction()
        self.apply_all()
        self.exchange(*self.members)

    # ------------------------------------------------------------------------------------------ of the members
    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self.members)

    def send(self, source: NodeId, target: NodeId, channel: Channel, payload: bytes) -> bool:
        if not self.is_open(source, target):
            return False
        self.sent.setdefault((source, target, channel), deque()).append(payload)
        return True

    def is_open(self, source: NodeId, target: NodeId) -> bool:
        return source != target and self.members[source].is_up and self.members[target].is_up

    def proposed(self, proposal: Proposal) -> None:
        self.proposals.append(proposal)

    def on_resigned(self, node: NodeId) -> None:
        self._resigned[node] = self.scheduler.now_ns

    def on_error(self, error: BaseException) -> None:
        self._errors.append(error)

    # ------------------------------------------------------------------------------------------ every step
    def run(self, ms: float = STEP_MS) -> None:
        """Lets time pass, and looks."""
        self.scheduler.run_for_ms(ms)
        if self._errors:
            raise self._errors[0]
        self.truth.look()

    @property
    def part(self) -> PartitionState:
        """As of the last entry of Raft."""
        found = self.head.state.partition(self.pid)
        assert found is not None
        return found

    def member(self, node: int) -> Member:
        return self.members[NodeId(node)]

    # ------------------------------------------------------------------------------------------ Raft
    def append(self, command: Command) -> Reply:
        self.log.append(command)
        applied = self.head.apply(LogIndex(len(self.log)), command)
        part = self.head.state.partition(self.pid)
        self.note_transactions()
        if part is not None:
            self.truth.on_committed(part)
        if part is not None and isinstance(command, ApplyRetention) and applied.touched:
            self.truth.on_deleted(part, self.head.state.topics["t"].config.get(RETENTION_RECORDS))
        return applied.reply

    def commit(self, proposal: Proposal) -> Reply:
        """Its command becomes the next entry of Raft's log, for the first time or once more."""
        reply = self.append(proposal.command)
        self.members[proposal.node].expect_reply(len(self.log), proposal, reply)
        return reply

    def commit_number(self, number: int) -> None:
        """By its place among all proposals."""
        if number < len(self.proposals):
            self.commit(self.proposals[number])
            self.run()

    def latest(self, kind: type[Command], *, node: int | None = None) -> Proposal:
        """The latest proposal of this kind. ValueError if there is none."""
        for proposal in reversed(self.proposals):
            if isinstance(proposal.command, kind) and node in (None, proposal.node):
                return proposal
        raise ValueError(f"no node has proposed {kind.__name__}")

    def apply(self, node: int, end: int | None = None, jumps: bool = False) -> None:
        member = self.member(node)
        if member.is_up:
            end = len(self.log) if end is None else end
            if jumps:
                member.jump(end)
            else:
                member.apply_to(end)
            self.run()

    def apply_all(self) -> None:
        for node in self.members:
            self.apply(node)

    def propose(self, command: Command, node: int = 1) -> Proposal:
        """By an operator, or a controller."""
        proposal = Proposal(command, NodeId(node), 0, None)
        self.proposals.append(proposal)
        return proposal

    def set_rounds(self, rounds: int) -> None:
        self.append(AlterClusterConfig(set_=((COMMIT_ROUNDS, str(rounds)),)))

    def set_limit(self, records: int) -> None:
        """Of the partition's records; 0: everything is kept."""
        set_ = ((RETENTION_RECORDS, str(records)),) if records else ()
        self.append(AlterTopicConfig(name="t", set_=set_, unset=() if records else (RETENTION_RECORDS,)))

    def set_compaction(self) -> None:
        """Of the partition, after every batch: the last record of each key stays. Limits delete as before."""
        config = ((CLEANUP_POLICY, f"{COMPACT},{DELETE}"), (MIN_CLEANABLE_DIRTY_RATIO, "0"), (DELETE_RETENTION_MS, "0"))
        self.append(AlterTopicConfig(name="t", set_=config, unset=()))

    def advance_clock(self, ms: int) -> None:
        """That of expiry: producers are forgotten, and transactions aborted."""
        now_ms = self.head.state.expiry_clock_ms
        self.append(AdvanceClock(seen_ms=now_ms, elapsed_ms=ms, now_ms=now_ms + ms))

    def move_log_start(self, offset: Offset) -> None:
        self.append(AdvanceLogStart(partition=self.pid, offset=offset))

    # ------------------------------------------------------------------------------------------ messages
    def deliver(self, source: int, target: int, *, channel: Channel = Channel.DATA, count: int = 1_000) -> int:
        """The next messages of the session. Returns how many there were."""
        waiting, member = self.sent.get((NodeId(source), NodeId(target), channel)), self.member(target)
        delivered = 0
        while waiting and delivered < count and member.is_up:
            payload, peer = memoryview(waiting.popleft()), NodeId(source)
            member.process.soon(partial(member.dispatcher.on_message, peer, channel, payload))
            delivered += 1
        self.run()
        return delivered

    def deliver_on(self, source: int, target: int, channel: str, count: int) -> None:
        self.deliver(source, target, channel=Channel[channel], count=count)

    def exchange(self, *nodes: int, turns: int = 4) -> None:
        """Everything between these nodes arrives, in both directions, and what follows from it."""
        for _ in range(turns):
            for source in nodes:
                for target in nodes:
                    for channel in (Channel.DATA, Channel.CONTROL):
                        self.deliver(source, target, channel=channel)
            self.run(1)

    def drop(self, source: int, target: int) -> None:
        """The session breaks, and what was on its way in it is lost."""
        one, other = NodeId(source), NodeId(target)
        for pair in ((one, other), (other, one)):
            for channel in Channel:
                self.sent.pop((*pair, channel), None)
        for here, there in ((one, other), (other, one)):
            if self.members[here].is_up:
                self.members[here].links.on_session_close(there, Channel.DATA)
                self.members[here].dispatcher.on_session_close(there, Channel.DATA)
        for here, there in ((one, other), (other, one)):
            if self.is_open(here, there):
                self.members[here].replicas.on_session_open(there)

    def open_sessions(self, node: int) -> None:
        for other in self.members:
            if other != node:
                self.drop(node, other)

    # ------------------------------------------------------------------------------------------ processes, disks
    def crash(self, node: int) -> None:
        """What it has sent may still arrive."""
        if self.member(node).is_up:
            self.member(node).crash()
        for (_, target, _), waiting in self.sent.items():
            if target == node:
                waiting.clear()

    def start(self, node: int, applied: int | None = None) -> Proposal:
        """Returns its registration. What its former process had sent arrives before, or never. A state that has the
        partition is on its disk only after the log."""
        self.crash(node)
        member = self.member(node)
        kept = member.applied if applied is None else applied
        if member.has_lost_log:
            kept = max(kept, self._without_topic + 1)
        elif partition_key(self.pid) not in member.image.tables[Table.CHECKPOINTS]:
            kept = min(kept, self._without_topic)
        member.start(kept)
        command = RegisterNode(
            node=NodeId(node),
            incarnation=member.incarnation,
            disk=member.disk_id,
            grpc_address=f"n{node}:1",
            http_address="",
            kafka_address="",
            feature_level=1,
        )
        registration = self.propose(command, node)
        self.open_sessions(node)
        self.run()
        return registration

    def restart(self, node: int) -> None:
        """And is registered."""
        self.crash(node)
        self.commit(self.start(node))
        self.apply(node)

    # ------------------------------------------------------------------------------------------ clients
    def produce(self, node: int, count: int = 1, key: bytes | None = None, is_tombstone: bool = False) -> Record | None:
        """One batch with acks=all. None if it is refused."""
        replica = self.member(node).replica
        if replica is None:
            return None
        record = self.new_record(key, is_tombstone)
        record.epoch, record.base = replica.part.epoch, replica.log.appended_end
        batch = encode_batch([record.content] * count)
        try:
            replica.produce(Offer(batch, BatchRules()), Acks.ALL, PRODUCE_MS, partial(self._on_produced, record))
        except SmqError:
            return None
        self.records.append(record)
        if replica.log.appended_end == record.base:
            return None  # it is parked during a hand-over, and its place not known
        record.end = replica.log.appended_end
        self.run()
        return record

    def new_record(self, key: bytes | None, is_tombstone: bool) -> Record:
        record = Record(self._produced, Epoch(-1), Offset(-1), Offset(0), key, is_tombstone=is_tombstone)
        self._produced += 1
        return record

    def _on_produced(self, record: Record, result: Produced | SmqError) -> None:
        self.truth.look()
        if isinstance(result, Produced):
            self.truth.on_acked(record, result.base_offset)
        elif result.code is ErrorCode.APPEND_LOST and record.end:
            self.truth.on_lost(record)

    def ask_end(self, node: int) -> None:
        member, before = self.member(node), self.truth.end

        def on_end(result: PartitionEnd | SmqError) -> None:
            self.truth.look()
            if isinstance(result, PartitionEnd):
                self.answers += 1
                self.truth.on_end(result.hwm, before)

        if member.is_up:
            member.replicas.ends.ask_one(self.pid, END_MS, on_end)
            self.run()

    def hold_disk(self, node: int) -> None:
        """It writes nothing more until it is freed."""
        if self.member(node).is_up:
            self.member(node).disk.stall(HELD_MS)

    def free_disk(self, node: int) -> None:
        if self.member(node).is_up:
            self.member(node).disk.end_stall()
            self.run(2)

    def hand_over(self, node: int, target: int) -> None:
        epoch = self.member(node).leads
        if epoch is not None:
            self.member(node).replicas.transfer(self.pid, epoch, NodeId(target))
            self.run()

    def tick(self, node: int, ms: float = TICK_MS) -> None:
        self.run(ms)
        if self.member(node).is_up:
            self.member(node).process.soon(self.member(node).tick)
            self.run()
            self.truth.look_at_tombstones(self.records, self.part)

    # ------------------------------------------------------------------------------------------ elections
    def seal(self, node: int, epoch: int | None = None) -> Report | None:
        """A controller's question reaches the node."""
        member = self.member(node)
        asked = self.part.epoch if epoch is None else Epoch(epoch)
        if not member.is_up:
            return None
        for log in member.replicas.seal(((self.pid, asked),)):
            report = Report(asked, NodeId(node), member.incarnation, log.end, log.good)
            self.reports.append(report)
            self.run()
            return report
        return None

    def propose_election(self, reports: list[Report], candidate: Report) -> Proposal:
        seals = tuple(Seal(node=r.node, incarnation=r.incarnation, end=r.end) for r in reports)
        command = ElectLeader(
            partition=self.pid,
            expected_epoch=candidate.epoch,
            candidate=candidate.node,
            incarnation=candidate.incarnation,
            end=candidate.good,
            seals=seals,
        )
        return self.propose(command, candidate.node)

    def propose_from(self, numbers: tuple[int, ...], candidate: int) -> None:
        """An election from these reports, by their places among all."""
        if all(n < len(self.reports) for n in (*numbers, candidate)):
            self.propose_election([self.reports[n] for n in numbers], self.reports[candidate])

    def elect(self, *nodes: int, candidate: int | None = None) -> bool:
        """From the seals of these nodes; the candidate is the one with the longest log. True if it succeeds."""
        reports = [report for report in map(self.seal, nodes) if report is not None]
        able = [r for r in reports if candidate in (None, r.node)]
        if not able:
            return False
        best = max(able, key=lambda r: r.good)
        return not isinstance(self.commit(self.propose_election(reports, best)), Rejected)

    # ------------------------------------------------------------------------------------------ the end
    def heal(self) -> None:
        """All nodes run, and everything arrives. Raises Violation unless the partition works again, all replicas agree,
        nothing that was committed is missing, and no node's own watch has noted an anomaly."""
        for node, member in self.members.items():
            if member.is_up:
                self.free_disk(node)
            else:
                self.start(node)
        why = "it was not looked at"
        for turn in range(HEAL_TURNS):
            self._turn(turn)
            why = self._disagreement()
            if not why:
                break
            if turn == SCRUB_TURN:
                for node in self.nodes:
                    self.scrub(node)
        if why:
            raise Violation(f"it does not work again: {why}")
        record: Record | None = None
        for turn in range(HEAL_TURNS):
            is_acked = record is not None and record.is_acked
            if is_acked and self.has_ended_all() and not self._disagreement():
                self.truth.on_agreed(self.records, self.part)
                self._look_at_watches()
                return
            leaders = [m.node for m in self.members.values() if m.leads == self.part.epoch]
            if leaders and (record is None or record.is_lost):
                record = self.produce(leaders[0])
            if leaders:
                self.send_again(leaders[0])
            self._turn(turn)
        raise Violation("a record is not acknowledged although all nodes are healthy")

    def _look_at_watches(self) -> None:
        for node, member in self.members.items():
            for seen in (seen for watch in member.watches for seen in watch.recent):
                raise Violation(f"node {node} itself has noted {seen.kind}: {seen.text}")

    def _turn(self, number: int) -> None:
        """Everything that waits happens, and a little time passes. Now and then a controller looks for a leader."""
        self._commit_fresh()
        self.apply_all()
        self.exchange(*self.nodes, turns=1)
        for node in self.members:
            self.tick(node, TICK_MS / len(self.members))
        if number % 8 == 7 and not any(m.leads == self.part.epoch for m in self.members.values()):
            self._elect_as_a_controller()

    def _commit_fresh(self) -> None:
        """What is proposed and waited for, and registrations."""
        registered = self.head.state.nodes
        for proposal in list(self.proposals):
            command = proposal.command
            is_new_process = (
                isinstance(command, RegisterNode)
                and command.incarnation == self.members[command.node].incarnation
                and registered[command.node].incarnation < command.incarnation
            )
            if proposal.done is not None or is_new_process:
                self.commit(proposal)

    def _elect_as_a_controller(self) -> None:
        """As the production controller chooses."""
        part, nodes = self.part, self.head.state.nodes
        reports = [r for r in map(self.seal, part.replicas) if r is not None]
        reports = [r for r in reports if nodes[r.node].incarnation == r.incarnation]
        seals = [r for r in reports if r.node not in part.incomplete]
        floor = part.hwm
        if not part.two_round:
            if len(seals) < seals_needed(len(part.replicas)):
                return
            floor = max(floor, commit_floor([r.end for r in seals], len(part.replicas)))
        able = [r for r in reports if r.good >= floor]
        if able:
            self.commit(self.propose_election(seals, min(able, key=self._reluctance)))

    def _reluctance(self, report: Report) -> tuple[bool, int]:
        resigned_ns = self._resigned.get(report.node)
        has_resigned = resigned_ns is not None and self.scheduler.now_ns - resigned_ns < RESIGNED_NS
        return has_resigned, -report.good

    def _first_kept(self, member: Member) -> Offset:
        """The base of its batch that contains the log start, or of one before that. What is before may be damaged."""
        below = (base for base in map(base_of_key, self._keys(member.disk.image)) if base <= self.part.log_start)
        return max(below, default=Offset(0))

    def _disagreement(self) -> str:
        """Why the partition does not work yet; empty if it does."""
        if self.part.incomplete:
            return f"nodes {sorted(self.part.incomplete)} are incomplete"
        leaders = [m.node for m in self.members.values() if m.leads == self.part.epoch]
        if len(leaders) != 1:
            return f"nodes {leaders} lead epoch {self.part.epoch}"
        ends = {}
        for node, member in self.members.items():
            replica = member.replica
            if replica is None:
                return f"node {node} has no replica"
            ends[int(node)] = (
                int(replica.readable_end),
                int(replica.durable_verified_end),
                int(replica.log.appended_end),
                int(replica.part.hwm),
                int(replica.part.log_start),
            )
            if any(base >= self._first_kept(member) for base in replica.log.damaged_batches):
                return f"node {node} has damaged batches"
            waits_for_append = replica.log.tail_damage is not None  # the damage stays until one comes (rule 23)
            if replica.log.is_installing or (lowest_behind(replica) is not None and not waits_for_append):
                return f"node {node} lacks a segment"
        if len(set(ends.values())) > 1 or any(len(set(e[:4])) > 1 for e in ends.values()):
            return f"(readable, durable, appended, mark, log start) are {ends}"
        return ""
