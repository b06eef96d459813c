"""Three whole nodes without faults but those of a test: what leaders say of batches, in which order batches are stored,
a disk that hangs, a large topic that is deleted as a node registers, and a leader whose disk is an old copy."""

from dataclasses import replace
from typing import Any

import pytest

from chaos_tests.sim.cluster import Cluster, SimHost
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.binary import CodecError
from smq.raft_state.command_codec import decode_command
from smq.raft_state.commands import CreateTopic, DeleteTopic, RegisterNode
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, NodeId, Offset, RequestId, TopicId
from smq.raft_state.replies import Done, TopicCreated
from smq.raft_state.state import ClusterState, PartitionState
from smq.records import NewRecord, encode_batch, parse_header
from smq.replication.api import Acks, Fetched, Produced, ProduceRequest
from smq.replication.commands.coalescing import Barriers
from smq.replication.net import wire
from smq.replication.net.disk_marks import Mark
from smq.replication.nodes.identity import DISK_KEY
from smq.replication.ports import Table
from smq.replication.raft.raft import Raft

# -------------------------------------------------------------------------------------------------------- calm cluster
# Three whole nodes without faults but those of a test: what leaders say of batches, in which order batches are
# stored, and when a first read ends.
pytestmark = pytest.mark.sim

PRODUCERS = 1_500  # more than the table of earlier versions held per partition
TIMEOUT_MS = 5_000


class World:
    """A partition, and producers of one batch at a time."""

    def __init__(self) -> None:
        self.simulation = Simulation(find("calm"), 1)
        assert self.simulation._boot()
        self.simulation.scheduler.run_for_ms(1_000)
        (self.known, *_) = self.simulation.world.partitions

    def leaders(self) -> list[SimHost]:
        """The nodes that believe that they lead the partition."""
        return [h for h in self.simulation.cluster.up() if any(r.pid == self.known.pid for r in h.api.replicas.led())]

    def produce(self, host: SimHost, *, sequence: int = 0, producer: int = 7) -> "Answer":
        """With a negative sequence, without idempotence."""
        records, answer = [NewRecord(None, b"v", 1)], Answer(self)
        batch = encode_batch(records)
        if sequence >= 0:
            batch = encode_batch(records, producer_id=producer, producer_epoch=0, base_sequence=sequence)
        known, done = self.known, answer.came.append
        host.api.produce(ProduceRequest(known.topic, known.index, batch, Acks.ALL, TIMEOUT_MS, done))
        return answer

    def read_all(self, host: SimHost) -> list[int]:
        """The producers of the committed batches, in order."""
        found: list[int] = []
        while True:
            answer, at = Answer(self), len(found)
            host.api.fetch(
                self.known.topic, self.known.index, at, max_bytes=1 << 20, max_wait_ms=100, done=answer.came.append
            )
            fetched = answer.result()
            assert isinstance(fetched, Fetched)
            if not fetched.batches:
                return found
            found += [parse_header(stored.data).producer_id for stored in fetched.batches]


