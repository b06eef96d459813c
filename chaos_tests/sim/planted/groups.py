"""Planted bugs of groups: their coordinators, their members, and the fence around their changes.

Owns these rows only. `catalogue` alone imports it.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug

_HANDLERS = "smq.raft_state.handlers."
_SESSIONS = "smq.coordinator.groups.sessions:"
_GROUPS = "smq.coordinator.groups.coordinator:GroupCoordinator."
_CHANGES = "smq.coordinator.groups.changes:Changes."
_FENCE_BEGINS = "slot = coordinator_of(state, command.subject)\n"
_LATE_CHANGES_COUNT = Mutation(_HANDLERS + "fencing:check_fence", "if changes != command.changes_seen:", "if False:")

GROUP_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="commit-of-another-generation",
        rule="every commit of a member is fenced by its generation",
        mutations=(
            Mutation(
                _HANDLERS + "groups:check_committer",
                "check_generation(group, group.name, command.generation)",
                "pass",
            ),
        ),
        scenario="groups",
        anomalies=frozenset({"stale-generation"}),
        seeds=8,
    ),
    PlantedBug(
        name="new-coordinator-evicts-at-once",
        rule="a new coordinator gives each member one fresh session",
        mutations=(
            Mutation(
                _SESSIONS + "sessions_of",
                "before.get(name, now_ns + m.member.session_timeout_ms * NS_PER_MS)",
                "before.get(name, now_ns)",
            ),
        ),
        scenario="groups",
        anomalies=frozenset({"evicted-alive"}),
        seeds=5,
    ),
    PlantedBug(
        name="new-coordinator-forgets-the-members",
        rule="a coordinator takes its groups up from the replicated state",
        mutations=(
            Mutation(_GROUPS + "_find", "if group is None and known is not None and known.members:", "if False:"),
        ),
        scenario="groups",
        anomalies=frozenset({"evicted-alive", "phantom-member"}),
        seeds=5,
    ),
    PlantedBug(
        name="sessions-never-end",
        rule="silent members are evicted",
        mutations=(Mutation(_SESSIONS + "silent_members", "until_ns <= now_ns or name in late", "False"),),
        scenario="groups",
        anomalies=frozenset({"phantom-member"}),
        seeds=8,
    ),
    PlantedBug(
        name="former-coordinator-evicts",
        rule="changes of a group name the epoch of its coordinator; one that stood still gives all members time",
        mutations=(
            Mutation(
                _HANDLERS + "fencing:check_fence",
                "if slot.epoch != command.coordinator_epoch or not slot.node:",
                "if not slot.node:",
            ),
            _LATE_CHANGES_COUNT,
            Mutation(_GROUPS + "_tick", "if self._table != self._node.state.coordinators:", "if False:"),
            Mutation(_GROUPS + "_tick", "if self._was_away or late_ms > GROUP_PAUSE_MS:", "if False:"),
        ),
        scenario="groups",
        anomalies=frozenset({"evicted-alive", "split-generation", "shared-partition"}),
        seeds=20,
    ),
    PlantedBug(
        name="former-coordinator-commits",
        rule="a member's commit names the epoch of its coordinator: a late one does not overwrite a newer one",
        mutations=(
            Mutation(
                _HANDLERS + "fencing:check_fence",
                _FENCE_BEGINS,
                'if getattr(command, "member_id", ""): return\n    ' + _FENCE_BEGINS,
            ),
        ),
        scenario="late_commits",
        anomalies=frozenset({"stale-commit", "commit-regression"}),
        seeds=40,
    ),
    PlantedBug(
        name="memberless-commit-is-not-fenced",
        rule="a commit of no member is fenced as a member's is: one whose client has given up overwrites no newer one",
        mutations=(
            Mutation(
                _HANDLERS + "fencing:check_fence",
                _FENCE_BEGINS,
                'if not getattr(command, "member_id", "none"): return\n    ' + _FENCE_BEGINS,
            ),
        ),
        scenario="late_commits",
        anomalies=frozenset({"commit-regression"}),
        seeds=20,
    ),
    PlantedBug(
        name="deletion-of-a-group-is-not-fenced",
        rule="the deletion of a group is fenced: one whose client has given up removes no newer commit",
        mutations=(
            Mutation(
                _HANDLERS + "fencing:check_fence",
                _FENCE_BEGINS,
                'if type(command).__name__ == "DeleteGroup": return\n    ' + _FENCE_BEGINS,
            ),
        ),
        scenario="late_commits",
        anomalies=frozenset({"commit-regression"}),
        seeds=60,
    ),
    PlantedBug(
        name="commit-overtakes-another",
        rule="the changes of one group take effect in the order in which they came to its coordinator",
        mutations=(
            _LATE_CHANGES_COUNT,
            Mutation(_CHANGES + "submit", "if len(queue) == 1:", "if True:"),
            Mutation(_CHANGES + "_on_reply", "self._next(change.command.subject)", "pass"),
            # Which is harmless by itself: a Raft leader that refuses every third proposal that it receives.
            Mutation(
                "smq.replication.proposer:Proposer.on_propose",
                "self._engine.propose(message.command, reply_with)",
                "if message.request % 3: self._engine.propose(message.command, reply_with)\n"
                "    else: reply_with(ProposalLost.NOT_LEADER)",
            ),
        ),
        scenario="late_commits",
        anomalies=frozenset({"commit-regression"}),
        seeds=60,
    ),
    PlantedBug(
        name="proposer-sends-again-after-the-deadline",
        rule="nothing is proposed after its caller's deadline",
        mutations=(
            Mutation(
                "smq.replication.proposer:Proposer._attempt",
                "if self._clock.monotonic_ns() > pending.send_until_ns:",
                "if False:",
            ),
        ),
        scenario="groups",
        anomalies=frozenset({"late-proposal"}),
        seeds=8,
    ),
    PlantedBug(
        name="generations-start-over",
        rule="a group that is formed again counts on, so that no command for the former one fits it",
        mutations=(
            Mutation(
                _HANDLERS + "groups:make_group",
                "name=name, generation=state.generation_floor, changes=state.changes_floor",
                "name=name",
            ),
            Mutation(
                _HANDLERS + "fencing:changes_of",
                "found.changes if found is not None else state.changes_floor",
                "found.changes if found is not None else 0",
            ),
        ),
        scenario="groups",
        anomalies=frozenset({"split-generation"}),
        seeds=5,
    ),
)
