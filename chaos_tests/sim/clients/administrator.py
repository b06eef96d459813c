"""Administrators: one owns a setting of the cluster, another topics whose replicas it assigns itself, a third a default
of new topics, a fourth a user, a fifth its rights, a sixth its quotas; and one uses what only feature level 2 has.

Owns what they change and read back. No other client changes their setting or their topics. So every later look, at any
node and after a barrier, must show what was acknowledged last. A change is repeated under its request id until its
outcome is known.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from chaos_tests.sim.clients.base import Client, LoopingClient, World, proposal
from chaos_tests.sim.levels import SETTING, Note
from chaos_tests.sim.rpc import Call, Lost, Script
from smq.coordinator.service.quotas import Quotas
from smq.raft_state.cluster_config import (
    GROUP_INITIAL_DELAY_MS,
    NUM_PARTITIONS,
    OFFSETS_RETENTION_MINUTES,
    broker_name,
)
from smq.raft_state.commands import (
    Acl,
    AddPartitions,
    AlterAcls,
    AlterClusterConfig,
    AlterQuotas,
    AlterTopicConfig,
    AlterUser,
    Command,
    CreateTopic,
    DeleteTopic,
    DeleteUser,
    Quota,
    ScramCredential,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.quotas import CLIENT_ID, DEFAULT, THOUSAND, USER, Key
from smq.raft_state.ids import NodeId, TopicId
from smq.raft_state.limits import SCRAM_ITERATIONS_MIN
from smq.raft_state.state import ClusterState
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES
from smq.replication.api import NodeApi

ATTEMPT_MS: Final = 900
DEADLINE_MS: Final = 3000.0
NOTE_MS: Final = 1_500
LOOKS: Final = 2  # after each change
NOT_A_LIMIT: Final = 50_000_000  # bytes of a message: no client sends as many
SETTINGS: Final = (NUM_PARTITIONS, GROUP_INITIAL_DELAY_MS, OFFSETS_RETENTION_MINUTES)  # no client depends on them


class Administrator(Client):
    """What they have in common: changes that are certain, and looks at the state."""

    def change(self, function: str, command: Command, **fields: Any) -> Any:
        """A Script that returns whether the change was made. False ends the client: it may yet take effect."""
        request = proposal(command, ATTEMPT_MS)
        self.world.recorder.invoke(self.process, function, **fields)
        while True:
            result, _ = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
            if not isinstance(result, SmqError | Lost):
                self.ok(function)
                return True
            is_expired = isinstance(result, SmqError) and result.code is ErrorCode.REQUEST_EXPIRED
            if is_expired or self.world.stopped:
                self.conclude_unknown(function)
                return False

    def look(self, function: str, view: Callable[[ClusterState], Any], **fields: Any) -> Script:
        """Reads at any node after a barrier."""

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            def on_barrier(result: object) -> None:
                done(result if isinstance(result, SmqError) else (view(api.state),))

            api.barrier(ATTEMPT_MS, on_barrier)

        node = self.any_node()
        self.world.recorder.invoke(self.process, function, n=node, **fields)
        result = yield Call(node, request, ATTEMPT_MS * 1.5, ATTEMPT_MS)
        seen = {"seen": result[0]} if isinstance(result, tuple) else {}
        self.conclude(function, result, unknown=False, **seen)  # a look has no effect, whatever its outcome

    def lives(self, live: Callable[[str, int], Any]) -> Script:
        """A topic after another, until a change of one is not certain."""
        count = 0
        while not self.world.stopped:
            yield self.think()
            count += 1
            if not (yield from live(f"{self.name}-{count}", count)):
                return


class SettingOwner(Administrator):
    """Sets its setting to ever greater numbers."""

    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"setting-{number}", think_ms=think_ms)
        self.key = SETTINGS[number % len(SETTINGS)]

    def run(self) -> Script:
        value = 0
        while not self.world.stopped:
            yield self.think()
            value += 1
            command = AlterClusterConfig(request_id=self.new_id(), set_=((self.key, str(value)),))
            if not (yield from self.change("set", command, name=self.key, v=str(value))):
                return
            for _ in range(LOOKS):
                yield self.think()
                yield from self.look("setting", lambda state: state.config.get(self.key, ""), name=self.key)


class UserOwner(Administrator):
    """Changes a user's credentials and deletes it, and tries to delete it as the last administrator. The number of
    iterations says which change a credential is of."""

    MECHANISMS: Final = {1: 32, 2: 64}  # and the bytes of their keys

    def run(self) -> Script:
        name, number, seen = f"user of {self.name}", 0, dict.fromkeys(self.MECHANISMS, "")
        while not self.world.stopped:
            yield self.think()
            number += 1
            command: Command = DeleteUser(request_id=self.new_id(), name=name)
            if any(seen.values()) and self.rng.random() < 0.2:
                seen = dict.fromkeys(seen, "")
            else:
                iterations = SCRAM_ITERATIONS_MIN + number
                mechanisms = self.rng.choice(((1,), (2,), (1, 2)))
                seen |= dict.fromkeys(mechanisms, str(iterations))
                credentials = tuple(self._credential(mechanism, iterations) for mechanism in mechanisms)
                command = AlterUser(request_id=self.new_id(), name=name, set_=credentials)
            if not (yield from self.change("set", command, name=name, v=" ".join(seen.values()))):
                return
            if any(seen.values()) and self.rng.random() < 0.3:
                # Refused, whenever it arrives: so no look misses the user.
                last = DeleteUser(request_id=self.new_id(), name=name, administrators=(name,))
                yield from self.request(proposal(last, ATTEMPT_MS), deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
            for _ in range(LOOKS):
                yield self.think()
                yield from self.look("setting", lambda state: _iterations(state, name, self.MECHANISMS), name=name)

    def _credential(self, mechanism: int, iterations: int) -> ScramCredential:
        size = self.MECHANISMS[mechanism]
        return ScramCredential(
            mechanism=mechanism,
            iterations=iterations,
            salt=self.rng.randbytes(16),
            stored_key=self.rng.randbytes(size),
            server_key=self.rng.randbytes(size),
        )


def _iterations(state: ClusterState, name: str, mechanisms: Iterable[int]) -> str:
    user = state.users.get(name)
    found = {c.mechanism: str(c.iterations) for c in user.credentials} if user is not None else {}
    return " ".join(found.get(mechanism, "") for mechanism in mechanisms)


class RuleOwner(Administrator):
    """Grants and revokes what one user may do. The rules that there are say which change was the last."""

    def run(self) -> Script:
        principal, number, rules = f"User:{self.name}", 0, set[Acl]()
        while not self.world.stopped:
            yield self.think()
            number += 1
            new = Acl(2, 3, f"topic-{number}", principal, "*", 3, self.rng.choice((2, 3)))
            old = frozenset(self.rng.sample(sorted(rules), self.rng.randint(0, len(rules))))
            rules = (rules - old) | {new}
            command = AlterAcls(request_id=self.new_id(), add=(new,), remove=tuple(sorted(old)))
            if not (yield from self.change("set", command, name=principal, v=_names(rules))):
                return
            for _ in range(LOOKS):
                yield self.think()
                yield from self.look("setting", lambda state: _rules_of(state, principal), name=principal)


def _names(rules: Iterable[Acl]) -> str:
    return " ".join(f"{acl.name}:{acl.permission}" for acl in sorted(rules))


def _rules_of(state: ClusterState, principal: str) -> str:
    return _names(acl for acl in state.acls if acl.principal == principal)


class QuotaOwner(Administrator):
    """Sets and removes quotas of a user and of all, of a client id and of both. The one that applies to that user says
    which change was the last. One authority for all looks: it has to learn of each node's quotas."""

    def run(self) -> Script:
        user, client_id, number = (USER, self.name), (CLIENT_ID, "job"), 0
        rates: dict[Any, int] = {}
        entities = ((client_id, user), (user,), ((USER, DEFAULT),), (client_id,))  # the first that is set applies
        state = [ClusterState()]
        quotas = Quotas(lambda: state[0])

        def applied(seen: ClusterState) -> str:
            state[0] = seen
            found = quotas.of(Key.MUTATIONS, self.name, "job")
            return "" if found is None else f"{found.rate:g}"

        while not self.world.stopped:
            yield self.think()
            number += 1
            entity = self.rng.choice(entities)
            rates[entity] = number if self.rng.random() < 0.7 else 0
            quota = Quota(entity=entity, key=Key.MUTATIONS, thousandths=THOUSAND * rates[entity])
            command = AlterQuotas(request_id=self.new_id(), quotas=(quota,))
            expected = next((str(rates[entity]) for entity in entities if rates.get(entity)), "")
            if not (yield from self.change("set", command, name=self.name, v=expected)):
                return
            for _ in range(LOOKS):
                yield self.think()
                yield from self.look("setting", applied, name=self.name)


