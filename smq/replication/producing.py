"""A producer's batch, from its arrival at this node to its replica.

Owns the way to the append: the look-up of the partition, the batches that it waits behind, its preparation, and a
second look at refusals that this node cannot be sure of. One object follows each batch, and nothing of it refers to
itself: a finished request must not wait for the garbage collector, which counts objects and knows nothing of their
megabytes. It must never append: the replica does. Only the node's requests import it.
"""

from functools import partial
from typing import Final

from smq.raft_state.errors import SmqError
from smq.raft_state.ids import LogIndex, PartitionId, PartitionIndex, TopicId, partition_id
from smq.raft_state.state import PartitionState
from smq.raft_state.topic_config import batch_rules
from smq.records import parse_header
from smq.replication.api import Acks, DoneFn, Produced
from smq.replication.arrivals import Arrivals
from smq.replication.host import Host
from smq.replication.joins import Joins
from smq.replication.lookup import Lookup, check_has_records, clipped, partition_in, unknown_topic, unknown_topic_id
from smq.replication.measures import StageSink
from smq.replication.partition.admission import JUDGED_BY_THE_LOG, Offer, leader_error
from smq.replication.partition.replicas import Replicas
from smq.replication.partition.send_order import comes_again
from smq.replication.partition.transactional import NotYetKnown
from smq.replication.ports import Buffer
from smq.replication.preparation import Preparation
from smq.replication.proposer import Barriers

# Of this many batches, one is timed, from its arrival to its answer, which takes several microseconds. A prime number:
# clients send 8 or 10 or 100 at a time, and the samples would always be the same ones of them.
BATCHES_PER_SAMPLE: Final = 127


class Producing:
    """What all batches of this node share."""

    def __init__(
        self,
        host: Host,
        replicas: Replicas,
        barriers: Barriers,
        lookup: Lookup,
        preparation: Preparation,
        joins: Joins,
    ) -> None:
        self.host = host
        self.replicas = replicas
        self.barriers = barriers
        self.preparation = preparation
        self.joins = joins
        self.now_ns = host.clock.monotonic_ns
        self._latency = {acks: host.measures.produce.series(acks.name.lower()) for acks in Acks}
        self._until_timed = BATCHES_PER_SAMPLE  # batches
        self._arrivals = Arrivals(lambda: host.state, lookup)

    def produce(
        self,
        topic: str | TopicId,
        partition: int,
        batch: Buffer,
        acks: Acks,
        timeout_ms: int,
        done: DoneFn[Produced],
        *,
        transactional_id: str | None = None,
        is_joining: bool = False,
        trace: StageSink | None = None,
    ) -> None:
        began_ns = 0 if trace is None else self.now_ns()
        self._until_timed -= 1
        if not self._until_timed:
            self._until_timed = BATCHES_PER_SAMPLE
            began_ns = self.now_ns()
            done = partial(self._on_timed, began_ns, acks, done)
            trace = trace or self.host.measures.stage
        arriving = _Arriving(
            self, topic, partition, batch, acks, timeout_ms, done, transactional_id, is_joining, trace, began_ns
        )
        self._arrivals.with_partition(topic, partition, timeout_ms, arriving.fail, arriving.use)

    def _on_timed(self, began_ns: int, acks: Acks, done: DoneFn[Produced], result: Produced | SmqError) -> None:
        if not isinstance(result, SmqError):
            self._latency[acks].observe(self.now_ns() - began_ns)
        done(result)

    def expect(self, topic: str | TopicId, partition: int, batch: Buffer) -> None:
        """The batch was not appended: its producer sends it again."""
        order = self.replicas.send_order
        if partition < 0:
            return  # there is none: nothing of it comes again
        if (part := partition_in(self.host.state, topic, partition)) is not None:
            order.expect(part.pid, batch)
        elif isinstance(topic, str):
            order.expect_by_name(topic, partition, batch)
        else:
            order.expect(partition_id(topic, PartitionIndex(partition)), batch)


