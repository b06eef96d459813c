"""A process is registered however long a commit takes: its applied state says so, and any later barrier confirms it."""

import random
from dataclasses import replace

import pytest

from smq.raft_state.commands import Barrier, Command, RegisterNode
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn
from smq.replication.nodes.registration import REGISTER_MS_MAX, Registration
from tests.unit.replication.support import Host


class Node:
    """A node that starts again. Each proposal is applied `commit_ms` after it was made; its reply goes to a caller that
    still waits for it, as the proposer does it."""

    def __init__(self, commit_ms: int) -> None:
        self.host = Host()
        self.commit_ms = commit_ms
        self.proposed: list[tuple[str, bool]] = []  # and whether this process was registered by then
        self.registrations = 0
        self.refusals: list[str] = []
        self.registration = Registration(
            replace(self.host.node_host(), propose=self._propose),
            random.Random(1),
            self._on_registration,
            self.refusals.append,
        )

    def start(self) -> None:
        self.registration.claim(self.host.identity.incarnation + 1, self.registration.join)

    def _on_registration(self) -> None:
        assert self.is_in_state
        self.registrations += 1

    def _propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        assert isinstance(command, RegisterNode | Barrier)
        self.proposed.append((type(command).__name__, self.is_in_state))
        is_over = False

        def finish(reply: Reply | SmqError) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                done(reply)

        late = SmqError(ErrorCode.TIMED_OUT, "late")
        self.host.clock.call_later(timeout_ms, lambda: finish(late))
        self.host.clock.call_later(self.commit_ms, lambda: finish(self.host.apply(command)))

    @property
    def is_in_state(self) -> bool:
        me = self.host.state.nodes[self.host.config.node_id]
        return (me.incarnation, me.disk) == (self.host.identity.incarnation, self.host.identity.disk)

    def run(self, ms: int) -> None:
        self.host.scheduler.run_for_ms(ms, stop=lambda: self.registration.is_registered)


@pytest.mark.parametrize("commit_ms", [20, REGISTER_MS_MAX + 100, 10 * REGISTER_MS_MAX, 60 * REGISTER_MS_MAX])
def test_a_process_is_registered_however_long_a_commit_takes(commit_ms: int) -> None:
    node = Node(commit_ms)
    node.start()
    node.run(2 * commit_ms + 2 * REGISTER_MS_MAX)
    assert node.registration.is_registered
    assert (node.registrations, node.refusals) == (1, [])


def test_rule_18_one_barrier_follows_and_only_once_the_registration_is_applied() -> None:
    node = Node(3 * REGISTER_MS_MAX)
    node.start()
    node.run(20 * REGISTER_MS_MAX)
    kinds = [kind for kind, _ in node.proposed]
    assert kinds == ["RegisterNode"] * (len(kinds) - 1) + ["Barrier"]
    assert node.proposed[-1] == ("Barrier", True)
