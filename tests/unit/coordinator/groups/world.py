"""Coordinators of groups over one replicated machine, on a virtual clock: commands take a moment, or fail on
request."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.member_requests import Identity, Join, Joined, Outcome, Sync, Synced
from smq.raft_state.commands import Command, FenceNode, OffsetCommit
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Incarnation, NodeId, Offset, RequestId
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Rejected, Reply
from smq.raft_state.state import ClusterState, GroupState
from smq.replication.api import DoneFn, NodeApi
from smq.replication.commands.proposer import rejection
from smq.testing.virtual.clock import Machine as Hardware
from smq.testing.virtual.clock import Process, Scheduler, SimClock
from tests.unit.raft_state.support import Driver, member, pid, register, topic

COMMAND_MS = 2.0
GROUP = "g"


class FakeNode:
    """What a coordinator asks of its node. `fail_next` is the answer to the next command; `is_applied`: the command
    takes effect all the same."""

    def __init__(self, world: "World", node: int, incarnation: int = 1) -> None:
        self._world = world
        self.node_id = NodeId(node)
        self.incarnation = Incarnation(incarnation)
        self.is_ready = True
        self.fail_next: SmqError | None = None
        self.is_applied = False
        self.proposed: list[Command] = []

    @property
    def state(self) -> ClusterState:
        return self._world.machine.state

    def propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        self.proposed.append(command)
        failure, self.fail_next = self.fail_next, None

        def apply() -> None:
            applied = self._world.apply(command) if failure is None or self.is_applied else None
            reply = failure if failure is not None else applied
            assert reply is not None
            done(rejection(reply) if isinstance(reply, Rejected) else reply)

        self._world.clock.call_later(COMMAND_MS, apply)


class Rng:
    """No two members get the same id."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def random(self) -> float:
        return 0.5

    def randbytes(self, n: int) -> bytes:
        return next(self._numbers).to_bytes(n, "big")


class World:
    """`coordinators[node]` of nodes 1 to 3; `group` names one that node 1 coordinates first."""

    def __init__(self, *, initial_delay_ms: int = 0) -> None:
        self.scheduler = Scheduler()
        self.process = Process(self.scheduler, "node", self._fatal)
        self.clock = SimClock(self.process, Hardware())
        self.driver = Driver(Machine())
        self.apply(default_init("c"))
        for node in (1, 2, 3):
            self.apply(register(node, kafka=f"host:{node}"))
        self.apply(topic(1, "t", partitions=2))
        self.nodes = {n: FakeNode(self, n) for n in (1, 2, 3)}
        rng = Rng()
        self.coordinators = {
            n: GroupCoordinator(cast(NodeApi, node), self.clock, rng, initial_delay_ms=lambda: initial_delay_ms)
            for n, node in self.nodes.items()
        }
        for coordinator in self.coordinators.values():
            coordinator.start()

    def _fatal(self, error: BaseException) -> None:
        raise error

    @property
    def machine(self) -> Machine:
        return self.driver.machine

    def apply(self, command: Command) -> Reply:
        return self.driver.apply(command).reply

    def run(self, ms: float = 20.0) -> None:
        self.scheduler.run_for_ms(ms)

    # -------------------------------------------------------------------------------------------- the group
    @property
    def owner(self) -> int:
        return int(coordinator_of(self.machine.state, GROUP).node)

    @property
    def coordinator(self) -> GroupCoordinator:
        return self.coordinators[self.owner]

    @property
    def group(self) -> GroupState:
        return self.machine.state.groups[GROUP]

    def fence_owner(self) -> int:
        """Fences the coordinator's node, and returns it."""
        node = self.owner
        self.apply(FenceNode(node=NodeId(node), incarnation=Incarnation(1)))
        return node