class Defaulter(Administrator):
    """Changes a default of new topics. A topic has the default of the moment in which it was made, until an alteration
    asks for the present one."""

    def run(self) -> Script:
        yield from self.lives(self._life)

    def _life(self, topic: str, number: int) -> Any:
        """A Script that returns whether every change was made."""
        first = NOT_A_LIMIT + 2 * number
        create = CreateTopic(
            request_id=self.new_id(),
            name=topic,
            topic_id=TopicId(self.rng.randbytes(16)),
            partition_count=1,
            replication_factor=1,
            created_ms=int(self.world.now_ms()),
        )
        reset = AlterTopicConfig(request_id=self.new_id(), name=topic, unset=(MAX_MESSAGE_BYTES,))
        for command, default in ((create, first), (reset, first + 1)):
            for value in (default, default + 1):
                set_ = ((broker_name(MAX_MESSAGE_BYTES), str(value)),)
                if not (yield from self.change("default", AlterClusterConfig(request_id=self.new_id(), set_=set_))):
                    return False
                if value == default and not (yield from self.change("make", command, name=topic, v=str(value))):
                    return False
                yield self.think()
                yield from self.look("made", lambda state: _message_bytes(state, topic), name=topic)
        return (yield from self.change("drop", DeleteTopic(request_id=self.new_id(), name=topic), name=topic))