class Answer:
    """To one request, once it has come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.came: list[object] = []

    def result(self) -> object:
        assert self._world.simulation.scheduler.run_for_ms(6_000, stop=lambda: bool(self.came))
        return self.came[0]

    def stored(self) -> Produced:
        result = self.result()
        assert isinstance(result, Produced), result
        return result

    def refused(self) -> SmqError:
        result = self.result()
        assert isinstance(result, SmqError)
        return result


# ---------------------------------------------------------------------------------------------- missing batches
def test_a_deposed_leader_does_not_say_that_a_batch_is_missing() -> None:
    """Its log is no judge of which batches are missing."""
    world = World()
    (old,) = world.leaders()
    world.produce(old).stored()
    network = world.simulation.cluster.network
    for other in world.simulation.cluster.up():
        if other is not old:
            network.cut(old.node, other.node)
            network.cut(other.node, old.node)
    assert world.simulation.scheduler.run_for_ms(5_000, stop=lambda: len(world.leaders()) == 2)
    (new,) = [h for h in world.leaders() if h is not old]
    world.produce(new, sequence=1).stored()
    answer = world.produce(old, sequence=2)  # it lacks sequence 1
    network.heal_all()
    error = answer.refused()
    assert error.code.is_retriable
    assert error.code is not ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_the_present_leader_says_that_a_batch_is_missing() -> None:
    world = World()
    (leader,) = world.leaders()
    world.produce(leader).stored()
    assert world.produce(leader, sequence=2).refused().code is ErrorCode.OUT_OF_ORDER_SEQUENCE


# ---------------------------------------------------------------------------------------------- order
def _unknown(_self: ClusterState, _topic: str, _index: int) -> PartitionState | None:
    return None


@pytest.mark.parametrize("idempotent", [False, True])
def test_later_batches_come_after_those_that_are_looked_up(
    monkeypatch: pytest.MonkeyPatch, *, idempotent: bool
) -> None:
    """A node has to look their topic up first. A later batch that finds it known does not overtake them."""
    world = World()
    (leader,) = world.leaders()
    sequences = (0, 1, 2) if idempotent else (-1, -1, -1)
    with monkeypatch.context() as patch:
        patch.setattr(ClusterState, "partition_of", _unknown)
        answers = [world.produce(leader, sequence=sequence) for sequence in sequences[:2]]
    answers.append(world.produce(leader, sequence=sequences[2]))
    first, *later = [answer.stored().base_offset for answer in answers]
    assert later == [first + 1, first + 2]


def test_a_later_batch_of_the_producer_waits_for_one_whose_look_up_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    (leader,) = world.leaders()
    with monkeypatch.context() as patch:
        patch.setattr(ClusterState, "partition_of", _unknown)
        patch.setattr(Barriers, "wait", lambda _self, _timeout_ms, done: done(SmqError(ErrorCode.NO_QUORUM, "none")))
        failed = world.produce(leader)
    overtaking = world.produce(leader, sequence=1)
    assert [failed.refused().code, overtaking.refused().code] == [ErrorCode.NO_QUORUM, ErrorCode.OVERLOADED]
    first, second = (world.produce(leader, sequence=sequence) for sequence in (0, 1))
    assert second.stored().base_offset == first.stored().base_offset + 1


# ---------------------------------------------------------------------------------------------- many producers
def test_1500_producers_that_retry_after_the_leaders_death_store_every_batch_once() -> None:
    world = World()
    (first,) = world.leaders()
    before = [answer.stored() for answer in [world.produce(first, producer=n) for n in range(PRODUCERS)]]
    world.simulation.cluster.crash(first.node, power=False, why="test")
    assert world.simulation.scheduler.run_for_ms(20_000, stop=lambda: bool(world.leaders()))
    (second,) = world.leaders()
    assert second is not first
    after = [answer.stored() for answer in [world.produce(second, producer=n) for n in range(PRODUCERS)]]
    assert all(answer.duplicate for answer in after)
    assert [answer.base_offset for answer in after] == [answer.base_offset for answer in before]
    assert sorted(world.read_all(second)) == list(range(PRODUCERS))


# ---------------------------------------------------------------------------------------------- first reads
def test_a_new_leaders_first_read_waits_for_its_empty_entry_and_no_longer() -> None:
    """Its index is of an entry without a command, which must be reported as applied, too."""
    simulation = World().simulation
    (old,) = [host.node for host in simulation.cluster.up() if host.api.engine.is_leader]
    simulation.cluster.crash(old, power=False, why="test")
    led: list[SimHost] = []

    def has_leader() -> bool:
        led[:] = [host for host in simulation.cluster.up() if host.api.engine.is_leader]
        return bool(led)

    assert simulation.scheduler.run_for_ms(5_000, stop=has_leader)
    api = led[0].api
    assert api.engine.applied_index < api.engine.journal.last_index, "its first entry is not applied yet"
    reported: list[int] = []
    report = api._proposer.on_applied

    def listen(index: LogIndex) -> None:
        reported.append(index)
        report(index)

    api._proposer.on_applied = listen
    answers: list[int] = []
    api.barrier(5_000, answers.append)
    assert simulation.scheduler.run_for_ms(500, stop=lambda: bool(answers))
    # If nothing follows this entry and it is not reported, the wait ends only with the next attempt, a second later.
    assert answers[0] in reported


# ---------------------------------------------------------------------------------------------------------- full queue
# A node that follows many partitions and whose disk hangs: its queue keeps to its bound, and all of them catch up.
CAP = 64 << 10
WINDOW = 8 << 10  # of one partition's stream: an eighth of the cap, as by default
PARTITIONS = 18  # each node leads six and follows twelve
ROUNDS = 40
FRAME = WINDOW  # one Append message: several batches that were waiting


def simulation() -> Simulation:
    calm = find("calm")
    node = {"append_inflight_bytes_max": CAP, "replica_inflight_bytes_max": WINDOW}
    made = Simulation(replace(calm, cluster=replace(calm.cluster, partitions=PARTITIONS, node=node)), 1)
    assert made._boot()
    made.scheduler.run_for_ms(2_000)
    return made


def publish(made: Simulation, victim: SimHost, rounds: int) -> list[object]:
    """Batches of a kilobyte to every partition that the victim follows; their answers."""
    batch = encode_batch([NewRecord(None, b"v" * 1_000, 1)])
    answers: list[object] = []
    for _ in range(rounds):
        for host in made.cluster.up():
            for replica in host.api.replicas.led() if host is not victim else ():
                host.api.produce(ProduceRequest("t0-0", replica.part.index, batch, Acks.ALL, 20_000, answers.append))
        made.scheduler.run_for_ms(20)
    return answers


def ends(host: SimHost) -> dict[bytes, int]:
    return {status.pid: status.durable_end for status in host.api.replica_statuses()}


@pytest.mark.parametrize("is_everywhere", [False, True], ids=["one disk", "all disks"])
def test_the_records_that_wait_for_a_hung_disk_are_bounded_and_all_partitions_catch_up(is_everywhere: bool) -> None:
    made = simulation()
    hosts = list(made.cluster.hosts.values())
    victim = next(host for host in hosts if not host.api.engine.is_leader)
    assert len(victim.api.replicas.all()) - len(victim.api.replicas.led()) == 12
    for host in hosts if is_everywhere else [victim]:
        assert host.disk is not None
        host.disk.stall(5_000)
    answers = publish(made, victim, ROUNDS)
    made.scheduler.run_for_ms(1_000)
    assert victim.disk is not None
    assert victim.disk.queued_record_bytes_peak > CAP // 4, "the fault struck"
    for host in hosts:
        assert host.disk is not None
        assert host.disk.queued_record_bytes_peak <= CAP + FRAME
    if not is_everywhere:
        assert len(answers) == ROUNDS * 12, "a majority of the disks works"
    made.scheduler.run_for_ms(8_000)
    assert len(answers) == ROUNDS * 12
    assert is_everywhere or all(isinstance(answer, Produced) for answer in answers)
    made.scheduler.run_for_ms(3_000)
    assert ends(hosts[0]) == ends(hosts[1]) == ends(hosts[2])
    assert sum(ends(victim).values()) == sum(isinstance(answer, Produced) for answer in answers)
    for host in hosts:
        assert host.disk is not None
        assert host.disk.queued_record_bytes_peak <= CAP + FRAME


# ------------------------------------------------------------------------------------------ deleted after registration
# A large topic that is deleted right after a node's own registration: its logs are deleted once, slice by slice.
BIG = CreateTopic(
    request_id=RequestId(b"a" * 16),
    name="big",
    topic_id=TopicId(b"t" * 16),
    partition_count=200,  # more than a slice
    replication_factor=3,
    config=(),
    start_offset=Offset(0),
    created_ms=1,
)


def test_no_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    hosts = simulation.cluster.hosts
    (leader,) = [host for host in hosts.values() if host.api.engine.is_leader]
    replies: list[object] = []
    leader.api.propose(BIG, 5_000, replies.append)
    assert simulation.scheduler.run_for_ms(5_000, stop=lambda: bool(replies))
    simulation.scheduler.run_for_ms(1_000)
    for node in hosts:
        simulation.cluster.crash(node, power=False, why="test")

    propose = Raft.propose
    deleted: list[object] = []

    def spy(self: Raft, command: bytes, done: Any) -> None:
        propose(self, command, done)
        made = decode_command(command)
        if isinstance(made, RegisterNode) and made.node == self._node_id and self.is_leader and len(replies) == 1:
            replies.append(made)  # a client's deletion that arrives in the same turn
            delete = DeleteTopic(request_id=RequestId(b"d" * 16), name="big")
            hosts[made.node].api.propose(delete, 5_000, deleted.append)

    errors: list[BaseException] = []
    end = Cluster._end

    def ended(self: Cluster, host: SimHost, error: BaseException) -> None:
        errors.append(error)
        end(self, host, error)

    monkeypatch.setattr(Raft, "propose", spy)
    monkeypatch.setattr(Cluster, "_end", ended)
    for node in hosts:
        simulation.cluster.start(node)
    assert simulation.scheduler.run_for_ms(6_000, stop=lambda: bool(deleted))
    simulation.scheduler.run_for_ms(1_000)
    assert isinstance(replies[0], TopicCreated)
    assert deleted == [Done()]
    assert errors == []


# ------------------------------------------------------------------------------------------------------ old copy leads
# A leader learns that its disk is an old copy: it gives up its leaderships and comes back as another disk.
def report_old_copy(simulation: Simulation, host: SimHost, reporter: NodeId) -> None:
    """By the heartbeat of a peer that was away until now."""
    own, peer = host.api.engine.marks.own, simulation.cluster.hosts[reporter].api
    evidence = Mark(host.node, own.disk, b"earlier.", 0, own.writes + 1)
    host.api.heartbeats.on_heartbeat(reporter, wire.Heartbeat(peer.incarnation, (peer.engine.marks.own, evidence)))


@pytest.mark.parametrize("crashes_before_it_is_durable", [False, True])
def test_it_gives_up_all_leaderships_and_is_readmitted_by_the_others(
    monkeypatch: pytest.MonkeyPatch, crashes_before_it_is_durable: bool
) -> None:
    errors: list[BaseException] = []
    monkeypatch.setattr(Cluster, "_end", lambda _self, _host, error: errors.append(error))
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    hosts = simulation.cluster.hosts
    (host,) = [host for host in hosts.values() if host.api.engine.is_leader]
    reporter = next(node for node in hosts if node != host.node)
    before, incarnation = host.api.identity.disk, host.api.incarnation
    report_old_copy(simulation, host, reporter)
    assert not host.api.engine.is_leader
    assert host.api.replicas.led() == []
    assert not host.api.is_ready
    if crashes_before_it_is_durable:
        monkeypatch.setattr("smq.testing.virtual.disk.TORN", 0.0)
        image = host.image.copy()
        simulation.cluster.crash(host.node, power=True, why="test")
        host.image = image
        simulation.cluster.start(host.node)
        simulation.scheduler.run_for_ms(5)
        assert host.image.tables[Table.META][DISK_KEY] == before
        assert simulation.scheduler.run_for_ms(8_000, stop=simulation._are_all_ready)
        report_old_copy(simulation, host, reporter)
    assert simulation.scheduler.run_for_ms(8_000, stop=simulation._are_all_ready)
    simulation.scheduler.run_for_ms(1_000)
    disk = host.image.tables[Table.META][DISK_KEY]
    assert disk != before
    assert {node.api.state.nodes[host.node].disk for node in hosts.values()} == {disk}
    assert host.api.state.nodes[host.node].incarnation == host.api.incarnation > incarnation
    assert "has rejoined as a replaced disk" in host.api.status().warnings[0]
    assert errors == []
    topics = host.api.state.topics.values()
    led = {(part.leader, part.leader_incarnation) for topic in topics for part in topic.partitions}
    assert led
    assert led <= {(node, other.api.incarnation) for node, other in hosts.items()}


def test_a_heartbeat_that_speaks_for_another_node_is_refused() -> None:
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    one, two, three = (host.api for host in simulation.cluster.hosts.values())
    beat = wire.Heartbeat(two.incarnation, (three.engine.marks.own,))
    with pytest.raises(CodecError, match="speaks of itself as node"):
        one.heartbeats.on_heartbeat(two.node_id, beat)