class _Arriving:
    """One batch."""

    __slots__ = (
        "_acks",
        "_batch",
        "_began_ns",
        "_done",
        "_is_joining",
        "_node",
        "_partition",
        "_timeout_ms",
        "_topic",
        "_trace",
        "_transactional_id",
    )

    def __init__(
        self,
        node: Producing,
        topic: str | TopicId,
        partition: int,
        batch: Buffer,
        acks: Acks,
        timeout_ms: int,
        done: DoneFn[Produced],
        transactional_id: str | None,
        is_joining: bool,
        trace: StageSink | None,
        began_ns: int,
    ) -> None:
        """`trace`: of a batch that is timed, which began then."""
        self._node = node
        self._topic = topic
        self._partition = partition
        self._batch = batch
        self._acks = acks
        self._timeout_ms = timeout_ms
        self._done = done
        self._transactional_id = transactional_id
        self._is_joining = is_joining
        self._trace = trace
        self._began_ns = began_ns

    def use(self, part: PartitionState, prepared: Offer | None = None) -> None:
        """In its turn among the batches of its partition."""
        try:
            self._append(part, prepared)
        except SmqError as e:
            # Without its traceback: that leads to this frame, and so to the request, which only the garbage
            # collector would find again. It counts objects, and a request may have megabytes.
            error = e.with_traceback(None)
            if error.code in JUDGED_BY_THE_LOG:
                self._confirm(part, error)
            elif isinstance(error, NotYetKnown):
                self._make_certain(part.pid, prepared)
            else:
                self.fail(error)

    def fail(self, error: SmqError) -> None:
        if self._acks is not Acks.NONE and comes_again(error.code):
            self._node.expect(self._topic, self._partition, self._batch)
        self._node.host.measures.produced.add(1, error.code.name)
        self._node.host.deliver(partial(self._done, error))

    def _append(self, part: PartitionState, prepared: Offer | None) -> None:
        node, topic, pid = self._node, self._topic, part.pid
        if node.joins.behind and node.joins.hold(pid, self._batch, partial(self._on_prepared, pid, prepared)):
            return
        state = node.host.state
        name = topic if isinstance(topic, str) else state.topic_names[part.topic_id]
        node.replicas.send_order.place(name, self._partition, pid)
        if (replica := node.replicas.get(pid)) is None:
            check_has_records(part, name)
            raise leader_error(node.host.node_id, state, part)
        if prepared is None:
            prepared = Offer(self._batch, batch_rules(state.topics[name].config), self._transactional_id)
            if node.preparation.concerns(pid, prepared.rules):
                if replica.leading is None:
                    raise replica.not_leader()
                node.preparation.start(pid, prepared, partial(self._on_prepared, pid))
                return
        if (trace := self._trace) is None:
            replica.produce(prepared, self._acks, clipped(self._timeout_ms), self._done)
            return
        queued_ns = node.now_ns()
        trace.observe(queued_ns - self._began_ns, "queue")
        replica.produce(prepared, self._acks, clipped(self._timeout_ms), self._done, trace)
        trace.observe(node.now_ns() - queued_ns, "append")

    def _on_prepared(self, pid: PartitionId, prepared: Offer | SmqError | None) -> None:
        now = self._node.host.state.partition(pid)
        if isinstance(prepared, SmqError):
            self.fail(prepared)
        elif now is None:
            self.fail(self._unknown())
        else:
            self.use(now, prepared)

    def _unknown(self) -> SmqError:
        topic = self._topic
        return unknown_topic_id(topic) if isinstance(topic, bytes) else unknown_topic(topic)

    def _make_certain(self, pid: PartitionId, prepared: Offer | None) -> None:
        """Appends again when this node's state says for certain whether the batch has a transaction here. The later
        batches of its producer wait meanwhile."""
        node, timeout_ms, again = self._node, clipped(self._timeout_ms), partial(self._append_again, prepared)
        if self._is_joining:
            node.joins.start(pid, parse_header(self._batch), timeout_ms, again)
        else:
            node.replicas.send_order.expect(pid, self._batch)
            node.barriers.wait(timeout_ms, again)

    def _append_again(self, prepared: Offer | None, result: LogIndex | SmqError | None) -> None:
        """The transaction may have begun through another node, and was not applied here, or the partition had yet to
        join it. Now the state is as of after the batch's arrival, and what it does not have there is not."""
        part = partition_in(self._node.host.state, self._topic, self._partition)
        if isinstance(result, SmqError):
            self.fail(result)
        elif part is None:
            self.fail(self._unknown())
        else:
            try:
                self._append(part, prepared)
            except SmqError as e:
                self.fail(e.with_traceback(None))

    def _confirm(self, part: PartitionState, error: SmqError) -> None:
        """A leader that has been deposed without knowing it misses what its successor has stored: a batch before this
        one, or this one itself. Its producers would give their sessions up, so only a leader that leads after a barrier
        refuses a batch for what its log does not have."""
        self._node.barriers.wait(clipped(self._timeout_ms), partial(self._on_confirmed, part.pid, part.epoch, error))

    def _on_confirmed(self, pid: PartitionId, epoch: int, error: SmqError, result: LogIndex | SmqError) -> None:
        now, replica = self._node.host.state.partition(pid), self._node.replicas.get(pid)
        if isinstance(result, SmqError):
            self.fail(result)
        elif now is None or replica is None:
            self.fail(self._unknown())
        elif replica.leading == now.epoch == epoch:
            self.fail(error)
        else:
            self.fail(replica.not_leader())
