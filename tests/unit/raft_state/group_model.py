"""The groups' part of the random commands: rules for members and commits, and plain dicts that they must agree with.

Owns the expected groups after each command. The whole model (test_model) knows the partitions and their error codes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from smq.raft_state.cluster_config import offsets_retention_ms
from smq.raft_state.commands import AdvanceClock, Command
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Generation, PartitionId, TopicId
from smq.raft_state.limits import CLOCK_ELAPSED_MS_MAX, OFFSETS_RETENTION_MINUTES_DEFAULT
from smq.raft_state.replies import Applied, GenerationFormed
from smq.raft_state.state import ClusterState, GroupPhase
from tests.unit.raft_state.support import (
    Driver,
    assign_members,
    commit,
    delete_group,
    delete_offsets,
    form,
    kept_minutes,
    member,
    member_commit,
    remove,
    replaced,
)

# Mostly one group, so that it lives through much; "x" is never static, and "s" and "t" are two ids of one instance.
INSTANCES = {"x": "", "y": "", "s": "i", "t": "i", "u": "j"}
INVALID = ErrorCode.INVALID_REQUEST
groups = st.sampled_from(["g"] * 4 + ["h"])
ids = st.sampled_from(sorted(INSTANCES))
sets_of_ids = st.sampled_from([["s"], ["s", "x"]]) | st.sets(ids, min_size=1, max_size=3).map(sorted)
returns = st.sampled_from([("s", "t"), ("t", "s")]) | st.tuples(ids, ids)
staleness = st.sampled_from([0] * 8 + [1, -1])
FUTURE_MS = 2**60
times = st.sampled_from([0, 5, 5, 1_000, 5_000, FUTURE_MS])
Items = dict[tuple[str, int], int]
items = st.dictionaries(
    st.tuples(st.sampled_from(["a"] * 5 + ["b"] * 2 + ["c"]), st.sampled_from([0] * 5 + [1, 2])),
    st.integers(-1, 12),
    max_size=3,
)


@dataclass
class Team:
    """A group. `members` has the assignment of each, `instances` their instance ids, both in the order of joining."""

    generation: int
    phase: GroupPhase = GroupPhase.EMPTY
    leader: str = ""
    emptied_ms: int = 0
    was_unused: bool = False
    members: dict[str, bytes] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    offsets: dict[PartitionId, tuple[int, int]] = field(default_factory=dict)  # what, and when

    def refusal_of(self, who: str, instance: str) -> ErrorCode | None:
        owners = [name for name, found in self.instances.items() if found == instance]
        if instance and owners and owners[0] != who:
            return ErrorCode.FENCED_INSTANCE
        known = self.instances.get(who)
        return ErrorCode.UNKNOWN_MEMBER if known is None or (instance and known != instance) else None


class GroupRules(RuleBasedStateMachine):
    """Rules for the machine of `driver`."""

    driver: Driver
    expect: Callable[[Command, ErrorCode | None], Applied]
    pid_of: Callable[[str, int], tuple[PartitionId, bool]]  # and whether there is such a partition

    def __init__(self) -> None:
        super().__init__()
        self.teams: dict[str, Team] = {}
        self.floor = 0
        self.clock_ms = 0
        self.retention_ms = OFFSETS_RETENTION_MINUTES_DEFAULT * 60_000

    # -------------------------------------------------------------------------------------------- helpers
    def epoch(self, name: str) -> int:
        """The epoch of the group's coordinator. The machine chooses the table, so it is read from there."""
        return coordinator_of(self.driver.machine.state, name).epoch

    def forget(self, name: str) -> None:
        self.floor = max(self.floor, self.teams.pop(name).generation)

    def forget_topic(self, topic: TopicId) -> None:
        for team in self.teams.values():
            team.offsets = {pid: found for pid, found in team.offsets.items() if pid[:16] != topic}

    def change_of(self, name: str, stale_epoch: int, stale_generation: int) -> tuple[int, int, ErrorCode | None]:
        """The generation that a change of an existing group names, and the code of its refusal."""
        team = self.teams.get(name)
        generation = (team.generation if team else 0) + stale_generation
        if stale_epoch:
            return self.epoch(name) + stale_epoch, generation, ErrorCode.NOT_COORDINATOR
        if team is None:
            return self.epoch(name), generation, ErrorCode.UNKNOWN_GROUP
        return self.epoch(name), generation, ErrorCode.ILLEGAL_GENERATION if stale_generation else None

    # -------------------------------------------------------------------------------------------- members
    @rule(name=groups, who=sets_of_ids, stale_epoch=staleness, stale_generation=staleness)
    def form(self, name: str, who: list[str], stale_epoch: int, stale_generation: int) -> None:
        epoch, generation, code = self.change_of(name, stale_epoch, stale_generation)
        if code is ErrorCode.UNKNOWN_GROUP:
            code = ErrorCode.ILLEGAL_GENERATION if stale_generation else None
        twice = len({INSTANCES[n] for n in who if INSTANCES[n]}) < sum(bool(INSTANCES[n]) for n in who)
        members = [member(n, instance=INSTANCES[n]) for n in who]
        applied = self.expect(form(name, epoch, generation, *members), code or (INVALID if twice else None))
        if code is None and not twice:
            team = self.teams.setdefault(name, Team(self.floor))
            team.generation += 1
            team.was_unused = False
            team.phase, team.leader = GroupPhase.COMPLETING, who[0]
            team.members, team.instances = dict.fromkeys(who, b""), {n: INSTANCES[n] for n in who}
            assert applied.reply == GenerationFormed(generation=Generation(team.generation))

    @rule(
        name=groups,
        given=st.dictionaries(ids, st.binary(max_size=2), max_size=2),
        stale_epoch=staleness,
        stale_generation=staleness,
    )
    def assign(self, name: str, given: dict[str, bytes], stale_epoch: int, stale_generation: int) -> None:
        epoch, generation, code = self.change_of(name, stale_epoch, stale_generation)
        if code is None and self.teams[name].phase is not GroupPhase.COMPLETING:
            code = ErrorCode.REBALANCE_IN_PROGRESS
        self.expect(assign_members(name, epoch, generation, **given), code)
        if code is None:
            team = self.teams[name]
            team.members = {n: given.get(n, b"") for n in team.members}
            team.phase = GroupPhase.STABLE

    @rule(name=groups, who=sets_of_ids, at_ms=times, stale_epoch=staleness, stale_generation=staleness)
    def leave(self, name: str, who: list[str], at_ms: int, stale_epoch: int, stale_generation: int) -> None:
        """They left or timed out: it is the same command."""
        epoch, generation, code = self.change_of(name, stale_epoch, stale_generation)
        self.expect(remove(name, epoch, generation, *who, at_ms=at_ms), code)
        if code is not None or not set(who) & set(self.teams[name].members):
            return
        team = self.teams[name]
        team.members = {n: assigned for n, assigned in team.members.items() if n not in who}
        team.instances = {n: team.instances[n] for n in team.members}
        team.phase = GroupPhase.PREPARING
        if not team.members:
            team.generation += 1
            team.phase, team.leader = GroupPhase.EMPTY, ""
            team.emptied_ms = max(at_ms, self.clock_ms)

    @rule(name=groups, who=returns, stale_epoch=staleness)
    def come_back(self, name: str, who: tuple[str, str], stale_epoch: int) -> None:
        """A static member under another id, or one that is not static."""
        old, new = who
        epoch, _, code = self.change_of(name, stale_epoch, 0)
        team = self.teams.get(name)
        if code is None and team is not None:
            code = team.refusal_of(old, INSTANCES[new])
            if code is None and (not INSTANCES[new] or new in team.members):
                code = INVALID
        self.expect(replaced(name, epoch, old, member(new, instance=INSTANCES[new])), code)
        if code is None and team is not None:
            team.members = {new if n == old else n: assigned for n, assigned in team.members.items()}
            team.instances = {n: INSTANCES[n] for n in team.members}
            team.leader = new if team.leader == old else team.leader

    # -------------------------------------------------------------------------------------------- commits
    @rule(name=groups, wanted=items)
    def commit(self, name: str, wanted: Items) -> None:
        team = self.teams.get(name)
        code = ErrorCode.UNKNOWN_MEMBER if team is not None and team.members else None
        self.commit_items(name, wanted, code, commit(name, *self.pairs(wanted)), 5)

    @rule(
        name=groups,
        who=ids,
        wanted=items,
        at_ms=times,
        stale=st.sampled_from([0] * 6 + [1, -1, -100]),
        stale_epoch=staleness,
    )
    def commit_as_a_member(self, name: str, who: str, wanted: Items, at_ms: int, stale: int, stale_epoch: int) -> None:
        """-100 is no member's generation: that of a consumer that manages its partitions itself."""
        team = self.teams.get(name)
        generation = -1 if stale == -100 else max((team.generation if team else 0) + stale, 0)
        code = ErrorCode.NOT_COORDINATOR if stale_epoch else None
        if code is None and (generation >= 0 or (team is not None and team.members)):
            if team is None:
                code = ErrorCode.ILLEGAL_GENERATION
            else:
                code = team.refusal_of(who, INSTANCES[who])
                code = code or (ErrorCode.ILLEGAL_GENERATION if generation != team.generation else None)
                code = code or (ErrorCode.REBALANCE_IN_PROGRESS if team.phase is GroupPhase.COMPLETING else None)
        epoch, instance = self.epoch(name) + stale_epoch, INSTANCES[who]
        command = member_commit(name, generation, who, *self.pairs(wanted), instance=instance, at_ms=at_ms, epoch=epoch)
        self.commit_items(name, wanted, code, command, at_ms)

    def pairs(self, wanted: Items) -> Iterable[tuple[PartitionId, int]]:
        """Each partition once: topics that do not exist share an id here; a duplicate has its own test."""
        return {self.pid_of(*place)[0]: offset for place, offset in wanted.items()}.items()

    def commit_items(self, name: str, wanted: Items, code: ErrorCode | None, command: Command, at_ms: int) -> None:
        there = {self.pid_of(*place)[0] for place in wanted if self.pid_of(*place)[1]}
        pairs = list(self.pairs(wanted))
        for pid, _ in pairs:
            if pid not in there:
                code = code or ErrorCode.UNKNOWN_PARTITION
        self.expect(command, code)
        if code is None and pairs:
            team = self.teams.setdefault(name, Team(self.floor))
            team.was_unused = False
            team.offsets.update({pid: (offset, max(at_ms, self.clock_ms)) for pid, offset in pairs})

    @rule(name=groups)
    def delete_group(self, name: str) -> None:
        team = self.teams.get(name)
        code = ErrorCode.UNKNOWN_GROUP if team is None else ErrorCode.GROUP_NOT_EMPTY if team.members else None
        self.expect(delete_group(name), code)
        if code is None:
            self.forget(name)

    @rule(name=groups, places=items, stale=staleness)
    def delete_offsets(self, name: str, places: Items, stale: int) -> None:
        team = self.teams.get(name)
        pids = tuple(sorted({self.pid_of(*place)[0] for place in places}))
        generation = Generation((team.generation if team else 0) + stale)
        code = ErrorCode.UNKNOWN_GROUP if team is None else ErrorCode.ILLEGAL_GENERATION if stale else None
        self.expect(delete_offsets(name, generation, *pids), code)
        if code is None and team is not None:
            team.offsets = {pid: found for pid, found in team.offsets.items() if pid not in pids}

    # -------------------------------------------------------------------------------------------- expiry
    @rule(minutes=st.sampled_from([0, 1, 2, 10]))
    def set_retention(self, minutes: int) -> None:
        self.expect(kept_minutes(minutes), None)
        self.retention_ms = minutes * 60_000

    @rule(
        step_ms=st.sampled_from([-5_000, 0, 1, 900, 59_999, 100_000, 10 * CLOCK_ELAPSED_MS_MAX]),
        elapsed_ms=st.sampled_from([0, 1, 900, 30_000, 100_000, 10 * CLOCK_ELAPSED_MS_MAX]),
        is_late=st.booleans(),
    )
    def expire(self, step_ms: int, elapsed_ms: int, is_late: bool) -> None:
        now_ms = max(self.clock_ms + step_ms, 1)
        self.expect(AdvanceClock(seen_ms=self.clock_ms - is_late, elapsed_ms=elapsed_ms, now_ms=now_ms), None)
        if not self.clock_ms:
            self.clock_ms = now_ms
            for team in self.teams.values():
                team.emptied_ms = now_ms if team.emptied_ms else 0
                team.offsets = {pid: (offset, now_ms) for pid, (offset, _) in team.offsets.items()}
        elif is_late:
            return
        else:
            elapsed_ms = min(elapsed_ms, CLOCK_ELAPSED_MS_MAX)
            self.clock_ms += min(max(now_ms - self.clock_ms, elapsed_ms // 2), 2 * elapsed_ms)
            self.expire_as_of(self.clock_ms + self.retention_ms)
        for name, team in list(self.teams.items()):
            if team.was_unused:
                self.forget(name)
            team.was_unused = not team.members and not team.offsets

    def expire_as_of(self, latest_ms: int) -> None:
        """`latest_ms`: later times are corrected to it."""
        old_ms = self.clock_ms - self.retention_ms
        for team in self.teams.values() if self.retention_ms else ():
            if team.members:
                continue
            if team.emptied_ms > latest_ms:
                team.emptied_ms = latest_ms
                team.offsets = {pid: (offset, min(at, latest_ms)) for pid, (offset, at) in team.offsets.items()}
            if team.emptied_ms <= old_ms:
                kept = {pid: found for pid, found in team.offsets.items() if found[1] > old_ms}
                team.offsets = {pid: (offset, min(at, latest_ms)) for pid, (offset, at) in kept.items()}

    # -------------------------------------------------------------------------------------------- always
    def check_groups(self, state: ClusterState) -> None:
        assert {name: _seen(state, name) for name in state.groups} == self.teams
        for name, team in self.teams.items():
            assert list(state.groups[name].members) == list(team.members), "the order of joining"
        assert (state.generation_floor, state.expiry_clock_ms) == (self.floor, self.clock_ms)
        assert offsets_retention_ms(state.config) == self.retention_ms


def _seen(state: ClusterState, name: str) -> Team:
    group = state.groups[name]
    return Team(
        generation=group.generation,
        phase=group.phase,
        leader=group.leader,
        emptied_ms=group.emptied_ms,
        was_unused=group.was_unused,
        members={n: m.assignment for n, m in group.members.items()},
        instances={n: m.member.instance_id for n, m in group.members.items()},
        offsets={pid: (c.offset, c.committed_ms) for pid, c in group.offsets.items()},
    )