@dataclass
class Client:
    """One member as its client sees it."""

    world: World
    name: str
    instance: str = ""
    protocols: tuple[str, ...] = ("range",)
    metadata: bytes = b"m"
    session_ms: int = 10_000
    rebalance_ms: int = 0  # 0: as its session
    takes_id_first: bool = True
    can_skip: bool = True
    protocol_type: str = "consumer"
    member_id: str = ""
    generation: int = -1
    joined: list[Joined] = field(default_factory=list)
    synced: list[Synced] = field(default_factory=list)
    withdraw: Callable[[], None] = lambda: None
    requested: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.requested > len(self.joined)

    def request(self) -> Join:
        requested = member(self.member_id, instance=self.instance, session_ms=self.session_ms)
        requested = replace(requested, rebalance_timeout_ms=self.rebalance_ms or self.session_ms)
        return Join(
            group=GROUP,
            member=replace(requested, protocols=tuple((name, self.metadata) for name in self.protocols)),
            protocol_type=self.protocol_type,
            takes_id_first=self.takes_id_first,
            can_skip_assignment=self.can_skip,
        )

    def ask(self, *, at: int | None = None) -> "Client":
        """One JoinGroup, whose answer comes into `joined`."""

        def done(joined: Joined) -> None:
            self.joined.append(joined)
            if joined.member_id:
                self.member_id = joined.member_id
            self.generation = joined.generation

        self.requested += 1
        self.withdraw = self.world.coordinators[at or self.world.owner].join(self.request(), done)
        return self

    def join(self) -> "Client":
        """As clients do it: again under the reserved id."""
        self.ask()
        self.world.run(0)
        if not self.is_waiting and self.joined[-1].outcome is Outcome.ID_RESERVED:
            self.ask()
        return self

    @property
    def outcome(self) -> Outcome:
        return self.joined[-1].outcome

    def sync(self, **assignments: bytes) -> "Client":
        """`assignments` by member name is for leaders; the ids are passed on as they are."""
        request = Sync(group=GROUP, who=self.who, generation=self.generation, assignments=tuple(assignments.items()))
        self.world.coordinator.sync(request, self.synced.append)
        return self

    @property
    def who(self) -> Identity:
        return Identity(member_id=self.member_id, instance_id=self.instance)

    def beat(self, *, at: int | None = None) -> Outcome:
        return self.world.coordinators[at or self.world.owner].heartbeat(GROUP, self.who, self.generation)

    def leave(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        self.world.coordinator.leave(GROUP, [self.who], outcomes.extend)
        self.world.run()
        return outcomes

    def commit(self, offset: int, *, generation: int | None = None) -> ErrorCode | None:
        """None if it was accepted."""
        answers: list[Any] = []
        items = (OffsetCommit(partition=pid(1), offset=Offset(offset)),)
        self.world.coordinator.commit(
            GROUP,
            self.who,
            self.generation if generation is None else generation,
            items,
            RequestId(b""),
            1_000,
            answers.append,
        )
        self.world.run()
        return answers[0].code if isinstance(answers[0], SmqError) else None


def converge(world: World, *clients: Client) -> None:
    """As client libraries do it: members join again when they must, until all are in one generation."""
    for _ in range(6):
        for client in clients:
            if client.is_waiting or (client.joined and client.beat() is Outcome.OK):
                continue
            if client.joined and client.outcome is Outcome.UNKNOWN_MEMBER:
                client.member_id = ""
            client.join()
            world.run()
        world.run(100)
    assert len({client.generation for client in clients}) == 1, [c.joined for c in clients]
    assert {client.outcome for client in clients} == {Outcome.OK}


def assemble(world: World, *clients: Client) -> None:
    """All of them in one stable generation, each assigned its own name."""
    converge(world, *clients)
    names = {client.member_id: client.name.encode() for client in clients}
    for client in clients:
        client.sync(**(names if client.joined[-1].leader == client.member_id else {}))
    world.run()
    assert [c.synced[-1].assignment for c in clients] == [c.name.encode() for c in clients]


def client(world: World, name: str, **fields: object) -> Client:
    return Client(world, name, **fields)  # type: ignore[arg-type]  # the fields are Client's


def static_pair(world: World) -> tuple[Client, Client]:
    a, b = client(world, "a", instance="i", session_ms=6_000), client(world, "b", session_ms=6_000)
    assemble(world, a, b)
    return a, b


def restarted(a: Client) -> Client:
    return Client(a.world, a.name, instance=a.instance, session_ms=a.session_ms, can_skip=a.can_skip)
