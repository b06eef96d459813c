"""One partition on a few nodes, step by step: what no schedule of a whole cluster is sure to draw.

Owns the world of a run: Raft as one list of commands that every node applies with a lag of its own, messages that wait
in the order of their session, proposals that may be committed whenever, elections from any set of seals, disks that
write when they are let. Each step ends with a look at everything that the nodes take for committed. The nodes run
production code; schedules (`chance`) and hand-built courses (`courses`) decide the steps.

Producers send over connections that a schedule may leave and come back to. Transactions follow both of Kafka's
protocols: in the first an epoch has many, in the second the end of each begins the next epoch. Their decisions are
entries of Raft, without a lag of the coordinator's own. Disks are replaced, lose rows, or hold bytes that changed, on
no more replicas at a time than elections can do without. It must never judge: `truth` does.
"""

import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from chaos_tests.sim.partition.clients import (
    PRODUCE_MS,
    Connection,
    IdempotentProducer,
    Numbered,
    TransactionalProducer,
)
from chaos_tests.sim.partition.member import Member, Proposal
from chaos_tests.sim.partition.producer_truth import Transaction, Violation
from chaos_tests.sim.partition.truth import Record, Truth
from smq.raft_state.cluster_config import PRODUCER_EXPIRATION_MS
from smq.raft_state.commands import (
    AddToTransaction,
    AdvanceClock,
    AdvanceLogStart,
    AlterClusterConfig,
    AlterTopicConfig,
    ApplyRetention,
    Command,
    CreateTopic,
    ElectLeader,
    EndTransaction,
    InitTransactions,
    Joining,
    JoinTransactions,
    RegisterNode,
    Seal,
    TransactionChange,
)
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.elections import commit_floor, seals_needed
from smq.raft_state.ids import (
    Epoch,
    Incarnation,
    LogIndex,
    NodeId,
    Offset,
    PartitionIndex,
    ProducerEpoch,
    ProducerId,
    TopicId,
    partition_id,
)
from smq.raft_state.limits import PRODUCER_EXPIRATION_MS_MIN, default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import ProducerIdAllocated, Rejected, Reply, Results
from smq.raft_state.state import PartitionState, TransactionOutcome, TransactionPhase, TransactionState
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
from smq.replication.api import Acks, PartitionEnd, Produced, ProduceRequest
from smq.replication.log.log_state import partition_key
from smq.replication.log.stored_batch import BatchDamaged, base_of_key
from smq.replication.nodes.controller import RESIGNED_NS
from smq.replication.partition.admission import NotYetKnown, PreparedBatch, comes_again
from smq.replication.partition.compaction.segment_catch_up import lowest_behind
from smq.replication.ports import Channel, Table
from smq.testing.virtual.clock import Scheduler
from smq.testing.virtual.disk import DiskImage

TOPIC: Final = TopicId(b"t" * 16)
END_MS: Final = 5_000
TRANSACTION_MS: Final = 900_000
FIRST_TRANSACTIONAL: Final = 11  # producers below this number have no transactions
FIRST_ID: Final = 1_000_000  # of those: beyond the ids that Raft gives to the others
DAMAGED: Final = b"damaged"  # in place of a row
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


