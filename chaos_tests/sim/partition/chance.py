"""Random schedules of a group: single steps, and short scripts that reach what single steps almost never do.

Owns the choice of steps, their record, and the reduction of a record to the steps that a failure takes. A record is a
list of calls of the group, so a failure can be played again, step by step.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from chaos_tests.sim.partition.group import FIRST_TRANSACTIONAL, Group, Report
from chaos_tests.sim.partition.producer_truth import Violation
from chaos_tests.sim.run import silence
from smq.raft_state.commands import (
    AdvanceHwms,
    CompactSegment,
    CompleteReplicas,
    ElectLeader,
    MarkIncomplete,
    RegisterNode,
)
from smq.raft_state.handlers.elections import seals_needed
from smq.raft_state.limits import PRODUCER_EXPIRATION_MS_MIN

Step = tuple[str, tuple[Any, ...]]
RECORDS_MAX: Final = 30  # of a run
KEYS: Final = (b"a", b"b", b"c")
SHRINK_RUNS_MAX: Final = 600


class Chance:
    """One seed."""

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self._settings: dict[str, Any] = {
            "nodes": rng.choice((3, 3, 3, 3, 5, 4, 2, 1)),
            "retention_records": rng.choice((0, 0, 0, 0, 3)),
            "seed": seed,
            "compacts": rng.random() < 0.4,
            "expires": rng.random() < 0.2,
        }
        self.group = Group(**self._settings)
        self._producers = rng.choice(((), (1,), (1, 2), (11,), (1, 11), (11, 12)))
        self._is_second = rng.random() < 0.5  # protocol of transactions
        self.steps: list[Step] = []
        self._nodes = [int(n) for n in self.group.nodes]
        self._count = rng.choice((40, 80, 150))
        self._luck = rng.choice((0.3, 0.6, 0.85))
        is_many, is_more = len(self._nodes) > 1, len(self._nodes) > 2
        self._weights: dict[Callable[[], None], float] = {
            self._produce: 12,
            self._send: 10 if self._producers else 0,
            self._connect: rng.choice((0.5, 2)) if self._producers else 0,
            self._take_in_late: rng.choice((0, 2)) if self._producers and not self._settings["expires"] else 0,
            self._advance_clock: rng.choice((2, 6)) if self._settings["expires"] else 0,
            self._end: rng.choice((2, 5)) if self._producers else 0,
            self._unheard_answer: rng.choice((0.5, 2)) if self._producers and is_many else 0,
            self._replicate: 30,
            self._deliver: 8,
            self._apply: rng.choice((5, 12)),
            self._elect: rng.choice((2, 5, 9)),
            self._propose_stale: rng.choice((1, 3)),
            self._seal: rng.choice((1, 3)),
            self._restart: rng.choice((0, 1.5, 5)),
            self._crash: rng.choice((0, 1)),
            self._start: 3,
            self._wipe: rng.choice((0, 0, 0.7, 2)) if is_many else 0,
            self._damage: rng.choice((0, 0, 0.7)) if is_many else 0,
            self._rot: rng.choice((0, 0, 0.7)) if is_more else 0,
            self._lose_rows: rng.choice((0, 0, 0.7)) if is_more else 0,
            self._move_log_start: rng.choice((0, 0.7, 2)),
            self._tick: 8,
            self._commit: rng.choice((6, 14)),
            self._hold_disk: rng.choice((0, 2)),
            self._free_disk: 4,
            self._drop: rng.choice((0, 2)),
            self._hand_over: rng.choice((0, 0.5, 2)),
            self._ask_end: 4,
            self._forgotten_seal: rng.choice((0, 0.5, 1.5)) if is_many else 0,
            self._lost_disk: rng.choice((0, 0, 0.5, 1.5)) if is_more else 0,
            self._set_limit: 2 if self._settings["retention_records"] else 0,
            self._damage_running: rng.choice((0, 0, 0.7)) if is_more else 0,
            self._compact: rng.choice((2, 6)) if self._settings["compacts"] else 0,
            self._compact_together: rng.choice((0, 1, 3)) if self._settings["compacts"] else 0,
        }

    # ------------------------------------------------------------------------------------------ the run
    def run(self) -> None:
        """Raises Violation."""
        chosen = self._rng.choices(list(self._weights), weights=list(self._weights.values()), k=self._count)
        for step in chosen:
            step()
        self._do("heal")

    def again(self, steps: Sequence[Step]) -> None:
        """Another record of a run with the same settings."""
        play(Group(**self._settings), steps)

    def _do(self, name: str, *arguments: Any) -> Any:
        self.steps.append((name, arguments))
        return getattr(self.group, name)(*arguments)

    def _is(self, probability: float | None = None) -> bool:
        return self._rng.random() < (self._luck if probability is None else probability)

    def _any(self) -> int:
        return self._rng.choice(self._nodes)

    def _leader(self) -> int:
        """One that leads as far as it knows, mostly the latest."""
        if self._is(0.9):
            leads = [(m.leads, int(n)) for n, m in self.group.members.items() if m.leads is not None]
            if leads:
                return max(leads)[1] if self._is(0.7) else self._rng.choice(leads)[1]
        return self._any()

    # ------------------------------------------------------------------------------------------ steps
    def _produce(self, at: int | None = None) -> None:
        if len(self.group.records) < RECORDS_MAX:
            self._do("produce", self._leader() if at is None else at, self._rng.choice((1, 1, 2)), *self._keyed())

    def _send(self) -> None:
        """By an idempotent producer, mostly with an answer of its node in sight."""
        producer = self._rng.choice(self._producers)
        found = self.group.producers.get(producer)
        if found is None or not found.connections or self._is(0.2):
            self._connect(producer)
        if self._is(0.7):
            self._number(producer)
        self._do("request", producer, self._rng.choice((1, 1, 5)))
        if self._is(0.9):
            self._do("take_in", producer, -1, self._rng.choice((1, 5)))

    def _end(self) -> None:
        """A transaction."""
        producer = self._rng.choice(self._producers)
        if producer < FIRST_TRANSACTIONAL:
            return
        if self._is(0.15):
            self._do("replace", producer)
        else:
            self._do("end", producer, self._is(0.6), self._is_second)

    def _advance_clock(self) -> None:
        self._do("advance_clock", self._rng.choice((PRODUCER_EXPIRATION_MS_MIN // 4, PRODUCER_EXPIRATION_MS_MIN)))

    def _number(self, producer: int) -> None:
        if producer >= FIRST_TRANSACTIONAL:
            self._do("begin", producer, self._is_second)
        if len(self.group.records) < RECORDS_MAX:
            self._do("number", producer, self._rng.choice((1, 1, 2)), *self._keyed())

    def _keyed(self) -> tuple[bytes | None, bool]:
        """A key, and whether the record is a tombstone."""
        return (self._rng.choice(KEYS), self._is(0.2)) if self._settings["compacts"] else (None, False)

    def _connect(self, producer: int | None = None, node: int | None = None) -> None:
        number = self._rng.choice(self._producers) if producer is None else producer
        self._do("connect", number, self._leader() if node is None else node)

    def _take_in_late(self) -> None:
        """What a producer has left behind."""
        for producer, found in self.group.producers.items():
            waiting = [number for number, connection in enumerate(found.connections) if connection.waiting]
            if waiting:
                self._do("take_in", producer, self._rng.choice(waiting), self._rng.choice((1, 5)))

    def _replicate(self) -> None:
        """From a leader to a follower and back, now and then in part."""
        leader, follower = self._leader(), self._any()
        if self._is(0.5):
            self._catch_up(follower)
        self._pull(leader, follower)

    def _pull(self, leader: int, follower: int, luck: float = 0.9) -> None:
        if leader == follower:
            return
        for source, target in ((leader, follower), (follower, leader)) * 2:
            if self._is(luck):
                self._do("deliver", source, target)
            if self._is(0.5):
                self._do("run", 1.0)

    def _deliver(self) -> None:
        sessions = [key for key, waiting in self.group.sent.items() if waiting]
        if sessions:
            source, target, channel = self._rng.choice(sessions)
            self._do("deliver_on", int(source), int(target), channel.name, self._rng.choice((1, 1, 1_000)))

    def _apply(self) -> None:
        self._catch_up(self._any())

    def _catch_up(self, node: int, *, fully: bool = False) -> None:
        member, end = self.group.member(node), len(self.group.log)
        if member.is_up and member.applied < end:
            to = end if fully or self._is() else self._rng.randint(member.applied + 1, end)
            self._do("apply", node, to, self._is(0.1))

    def _elect(self) -> None:
        needed = seals_needed(len(self._nodes))
        asked = self._rng.sample(self._nodes, self._rng.choice((1, needed, needed, len(self._nodes))))
        for node in asked:
            if self._is():
                self._catch_up(node, fully=True)
            self._do("seal", node, int(self.group.part.epoch))
        self._propose_election(self.group.part.epoch, only_live=self._is(0.7))
        if self._is():
            self._commit_latest(ElectLeader)
            if self._is():
                self._catch_up(int(self.group.part.leader), fully=True)

    def _propose_stale(self) -> None:
        self._propose_election(self.group.part.epoch - (1 if self._is(0.05) else 0), only_live=False)

    def _propose_election(self, epoch: int, *, only_live: bool) -> None:
        known = list(enumerate(self.group.reports))
        self._rng.shuffle(known)
        by_node: dict[int, tuple[int, Report]] = {}
        for number, report in known:
            if report.epoch == epoch and (not only_live or self._is_of_present_process(report)):
                by_node[report.node] = (number, report)
        found = sorted(by_node.values(), key=lambda item: item[0])
        if found and self._is(0.3):
            found = self._rng.sample(found, self._rng.randint(1, len(found)))
        if not found:
            return
        longest = max(report.good for _, report in found)
        able = [number for number, report in found if report.good == longest or self._is(0.25)]
        self._do("propose_from", tuple(number for number, _ in found), self._rng.choice(able))

    def _is_of_present_process(self, report: Report) -> bool:
        return self.group.members[report.node].processes == report.incarnation

    def _seal(self) -> None:
        self._do("seal", self._any(), int(self.group.part.epoch) - (1 if self._is(0.1) else 0))

    def _commit(self) -> None:
        known = list(enumerate(self.group.proposals))
        waiting = [n for n, p in known if p.done is not None]
        # A mark that is committed again, long after its process has caught up, makes a whole replica incomplete. With a
        # second one that has lost its disk and no leader, no election is left:
        # docs/decisions/elections-ask-for-seals.md names this case.
        others = [n for n, p in known if p.done is not None or not isinstance(p.command, MarkIncomplete)]
        self._do("commit_number", self._rng.choice(waiting if waiting and self._is(0.8) else others))

    def _commit_latest(self, *kinds: type, node: int | None = None) -> None:
        found = [
            n
            for n, p in enumerate(self.group.proposals)
            if isinstance(p.command, kinds) and (node is None or p.node == node)
        ]
        if found:
            self._do("commit_number", found[-1] if self._is(0.8) else self._rng.choice(found))

    def _crash(self) -> None:
        self._do("crash", self._any())

    def _restart(self) -> None:
        node = self._any()
        self._do("crash", node)
        self._start_again(node)

    def _start(self) -> None:
        down = [int(n) for n, m in self.group.members.items() if not m.is_up]
        if down:
            self._start_again(self._rng.choice(down))

    def _start_again(self, node: int, *, registers: float | None = None) -> None:
        member = self.group.member(node)
        kept = member.applied if self._is() else self._rng.randint(0, member.applied)
        self._do("start", node, kept)
        if self._is(registers):
            self._commit_latest(RegisterNode, node=node)

    def _wipe(self) -> None:
        self._lose("wipe", self._any())

    def _damage(self) -> None:
        self._lose("damage_tail", self._any(), self._rng.choice((1, 1, 2, 9)))

    def _rot(self) -> None:
        self._lose("rot", self._any())

    def _damage_running(self) -> None:
        self._do("damage_running", self._any(), self._rng.randrange(8))

    def _lose_rows(self) -> None:
        self._lose(self._rng.choice(("lose_last_batch", "lose_log")), self._any())

    def _lose(self, how: str, node: int, *options: int) -> None:
        if not self.group.may_lose(node):
            return
        if self._is(0.4):
            self._do("run", 2.0)
        self._do(how, node, *options)
        if self._is(0.9):
            self._start_again(node)
            if how in ("damage_tail", "lose_log") and self._is():
                self._do("tick", node, 50.0)
                self._commit_latest(MarkIncomplete, node=node)
                self._catch_up(node)

    def _move_log_start(self) -> None:
        self._do("move_log_start", self._rng.randint(0, max(1, self.group.part.hwm)))

    def _set_limit(self) -> None:
        """A deletion by the limit before it may be on its way."""
        self._do("set_limit", self._rng.choice((0, 1, 3, 3)))

    def _tick(self) -> None:
        self._do("tick", self._any(), self._rng.choice((5.0, 50.0, 300.0, 1_500.0)))

    def _compact(self) -> None:
        """Some of a leader's pass, or all of it. Others follow now and then."""
        leader = self._leader()
        for _ in range(self._rng.choice((3, 8, 15))):
            self._go_on_with_pass(leader)
            if self._is(0.9):
                self._catch_up(leader, fully=True)
            if self._is(0.2):
                follower = self._any()
                self._catch_up(follower)
                self._do("tick", follower, 30.0)
                self._pull(leader, follower)

    def _go_on_with_pass(self, leader: int) -> None:
        self._do("tick", leader, self._rng.choice((30.0, 30.0, 600.0)))
        for number, proposal in enumerate(self.group.proposals):
            is_step = isinstance(proposal.command, AdvanceHwms | CompactSegment) and proposal.done is not None
            if is_step and self._is(0.9):
                self._do("commit_number", number)

    def _hold_disk(self) -> None:
        self._do("hold_disk", self._any())

    def _free_disk(self) -> None:
        self._do("free_disk", self._any())

    def _drop(self) -> None:
        if len(self._nodes) > 1:
            self._do("drop", *self._rng.sample(self._nodes, 2))

    def _hand_over(self) -> None:
        self._do("hand_over", self._leader(), self._any())
        if self._is(0.5):
            self._commit_latest(ElectLeader)

    def _ask_end(self) -> None:
        node = self._leader() if self._is(0.7) else self._any()
        self._do("ask_end", node)
        if self._is(0.5):
            self._catch_up(node, fully=True)

    # ------------------------------------------------------------------------------------------ scripts
    def _lead_now(self) -> int | None:
        leader = int(self.group.part.leader)
        self._catch_up(leader, fully=True)
        return leader if self.group.member(leader).leads == self.group.part.epoch else None

    def _more(self, leader: int) -> None:
        for _ in range(self._rng.choice((1, 1, 2))):
            self._produce(leader)
        if self._is(0.8):
            self._do("run", 2.0)

    def _forgotten_seal(self) -> None:
        """An election is proposed from seals; before it is committed, one of these processes starts again, and the
        leader goes on."""
        leader = self._lead_now()
        if leader is None:
            return
        others = [n for n in self._nodes if n != leader]
        self._rng.shuffle(others)
        for node in others[: seals_needed(len(self._nodes))]:
            self._catch_up(node, fully=True)
            self._do("seal", node, int(self.group.part.epoch))
        self._propose_election(self.group.part.epoch, only_live=True)
        election = len(self.group.proposals) - 1
        again = others[0]
        if self._is(0.9):
            self._do("crash", again)
            self._start_again(again, registers=0.5)
        if self._is(0.5):
            self._catch_up(leader, fully=True)
        if self._is(0.3):
            self._catch_up(again, fully=True)
        self._more(leader)
        self._pull(leader, again, 0.95)
        for node in others[1:]:
            if self._is(0.3):
                self._pull(leader, node)
        self._do("commit_number", election)
        if self._is():
            self._lead_now()

    def _lost_disk(self) -> None:
        """A follower loses its disk between an acknowledgement and an election."""
        leader = self._lead_now()
        if leader is None:
            return
        others = [n for n in self._nodes if n != leader]
        self._rng.shuffle(others)
        lost = others[0]
        self._more(leader)
        for node in others[: len(others) // 2] if self._is(0.8) else others:
            self._catch_up(node, fully=True)
            self._pull(leader, node, 0.95)
        for _ in range(self._rng.choice((1, 1, 2))):
            if not self.group.may_lose(lost):
                return
            self._do("wipe", lost)
            self._start_again(lost, registers=0.85)
            self._catch_up(lost, fully=True)
            if self._is(0.85):
                self._catch_up(leader, fully=True)
            if self._is(0.3):
                self._more(leader)
            for _ in range(self._rng.choice((0, 1, 2))):
                self._pull(leader, lost)
            if self._is(0.8):
                self._do("tick", leader, 5.0)
            if self._is(0.6):
                self._commit_latest(CompleteReplicas)
        if self._is(0.7):
            self._do("crash", leader)
        for node in [lost, *others[1:]]:
            self._catch_up(node, fully=True)
            self._do("seal", node, int(self.group.part.epoch))
        self._propose_election(self.group.part.epoch, only_live=True)
        self._commit_latest(ElectLeader)
        self._lead_now()

    def _compact_together(self) -> None:
        """Passes that the followers go along with, until tombstones go. Now and then a node starts again meanwhile."""
        leader = self._lead_now()
        if leader is None:
            return
        self._do("advance_clock", PRODUCER_EXPIRATION_MS_MIN)
        if len(self.group.records) < RECORDS_MAX:
            key = self._rng.choice(KEYS)
            for is_tombstone in (False, True):
                self._do("produce", leader, 1, key, is_tombstone)
        self._more(leader)
        exchanged = self._rng.choice((0.0, 0.7))
        for _ in range(self._rng.choice((5, 30))):
            self._go_on_with_pass(leader)
            self._do("tick", leader, 600.0)
            if self._is(0.05):
                self._restart()
            for node in self._nodes:
                if self._is(0.9):
                    self._catch_up(node, fully=True)
                    self._do("tick", node, 30.0)
                    self._pull(leader, node, 0.95)
            if self._is(exchanged):
                self._do("exchange", *self._nodes)
            if self._is(0.2):
                self._do("advance_clock", PRODUCER_EXPIRATION_MS_MIN)

    def _unheard_answer(self) -> None:
        """A producer does not hear that its batches are committed. Some are deleted then, before all followers have
        them, and it sends them again to another leader."""
        leader, producer = self._lead_now(), self._rng.choice(self._producers)
        if leader is None:
            return
        self._connect(producer, leader)
        for _ in range(self._rng.choice((1, 2))):
            self._number(producer)
        self._do("request", producer, 5)
        self._do("take_in", producer, -1, 5)
        self._do("connect", producer, self._any())
        others = [n for n in self._nodes if n != leader]
        self._rng.shuffle(others)
        for node in others[: len(others) // 2] if self._is(0.8) else others:
            self._catch_up(node, fully=True)
            self._pull(leader, node, 0.95)
        self._do("tick", leader, 5.0)
        self._commit_latest(AdvanceHwms)
        if self._is(0.3):
            self._end()
        if self._is(0.7):
            self._do("move_log_start", self.group.part.hwm)
            if self._is(0.5):
                self._catch_up(leader, fully=True)
        if self._is(0.4):
            self._more(leader)
        for node in others:
            if self._is(0.7):
                self._catch_up(node, fully=self._is(0.8))
                self._pull(leader, node, 0.95)
        if self._is(0.3):
            self._lose("damage_tail", others[0], self._rng.choice((1, 2, 9)))
        elif self._is(0.3):
            self._rng.choice((self._rot, self._damage_running, self._lose_rows, self._wipe, self._restart))()
        if self._is(0.5):
            self._do("crash", leader)
        for node in others:
            self._catch_up(node, fully=True)
            self._do("seal", node, int(self.group.part.epoch))
        self._propose_election(self.group.part.epoch, only_live=True)
        self._commit_latest(ElectLeader)
        if (now := self._lead_now()) is not None:
            self._connect(producer, now)
            self._do("request", producer, 5)
            self._do("take_in", producer, -1, 5)


def play(group: Group, steps: Sequence[Step]) -> None:
    """Raises Violation if these steps break a promise."""
    for name, arguments in steps:
        getattr(group, name)(*arguments)


def run(seed: int) -> Chance:
    """Without log lines: every damage has some."""
    try:
        with silence():
            chance = Chance(seed)
            chance.run()
    except Exception as e:
        e.add_note(f"seed {seed}")
        raise
    return chance


def run_seeds(first: int, count: int) -> int:
    """Every seed that fails is reported, whatever it failed with. The exit code."""
    failures, acked, elections, started = 0, 0, 0, time.process_time()
    for seed in range(first, first + count):
        try:
            group = run(seed).group
        except Exception as e:  # noqa: BLE001  # it is what the run is for
            failures += 1
            print(f"seed {seed}: {type(e).__name__}: {str(e)[:200]}", flush=True)
        else:
            acked += sum(record.is_acked for record in group.records)
            elections += int(group.part.epoch)
    seconds = time.process_time() - started
    print(f"{count} seeds, {acked} acknowledged records, {elections} elections, {failures} failed, {seconds:.0f} s")
    return 1 if failures else 0


def shrink(seed: int) -> tuple[str, list[Step]]:
    """What a failing seed breaks, and a record as short as found that breaks it, too."""
    chance = Chance(seed)
    try:
        chance.run()
    except Violation as e:
        message, steps = str(e), chance.steps
    else:
        raise ValueError(f"seed {seed} breaks nothing")
    size, runs = max(1, len(steps) // 2), 0
    while size and runs < SHRINK_RUNS_MAX:
        at, has_shrunk = 0, False
        while at < len(steps):
            runs += 1
            fewer = steps[:at] + steps[at + size :]
            broken = _breaks(chance, fewer)
            if broken is not None and _kind(broken) == _kind(message):
                steps, message, has_shrunk = fewer, broken, True
            else:
                at += size
        size = size if has_shrunk and size == 1 else size // 2
    return message, steps


def _breaks(chance: Chance, steps: Sequence[Step]) -> str | None:
    try:
        chance.again(steps)
    except Violation as e:
        return str(e)
    except Exception:  # noqa: BLE001  # without the steps before it, a step may be impossible
        return None
    return None


def _kind(message: str) -> str:
    return "".join(c for c in message if not c.isdigit())[:24]
