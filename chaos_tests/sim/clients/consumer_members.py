"""A member of a consumer group (KIP-848): heartbeats with what it has, gives up what it must, commits, ends.

Owns its reaction to each answer, as client libraries have it: it says only what has changed, and everything after an
answer that it missed. What it has is in the history with each heartbeat, for `checkers.ownership` to judge.
"""

from typing import Any, Final

from chaos_tests.checkers.membership import SESSION_MS
from chaos_tests.checkers.ownership import REBALANCE_MS
from chaos_tests.sim.clients.base import Known, World
from chaos_tests.sim.clients.groups import BEAT_MS, STATIC, Member, code_of
from chaos_tests.sim.rpc import Script, Sleep
from smq.coordinator.groups.member_requests import LEAVING, Beat, Beaten
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.handlers.consumers import gathered, spread
from smq.raft_state.ids import PartitionIndex, TopicId, partition_id
from smq.raft_state.state import AWAY_EPOCH

CONSUMERS: Final = "consumers"  # the group's name
ANSWER_MS: Final = 12_000.0  # that a node has: it tries for longer than a client waits
ASSIGNORS: Final = (None, "uniform", "range")
_FENCED: Final = (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_MEMBER_EPOCH, KafkaError.GROUP_ID_NOT_FOUND)

Parts = set[tuple[TopicId, int]]


class ConsumerMember(Member):
    def __init__(self, world: World, name: str, *, instance: str = "", slow: float = 0.4) -> None:
        """`slow`: how often it takes its time to give something up."""
        super().__init__(world, name, group=CONSUMERS, instance=instance)
        self._slow = slow
        self._starts = 0
        self._begin()

    def _begin(self) -> None:
        """A new process, which knows nothing of the one before. Newer clients choose their ids themselves."""
        self._starts += 1
        self.member_id = f"{self.name}-{self._starts}" if self.rng.random() < 0.8 else ""
        names = sorted({known.topic for known in self.world.partitions if not known.dropped})
        by_pattern = self._slow > 0 and self.rng.random() < 0.3
        if self._slow > 0 and not by_pattern and self.rng.random() < 0.3:
            names = [self.rng.choice(names)]
        self._topics = () if by_pattern else tuple(names)
        self._pattern = "t[0-9]+-[0-9]+" if by_pattern else ""
        self._assignor = self.rng.choice(ASSIGNORS)
        self._former = 0  # its epoch before this one
        self._lose_all()

    def _lose_all(self) -> None:
        self.generation = 0
        self._owned: Parts = set()
        self._granted: Parts = set()
        self._revoked_ms = 0.0  # when it will have given up what is not granted any more
        self._said: Parts | None = None  # None: it has to say everything

    def run(self) -> Script:
        while not self.world.stopped:
            yield from self.live()
        if self.generation > 0 and self.rng.random() < 0.5:
            yield from self.beat(LEAVING)

    def live(self) -> Script:
        """One process, to its end."""
        self._begin()
        while not self.world.stopped:
            code = yield from self.beat()
            if code is KafkaError.FENCED_INSTANCE_ID:
                return
            yield Sleep(BEAT_MS * self.rng.uniform(0.8, 1.2) * (1 if code is KafkaError.NONE else 2))
            if self._owned and self.rng.random() < 0.5:
                # Some of them by a thread that has not noticed: they must be refused.
                is_late = self._former > 0 and self.rng.random() < 0.3
                yield from self._commit(self.rng.choice(self.held()), generation=self._former if is_late else None)
            if self.rng.random() < 0.03:
                yield from self._end()
                return

    def _end(self) -> Script:
        """It leaves, perhaps to come back soon, or dies; and is started again."""
        dice = self.rng.random()
        if self.generation > 0 and dice < 0.5:
            yield from self.beat(AWAY_EPOCH if self.instance and dice < 0.4 else LEAVING)
        if self.rng.random() < 0.5:
            yield Sleep(self.rng.uniform(0.1, 1.5) * SESSION_MS)

    def held(self) -> list[Known]:
        """What it reads at this moment."""
        pids = {partition_id(topic_id, PartitionIndex(i)) for topic_id, i in self._owned}
        return [known for known in self.world.partitions if known.pid in pids]

    def _keys(self) -> list[str]:
        return sorted(known.key for known in self.held())

    # ------------------------------------------------------------------------------------------ requests
    def _sender(self, generation: int) -> dict[str, Any]:
        return {"epoch": generation, "w": self.member_id}

    def beat(self, epoch: int | None = None) -> Any:
        """A Script that returns the code of the answer; None if there was none. `epoch`: it goes."""
        if self.world.now_ms() >= self._revoked_ms:
            self._owned &= self._granted
        if epoch is not None:
            self._lose_all()
        else:
            epoch = self.generation
        said, is_full = set(self._owned), self._said is None
        beat = Beat(
            group=self.group,
            member_id=self.member_id,
            epoch=epoch,
            instance_id=self.instance,
            rebalance_timeout_ms=REBALANCE_MS if is_full else -1,
            topics=self._topics if is_full else None,
            pattern=self._pattern if is_full else None,
            assignor=self._assignor if is_full else None,
            owned=gathered(said) if said != self._said else None,
            client_id=self.name,
            client_host="/sim",
        )
        sent: dict[str, Any] = {"g": self.group, "w": self.member_id, "i": self.instance, "epoch": epoch}
        self.world.recorder.invoke(self.process, "cbeat", **sent, owned=self._keys())
        beaten = yield from self._ask(lambda api, done: api.groups.beat(beat, done), deadline_ms=ANSWER_MS)
        self._said = None
        if not isinstance(beaten, Beaten):
            self.conclude_unknown("cbeat")
            return None
        code = code_of(beaten)
        if code is KafkaError.NONE and epoch >= 0:
            self._said = said
            self._take(beaten)
        elif code in _FENCED:
            self._lose_all()
        told = sorted(known.key for known in self.world.partitions if self._is_granted(known))
        self.ok("cbeat", code=code.name, w=beaten.member_id, epoch=beaten.epoch, parts=told)
        return code

    def _is_granted(self, known: Known) -> bool:
        return any(known.pid == partition_id(topic_id, PartitionIndex(i)) for topic_id, i in self._granted)

    def _take(self, beaten: Beaten) -> None:
        self.member_id = beaten.member_id
        if beaten.epoch != self.generation:
            self._former, self.generation = self.generation, beaten.epoch
        if beaten.assignment is None:
            return
        self._granted = spread(beaten.assignment)
        now_ms = self.world.now_ms()
        if self._owned - self._granted and now_ms >= self._revoked_ms and self.rng.random() < self._slow:
            self._revoked_ms = now_ms + self.rng.uniform(0, 2.0 * REBALANCE_MS)
        if now_ms >= self._revoked_ms:
            self._owned &= self._granted
        self._owned |= self._granted


def probe(world: World) -> Script:
    """After the heal, two members soon have every partition between them: those before have left, or are removed."""
    pair = [ConsumerMember(world, f"probe-{STATIC}-{n}", slow=0) for n in range(2)]
    live = sorted(known.key for known in world.partitions if not known.dropped)
    held: list[str] = []
    until_ms = world.now_ms() + 2 * SESSION_MS + REBALANCE_MS
    while held != live and world.now_ms() < until_ms:
        for member in pair:
            yield from member.beat()
        held = sorted(known.key for member in pair for known in member.held())
        yield Sleep(BEAT_MS)
    world.recorder.note("galone", g=CONSUMERS, held=held, live=live)
    for member in pair:
        yield from member.beat(LEAVING)
