"""A client that repeatedly deletes a topic and creates another of the same name.

Owns the check that an acknowledged topic exists until a client deletes that very topic. Nodes get much more time for a
deletion than the client itself waits, so that a node that was cut off proposes it again when the name belongs to
another topic. The topics stay empty, and no other client uses them.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Client, World, proposal, request_range
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.raft_state.commands import AllocateProducerId, Command, CreateTopic, DeleteTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, TopicId
from smq.raft_state.replies import TopicCreated
from smq.replication.api import NodeApi

ATTEMPT_MS: Final = 700.0  # the client waits this long for one node
NODE_MS: Final = 12_000  # the time that the node is given
ATTEMPTS_MAX: Final = 6
CHECKS: Final = 4  # of a topic, before it is deleted
UNNUMBERED: Final = 30  # more than the scenario's replies_max


class Remaker(Client):
    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self._count = 0
        self.last_drop: DeleteTopic | None = None  # of a topic of the present name

    def run(self) -> Script:
        while not self.world.stopped:
            self._count += 1
            self.last_drop = None
            yield from self._remake(f"{self.name}-{self._count}")

    def _remake(self, topic: str) -> Script:
        """Goes on until an outcome stays unknown: from then on a delayed command might take effect first."""
        while not self.world.stopped:
            yield self.think()
            create = CreateTopic(
                request_id=self.new_id(),
                name=topic,
                topic_id=TopicId(self.rng.randbytes(16)),
                partition_count=1,
                replication_factor=1,
                config=(),
                start_offset=Offset(0),
                created_ms=int(self.world.now_ms()),
            )
            if not (yield from self._done("create", create)):
                return
            yield from self.after_creation()
            for _ in range(CHECKS):
                yield self.think()
                yield from self._check_exists(topic)
            self.last_drop = DeleteTopic(request_id=self.new_id(), name=topic)
            if not (yield from self._done("drop", self.last_drop)):
                return

    def after_creation(self) -> Script:
        """What a remaker does once its topic is there."""
        yield from ()

    def _done(self, function: str, command: Command) -> Any:
        """A Script that returns whether the command was acknowledged."""
        request = proposal(command, NODE_MS)
        self.world.recorder.invoke(self.process, function, name=self.name)
        result: Any = None
        for _ in range(ATTEMPTS_MAX):
            result = yield Call(self.any_node(), request, ATTEMPT_MS, NODE_MS)
            if not isinstance(result, SmqError | Lost):
                self.ok(function)
                return function == "drop" or isinstance(result, TopicCreated)
            yield Sleep(self.rng.uniform(10, 120))
        self.conclude_unknown(function)
        return False

    def _check_exists(self, topic: str) -> Script:
        """Looks after a barrier, so that a node that is behind does not count."""

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            request_range(api, topic, 0, ATTEMPT_MS, done)

        node = self.any_node()
        result = yield Call(node, request, ATTEMPT_MS * 1.5, ATTEMPT_MS)
        if isinstance(result, SmqError) and result.code is ErrorCode.UNKNOWN_TOPIC:
            self.world.report_violation(node, f"topic {topic} is gone, and no client has deleted it")


class Repeater(Remaker):
    """As if the answer to its last deletion had been lost, it sends that once more, to any node, after the topic has
    been created again. Meanwhile nodes have made more requests under ids of their own than a cache keeps. The deletion
    is still recognised: the topic stays."""

    def after_creation(self) -> Script:
        again = self.last_drop
        if again is None:
            return
        for _ in range(UNNUMBERED):
            self.world.spawn(self._propose(AllocateProducerId()))
        yield Sleep(self.rng.uniform(100, 400))
        yield from self._propose(again)

    def _propose(self, command: Command) -> Script:
        yield Call(self.any_node(), proposal(command, ATTEMPT_MS), ATTEMPT_MS * 1.5, ATTEMPT_MS)