class Group:
    def __init__(
        self,
        *,
        nodes: int = 3,
        seed: int = 0,
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
            done = partial(self._on_produced, record)
            request = ProduceRequest("t", replica.part.index, batch, Acks.ALL, PRODUCE_MS, done)
            replica.produce(request, PreparedBatch(batch, BatchRules()))
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
        if len(seals) < seals_needed(len(part.replicas)):
            return
        floor = max(part.hwm, commit_floor([r.end for r in seals], len(part.replicas)))
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

    # ------------------------------------------------------------------------------------------ producers
    def connect(self, producer: int, node: int) -> None:
        member = self.member(node)
        if member.is_up:
            self._producer(producer).connect(NodeId(node), member.processes)

    def number(self, producer: int, count: int = 1, key: bytes | None = None, is_tombstone: bool = False) -> None:
        """The producer has one more record to send, unless too many are on their way."""
        found = self._producer(producer)
        if found.may_number:
            record = self.new_record(key, is_tombstone)
            self.records.append(record)
            if found.transaction is not None:
                self.truth.in_transaction(record, found.transaction)
            found.number(record, count)

    def request(self, producer: int, count: int = 1) -> None:
        """The producer's next batches are on their way, over its present connection."""
        for _ in range(count):
            self._producer(producer).send()

    def take_in(self, producer: int, connection: int = -1, count: int = 1) -> None:
        """The next requests of a connection reach the process that it goes to, if that runs."""
        found = self._producer(producer)
        if not -len(found.connections) <= connection < len(found.connections):
            return
        via = found.connections[connection]
        member = self.members[via.node]
        if not member.is_up or not via.is_to(member.node, member.processes):
            via.waiting.clear()
        for _ in range(min(count, len(via.waiting))):
            self._offer(member, found, via, via.waiting.popleft())
        self.run()

    def send_again(self, node: NodeId) -> None:
        """Everything that is not acknowledged, and whatever still waits in connections to it."""
        for number, producer in self.producers.items():
            process = self.members[node].processes
            if producer.unacked and not (producer.connections and producer.connections[-1].is_to(node, process)):
                producer.connect(node, process)
            while producer.send():
                pass
            # What is left behind comes too late for one that has expired: it could take its place.
            is_lost = producer.producer_id in self.truth.producers.forgotten
            for connection in range(-1 if is_lost else -len(producer.connections), 0):
                self.take_in(number, connection, 1_000)

    def _producer(self, producer: int) -> IdempotentProducer:
        return self.producers.setdefault(producer, self.new_producer(producer))

    def _offer(self, member: Member, producer: IdempotentProducer, via: Connection, numbered: Numbered) -> None:
        replica = member.replica
        try:
            if replica is None:
                raise SmqError(ErrorCode.NOT_LEADER, "it has no replica")
            done = partial(self._on_answer, producer, via, numbered)
            request = ProduceRequest("t", replica.part.index, numbered.batch, Acks.ALL, PRODUCE_MS, done)
            replica.produce(request, PreparedBatch(numbered.batch, BatchRules()))
        except SmqError as e:
            if isinstance(e, NotYetKnown) or comes_again(e.code):  # as the node's requests do
                member.replicas.send_order.expect(self.pid, numbered.batch)
            producer.on_refused(via, numbered)

    def _on_answer(
        self, producer: IdempotentProducer, via: Connection, numbered: Numbered, result: Produced | SmqError
    ) -> None:
        self.truth.look()
        if isinstance(result, Produced):
            self.truth.on_acked(numbered.record, result.base_offset)
            producer.on_acked(via, numbered)
        else:
            producer.on_refused(via, numbered)

    # ------------------------------------------------------------------------------------------ transactions
    def new_producer(self, producer: int) -> IdempotentProducer:
        if producer < FIRST_TRANSACTIONAL:
            return IdempotentProducer(FIRST_ID + producer)
        return TransactionalProducer(f"p{producer}")

    def begin(self, producer: int, is_second: bool) -> None:
        """A transaction with the partition in it, unless the producer has one, or the markers of the last are due."""
        found = self._transactional(producer)
        if found.transaction is not None:
            return
        if found.lacks_epoch:
            reply = self._change(InitTransactions, found, timeout_ms=TRANSACTION_MS)
            if not isinstance(reply, ProducerIdAllocated):
                return
            found.restart(reply)
        producer_id, epoch = ProducerId(found.producer_id), ProducerEpoch(found.epoch)
        if is_second:
            reply = self.append(JoinTransactions(items=(Joining(self.pid, producer_id, epoch),)))
        else:
            reply = self._change(
                AddToTransaction, found, producer_id=producer_id, producer_epoch=epoch, partitions=(self.pid,)
            )
        if isinstance(reply, Rejected) or (isinstance(reply, Results) and isinstance(reply.items[0], Rejected)):
            return
        found.transaction = Transaction(producer_id)
        self.truth.producers.transactions.append(found.transaction)

    def end(self, producer: int, is_commit: bool, is_second: bool) -> None:
        """A commit only if all is acknowledged."""
        found = self._transactional(producer)
        if found.transaction is None or (is_commit and found.unacked):
            return
        reply = self._change(
            EndTransaction,
            found,
            producer_id=ProducerId(found.producer_id),
            producer_epoch=ProducerEpoch(found.epoch),
            is_commit=is_commit,
            is_bumping=is_second,
        )
        assert not isinstance(reply, Rejected), reply
        if isinstance(reply, ProducerIdAllocated):
            found.restart(reply)

    def replace(self, producer: int) -> None:
        """Another one starts under its transactional id, and aborts what is open."""
        found = self._transactional(producer)
        if found.transaction is not None:
            state = self._state_of(found)
            self._change(
                EndTransaction,
                found,
                producer_id=state.producer_id,
                producer_epoch=state.producer_epoch,
                is_commit=False,
                is_fencing=True,
            )
        found.unacked.clear()
        found.lacks_epoch = True

    def note_transactions(self) -> None:
        """After every entry of Raft. The clock may have ended some, too."""
        for producer in self.producers.values():
            if not isinstance(producer, TransactionalProducer) or producer.name not in self.head.state.transactions:
                continue
            state = self._state_of(producer)
            if producer.transaction is not None and state.phase is not TransactionPhase.ONGOING:
                self._end_as(producer, state.outcome)
            if state.phase is TransactionPhase.EMPTY:
                for transaction in producer.ended:
                    self.truth.producers.complete(transaction)
                producer.ended.clear()

    def has_ended_all(self) -> bool:
        """Every producer has its answers, and no transaction is open any more, in the logs either. A producer that has
        expired may have lost its place, and one that repeats a batch after that time may be refused."""
        is_waiting = False
        for number, producer in self.producers.items():
            is_lost = producer.producer_id in self.truth.producers.forgotten
            is_lost |= any(self.truth.is_forgotten(numbered.record, self.part) for numbered in producer.unacked)
            if producer.transaction is not None:
                self.end(number, is_commit=not is_lost, is_second=False)
            is_waiting |= producer.transaction is not None or (bool(producer.unacked) and not is_lost)
        return not is_waiting and not self.head.state.endings

    def _end_as(self, producer: TransactionalProducer, outcome: TransactionOutcome) -> None:
        assert producer.transaction is not None
        producer.transaction.is_committed = outcome is TransactionOutcome.COMMITTED
        producer.ended.append(producer.transaction)
        producer.transaction = None
        state = self._state_of(producer)
        is_fenced = (state.producer_id, state.producer_epoch) != (producer.producer_id, producer.epoch)
        if producer.unacked or is_fenced:  # some of its sequences may never come
            producer.unacked.clear()
            producer.lacks_epoch = True

    def _state_of(self, producer: TransactionalProducer) -> TransactionState:
        return self.head.state.transactions[producer.name]

    def _transactional(self, producer: int) -> TransactionalProducer:
        found = self._producer(producer)
        assert isinstance(found, TransactionalProducer)
        return found

    def _change(self, kind: type[TransactionChange], producer: TransactionalProducer, **fields: object) -> Reply:
        state, name = self.head.state, producer.name
        known = state.transactions.get(name)
        return self.append(
            kind(
                transactional_id=name,
                coordinator_epoch=coordinator_of(state, name).epoch,
                changes_seen=known.changes if known is not None else state.transaction_changes_floor,
                **fields,  # type: ignore[arg-type]  # the fields of `kind`
            )
        )

    # ------------------------------------------------------------------------------------------ what happens to disks
    def wipe(self, node: int) -> bool:
        """Another disk takes the place of its own, without anything on it. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        self.truth.disk_goes(member)
        member.image = type(member.image)()
        member.disk_number += 100
        member.applied = 0
        member.has_lost_log = False
        member.has_lost = True
        return True

    def damage_tail(self, node: int, batches: int = 1) -> bool:
        """Its last batches cannot be read, nor the rows that describe them. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        keys = self._keys(member.image)[-batches:]
        if not keys:
            return False
        self.truth.disk_goes(member)
        for key in keys:
            member.image.tables[Table.BATCHES][key] = DAMAGED
        for key in list(member.image.tables[Table.TIMES]):
            member.image.tables[Table.TIMES][key] = DAMAGED
        member.image.is_damaged = member.has_lost = True
        return True

    def damage_running(self, node: int, number: int) -> bool:
        """Of its batches, this one and its index row cannot be read any more. The process goes on."""
        member = self.member(node)
        bases = [base_of_key(key) for key in self._keys(member.disk.image)] if member.is_up else []
        if not bases or not self.may_lose(node):
            return False
        base = bases[number % len(bases)]
        self.truth.disk_goes(member)
        member.disk.image.is_damaged = member.has_lost = True
        for table in (Table.BATCHES, Table.TIMES):
            rows = member.disk.image.tables[table]
            for key in [k for k in rows if k.startswith(self.pid) and base_of_key(k) == base]:
                rows[key] = DAMAGED
        if member.replica is not None:
            member.replica.log.release_tail()
        return True

    def scrub(self, node: int) -> None:
        """The node's scrubber finds what no reader has met."""
        member = self.member(node)
        rows = member.disk.image.tables[Table.BATCHES] if member.is_up else {}
        for key in [key for key, value in rows.items() if value == DAMAGED]:
            member.replicas.repair(BatchDamaged(self.pid, base_of_key(key), "the scrubber found it"), lambda _: None)

    def _keys(self, image: DiskImage) -> list[bytes]:
        """Of its batches."""
        return [key for key in image.tables[Table.BATCHES] if key.startswith(self.pid)]

    def lose_last_batch(self, node: int) -> bool:
        """Its last batch is gone, as if a page had lost a row. The index row is still there, or nothing happens. The
        node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        keys = self._keys(member.image)
        if not keys or not self._is_indexed(member.image, keys[-1]):
            return False
        self.truth.disk_goes(member)
        del member.image.tables[Table.BATCHES][keys[-1]]
        member.image.is_damaged = member.has_lost = True
        return True

    def _is_indexed(self, image: DiskImage, batch: bytes) -> bool:
        """Whether an index row says that there is this batch."""
        rows, base = image.tables[Table.TIMES], base_of_key(batch)
        return any(k.startswith(self.pid) and base_of_key(k) == base and row != DAMAGED for k, row in rows.items())

    def lose_log(self, node: int) -> bool:
        """Its log is gone without a trace, and its Raft is not: it keeps the partition. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        self.truth.disk_goes(member)
        for table in (Table.BATCHES, Table.TIMES, Table.CHECKPOINTS):
            for key in [k for k in member.image.tables[table] if k.startswith(self.pid)]:
                del member.image.tables[table][key]
        member.image.is_damaged = member.has_lost = member.has_lost_log = True
        return True

    def may_lose(self, node: int) -> bool:
        """As long as no more replicas have lost something than elections can do without."""
        lossy = {int(m.node) for m in self.members.values() if self._is_lossy(m)}
        return len(lossy | {node}) <= len(self.members) - seals_needed(len(self.members))

    def _is_lossy(self, member: Member) -> bool:
        """Its disk may hold less than it has acknowledged, or damage not yet repaired, or its log lacks producers."""
        replica = member.replica
        if member.has_lost and replica is not None:
            known = self.head.state.nodes[member.node].incarnation == member.processes
            member.has_lost = not known or replica.is_end_hidden or bool(replica.log.damaged_batches)
        lacks_producers = replica is not None and not replica.log.has_producers
        is_incomplete = member.node in self.part.incomplete
        return member.has_lost or is_incomplete or lacks_producers or self.truth.is_rotten(member)

    def rot(self, node: int) -> bool:
        """Its last batch fails its CRC, and its index row says what it was. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        keys = self._keys(member.image)
        if not keys:
            return False
        self.truth.disk_goes(member)
        value = bytearray(member.image.tables[Table.BATCHES][keys[-1]])
        value[-1] ^= 1
        member.image.tables[Table.BATCHES][keys[-1]] = bytes(value)
        member.image.is_damaged = True
        return True