def _message_bytes(state: ClusterState, topic: str) -> str:
    found = state.topics.get(topic)
    return found.config.get(MAX_MESSAGE_BYTES, "") if found is not None else ""


class Placer(Administrator):
    """Creates topics, lets them grow, and deletes them. It chooses the nodes of every partition."""

    def run(self) -> Script:
        yield from self.lives(self._life)

    def _life(self, topic: str, _number: int) -> Any:
        """A Script that returns whether every change was made."""
        replicas = self.rng.randint(1, len(self.world.nodes))
        first, more = self._assignments(replicas), self._assignments(replicas)
        create = CreateTopic(
            request_id=self.new_id(),
            name=topic,
            topic_id=TopicId(self.rng.randbytes(16)),
            partition_count=len(first),
            replication_factor=replicas,
            assignments=first,
            created_ms=int(self.world.now_ms()),
        )
        both = len(first) + len(more)
        grow = AddPartitions(request_id=self.new_id(), name=topic, partition_count=both, assignments=more)
        for command, assigned in ((create, first), (grow, more)):
            if not (yield from self.change("place", command, name=topic, r=[list(nodes) for nodes in assigned])):
                return False
            for _ in range(LOOKS):
                yield self.think()
                yield from self.look("placed", lambda state: _replicas(state, topic), name=topic)
        delete = DeleteTopic(request_id=self.new_id(), name=topic)
        return (yield from self.change("drop", delete, name=topic))

    def _assignments(self, replicas: int) -> tuple[tuple[NodeId, ...], ...]:
        count = self.rng.randint(1, 2)
        return tuple(tuple(self.rng.sample(self.world.nodes, replicas)) for _ in range(count))


def _replicas(state: ClusterState, topic: str) -> list[list[int]]:
    found = state.topics.get(topic)
    return [list(partition.replicas) for partition in found.partitions] if found is not None else []


class Noter(LoopingClient):
    """It is refused until the cluster is at level 2. Nothing of it is in the history: its changes are judged
    by the nodes' digests, and by the nodes that they stop."""

    def act(self) -> Script:
        request_id = self.new_id()
        command: Command = Note(request_id=request_id, text="x")
        if self.rng.random() < 0.5:
            value = self.rng.choice("01")
            command = AlterClusterConfig(request_id=request_id, set_=((SETTING, value),))
        yield Call(self.any_node(), proposal(command, NOTE_MS), NOTE_MS * 1.5, NOTE_MS)
