"""A consumer of a group with members: joins, takes its share, commits what it has read, leaves or goes silent.

Owns the reaction to each answer, as client libraries have it, and what members of both protocols do alike: they find
their coordinator, and commit. They talk to the coordinators themselves, which run in the simulated nodes as they do in
production. `consumer_members` has the members of consumer groups.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from chaos_tests.checkers.membership import SESSION_MS
from chaos_tests.sim.clients.base import Client, Known, World
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.coordinator.groups.member_requests import Beaten, Identity, Join, Joined, Sync, Synced
from smq.coordinator.kafka.errors import OUTCOME_CODES, KafkaError
from smq.raft_state.commands import GroupMember, OffsetCommit
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset

GROUP: Final = "kg"
BRIEF: Final = "brief"  # a group whose members commit nothing and leave soon; they delete it when the last one leaves
STATIC: Final = "static"  # the instance id of the one static member
REBALANCE_MS: Final = 6_000
BEAT_MS: Final = 500.0
CALL_MS: Final = 1_000.0
JOIN_MS: Final = REBALANCE_MS + 14_000  # a rebalance, and a command at its end
PROTOCOL: Final = "all"
COMMIT_MS: Final = 12 * CALL_MS  # a node tries for longer than a client waits, as it does for Kafka clients
COMMIT_ATTEMPTS: Final = 5
_FATAL: Final = (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_INSTANCE_ID)
_REJOIN: Final = (KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION)


def code_of(result: Any) -> Any:
    """The answer's code as Kafka clients, and the checkers, know it; an SmqError's own code; anything else as it is."""
    if isinstance(result, Joined | Synced | Beaten):
        return OUTCOME_CODES[result.outcome]
    return getattr(result, "code", result)


def _label(member_id: str) -> str:
    """A static member has one label for all its ids."""
    return STATIC if member_id.startswith(f"{STATIC}-") else member_id


class Member(Client):
    """Of either protocol."""

    def __init__(self, world: World, name: str, *, group: str, instance: str) -> None:
        super().__init__(world, name)
        self.group = group
        self.instance = instance
        self.member_id = ""
        self.generation = -1  # of a consumer group: the member's epoch
        self.coordinator: NodeId | None = None
        self._held: list[Known] = []
        self._positions: dict[str, int] = {}
        self._count = 0

    @property
    def _who(self) -> Identity:
        return Identity(member_id=self.member_id, instance_id=self.instance)

    def _ask(
        self,
        request: Callable[[Any, Callable[[Any], None]], object],
        ms: float = CALL_MS,
        deadline_ms: float | None = None,
    ) -> Any:
        """A Script that returns the answer of the group's coordinator, which is looked up first if it is not known.

        The node is given as long as the client waits, or until `deadline_ms`. Afterwards the client may send the same
        request again, and Kafka's protocol could not tell a late arrival of the first from a new request.
        """
        if self.coordinator is None:
            found = yield Call(
                self.any_node(), lambda api, done: done(coordinator_of(api.state, self.group).node), CALL_MS, CALL_MS
            )
            if isinstance(found, Lost | SmqError) or not found:
                return Lost.REFUSED
            self.coordinator = found
        result = yield Call(self.coordinator, request, ms * 1.2, deadline_ms or ms, is_tied=deadline_ms is not None)
        if isinstance(result, Lost) or code_of(result) in (
            KafkaError.NOT_COORDINATOR,
            KafkaError.COORDINATOR_NOT_AVAILABLE,
            ErrorCode.NOT_COORDINATOR,
            ErrorCode.NODE_NOT_READY,
        ):
            self.coordinator = None
        return result

    def _commit(self, partition: Known, *, generation: int | None = None) -> Script:
        self._count += 1
        tag, who = f"{self.name}-{self._count}", self._who
        generation = self.generation if generation is None else generation
        at = min(self._positions.get(partition.key, 0) + self.rng.randint(0, 3), partition.hwm)
        self._positions[partition.key] = at
        items = (OffsetCommit(partition=partition.pid, offset=Offset(at), metadata=tag),)

        def request(api: Any, done: Callable[[Any], None]) -> None:
            # Kafka's requests have no ids: each attempt is a separate command
            request_id = self.new_id()
            api.groups.commit(self.group, who, generation, items, request_id, int(COMMIT_MS), done)

        sender = self._sender(generation)
        self.world.recorder.invoke(self.process, "commit", g=self.group, k=partition.key, o=at, tag=tag, **sender)
        unknown = False
        for _ in range(COMMIT_ATTEMPTS):
            result = yield from self._ask(request, deadline_ms=COMMIT_MS)
            if not isinstance(result, Lost):
                break
            unknown = unknown or result is Lost.TIMED_OUT
        code = result.code if isinstance(result, SmqError) else result
        is_definite = isinstance(code, KafkaError) or (isinstance(result, SmqError) and result.code.is_definite)
        if not isinstance(result, KafkaError | Lost | SmqError):
            self.ok("commit")
        elif is_definite and not unknown:
            self.world.recorder.fail(self.process, "commit", err=code.name)
        else:
            self.conclude_unknown("commit")

    def _sender(self, generation: int) -> dict[str, Any]:
        """What the history has of a commit's sender."""
        return {"gen": generation, "m": self.member_id}


class GroupConsumer(Member):
    """Of the classic protocol."""

    def __init__(self, world: World, name: str, *, instance: str = "", group: str = GROUP) -> None:
        super().__init__(world, name, group=group, instance=instance)

    def run(self) -> Script:
        while not self.world.stopped:
            yield from self.live()
        if self.member_id and self.rng.random() < 0.5:
            yield from self._leave()

    def live(self) -> Script:
        """One life as a member: until an answer makes it begin again, or it ends itself."""
        joined = yield from self._join()
        if joined is None:
            yield Sleep(self.rng.uniform(50, 300))
            return
        if not (yield from self._sync(joined)):
            return
        if self.group == BRIEF:
            yield Sleep(self.rng.uniform(0, BEAT_MS))
            yield from self._leave()
            self.member_id = ""
            yield from self._delete_group()
            return
        if self._held and self.rng.random() < 0.3:  # a thread that has not noticed: its commit must be refused
            yield from self._commit(self.rng.choice(self._held), generation=self.generation - 1)
        while not self.world.stopped:
            yield Sleep(BEAT_MS * self.rng.uniform(0.8, 1.2))
            code = yield from self._beat()
            if code in _REJOIN:
                return
            if code in _FATAL:
                self.member_id = ""
                return
            if code is KafkaError.NONE and self._held and self.rng.random() < 0.6:
                yield from self._commit(self.rng.choice(self._held))
            if self.rng.random() < 0.02:
                yield from self._end()
                return

    def _end(self) -> Script:
        """It leaves, or its process dies and another one starts later."""
        if self.rng.random() < 0.5:
            yield from self._leave()
        elif self.rng.random() < 0.7:
            yield Sleep(self.rng.uniform(0.2, 2.0) * SESSION_MS)
        self.member_id = ""

    # ------------------------------------------------------------------------------------------ requests
    def _join(self) -> Any:
        """A Script that returns the Joined of its generation; None if it must try again."""
        member = GroupMember(
            member_id=self.member_id,
            instance_id=self.instance,
            client_id=self.name,
            client_host="/sim",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            protocols=((PROTOCOL, b""),),
        )
        requested = Join(
            group=self.group, member=member, protocol_type="consumer", takes_id_first=True, can_skip_assignment=True
        )
        self.world.recorder.invoke(self.process, "gjoin", g=self.group, m=self.member_id)
        joined = yield from self._ask(lambda api, done: api.groups.join(requested, done), JOIN_MS)
        if not isinstance(joined, Joined):
            self.conclude_unknown("gjoin")
            return None
        code = code_of(joined)
        if code is KafkaError.NONE:
            self.member_id, self.generation = joined.member_id, joined.generation
            ids = [member_id for member_id, _, _ in joined.members]
            joined_fields = {"leader": _label(joined.leader), "members": [_label(member_id) for member_id in ids]}
            self.ok("gjoin", m=joined.member_id, gen=joined.generation, **joined_fields)
            return joined
        self.world.recorder.fail(self.process, "gjoin", err=code.name)
        if code is KafkaError.MEMBER_ID_REQUIRED:
            self.member_id = joined.member_id
            return (yield from self._join())
        if code in _FATAL:
            self.member_id = ""
        return None

    def _sync(self, joined: Joined) -> Any:
        """A Script that returns whether the member has its share."""
        assignments: tuple[tuple[str, bytes], ...] = ()
        if joined.leader == self.member_id and not joined.skip_assignment:
            assignments = self._assign([member_id for member_id, _, _ in joined.members])
        requested = Sync(group=self.group, who=self._who, generation=self.generation, assignments=assignments)
        self.world.recorder.invoke(self.process, "gsync", g=self.group, m=self.member_id, gen=self.generation)
        synced = yield from self._ask(lambda api, done: api.groups.sync(requested, done), JOIN_MS)
        if not isinstance(synced, Synced):
            self.conclude_unknown("gsync")
            return False
        code = code_of(synced)
        if code is not KafkaError.NONE:
            self.world.recorder.fail(self.process, "gsync", err=code.name)
            if code in _FATAL:
                self.member_id = ""
            return False
        numbers = struct.unpack(f">{len(synced.assignment) // 4}i", synced.assignment)
        self._held = [self.world.partitions[n] for n in numbers if n < len(self.world.partitions)]
        self.ok("gsync", who=_label(self.member_id), parts=sorted(known.key for known in self._held))
        return True

    def _assign(self, ids: list[str]) -> tuple[tuple[str, bytes], ...]:
        """Deals the partitions out to the members in turn."""
        live = [n for n, known in enumerate(self.world.partitions) if not known.dropped]
        shares = [live[at :: len(ids)] for at in range(len(ids))]
        return tuple((name, struct.pack(f">{len(share)}i", *share)) for name, share in zip(ids, shares, strict=True))

    def _beat(self) -> Any:
        """A Script that returns the code of the answer; None if there was none."""
        who, generation = self._who, self.generation
        self.world.recorder.invoke(self.process, "gbeat", g=self.group, m=self.member_id, gen=generation)
        code = yield from self._ask(
            lambda api, done: done(OUTCOME_CODES[api.groups.heartbeat(self.group, who, generation)])
        )
        if not isinstance(code, KafkaError):
            self.conclude_unknown("gbeat")
            return None
        self.ok("gbeat", code=code.name)
        return code

    def _leave(self) -> Script:
        who = self._who
        self.world.recorder.invoke(self.process, "gleave", g=self.group, m=self.member_id)
        outcomes = yield from self._ask(lambda api, done: api.groups.leave(self.group, [who], done), CALL_MS * 12)
        if isinstance(outcomes, list):
            self.ok("gleave", code=OUTCOME_CODES[outcomes[0]].name)
        else:
            self.conclude_unknown("gleave")

    def _delete_group(self) -> Script:
        """Refused as long as it has members; the next member then makes a group of the same name."""
        request_id = self.new_id()
        yield from self._ask(lambda api, done: api.groups.delete_group(self.group, request_id, int(CALL_MS), done))

    # ------------------------------------------------------------------------------------------ at the end
    def probe(self) -> Script:
        """After the heal, once all sessions have long expired, a member alone must get every partition."""
        yield Sleep(3.0 * SESSION_MS + REBALANCE_MS)
        for _ in range(5):
            joined = yield from self._join()
            if joined is not None and (yield from self._sync(joined)):
                break
        live = sorted(known.key for known in self.world.partitions if not known.dropped)
        held = sorted(known.key for known in self._held)
        self.world.recorder.note("galone", g=self.group, held=held, live=live)
        yield from self._leave()
