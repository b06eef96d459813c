"""The identity of a data directory: its disk id stays, its incarnation grows, another node's is refused."""

import random
import struct
from dataclasses import replace

import pytest

from smq.raft_state.commands import Barrier, Command, RegisterNode
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.identity import (
    BIRTH_KEY,
    DISK_KEY,
    INCARNATION_KEY,
    VOTERS_KEY,
    Claim,
    StartRefused,
    claim_identity,
    stored_birth,
)
from smq.replication.nodes.registration import REGISTER_MS_MAX, Registration
from smq.replication.ports import DataDamaged, Op, Table
from smq.testing.virtual.clock import Scheduler
from smq.testing.virtual.disk import DiskImage, FakeDisk
from tests.unit.replication.support import BIRTH, Host, born, process_clock, raise_it

CONFIG = NodeConfig(node_id=NodeId(1), cluster_id="c", peers={})
RNG = random.Random(1)


def claim(image: DiskImage, config: NodeConfig = CONFIG, at_least: int = 5) -> Claim:
    """As a process that starts on this disk, until it may send messages."""
    scheduler = Scheduler()
    disk = FakeDisk(process_clock(scheduler), RNG, image=image, on_fatal=raise_it)
    claimed: list[Claim] = []
    identity = claim_identity(disk, config, RNG, at_least, lambda: claimed.append(identity))
    assert scheduler.run_for_ms(1_000, stop=lambda: bool(claimed))
    return identity


@pytest.fixture
def image() -> DiskImage:
    return DiskImage()


def test_rule_18_a_directory_keeps_its_disk_id_at_every_start(image: DiskImage) -> None:
    first, second = claim(image), claim(image)
    assert len(first.disk) == 16
    assert second.disk == first.disk == image.tables[Table.META][DISK_KEY]


def test_rule_18_an_empty_directory_gets_another_disk_id() -> None:
    assert claim(DiskImage()).disk != claim(DiskImage()).disk


def test_rule_18_the_disk_id_is_written_together_with_the_first_incarnation() -> None:
    submissions: list[list[bytes]] = []

    class Recording(DiskImage):
        def apply(self, ops: "list[Op]") -> None:  # type: ignore[override]  # the fake disk gives lists
            submissions.append([op.key for op in ops if hasattr(op, "key")])
            super().apply(ops)

    claim(Recording())
    assert [DISK_KEY in keys and INCARNATION_KEY in keys for keys in submissions] == [True]


def test_the_incarnation_grows_even_if_the_clock_went_back(image: DiskImage) -> None:
    assert [claim(image, at_least=n).incarnation for n in (5, 3, 9)] == [5, 6, 9]


@pytest.mark.parametrize("stored", [None, b"short"])
def test_a_disk_id_that_is_gone_or_cut_is_damage_and_says_what_to_do(image: DiskImage, stored: bytes | None) -> None:
    claim(image)
    if stored is None:
        del image.tables[Table.META][DISK_KEY]
    else:
        image.tables[Table.META][DISK_KEY] = stored
    with pytest.raises(DataDamaged, match=r"disk_id.*replace this data directory"):
        claim(image)


@pytest.mark.parametrize("other", [{"node_id": NodeId(2)}, {"cluster_id": "d"}])
def test_a_directory_of_another_node_or_cluster_is_refused(image: DiskImage, other: dict[str, object]) -> None:
    claim(image)
    with pytest.raises(StartRefused, match="use the directory of this node, or an empty one"):
        claim(image, replace(CONFIG, **other))  # type: ignore[arg-type]  # one of its fields


PEERS = {NodeId(n): (f"node-{n}", 7400) for n in (1, 2, 3)}


def test_a_directory_of_a_cluster_of_other_nodes_is_refused(image: DiskImage) -> None:
    """Their majorities need not meet its own ones."""
    claim(born(image), replace(CONFIG, peers=PEERS))
    for peers in ({**PEERS, NodeId(4): ("node-4", 7400)}, {NodeId(1): PEERS[NodeId(1)]}):
        with pytest.raises(StartRefused, match=r"has the nodes 1, 2, 3, and \[peers\] names .*: correct \[peers\]"):
            claim(image, replace(CONFIG, peers=peers))
    moved = dict.fromkeys(PEERS, ("elsewhere", 7500))
    claim(image, replace(CONFIG, peers=moved))


def test_a_directory_that_belongs_to_no_cluster_yet_takes_the_nodes_of_its_next_start(image: DiskImage) -> None:
    """A mistake in [peers] can be corrected until the cluster has begun."""
    claim(image, replace(CONFIG, peers={NodeId(1): PEERS[NodeId(1)]}))
    claim(image, replace(CONFIG, peers=PEERS))
    assert image.tables[Table.META][VOTERS_KEY] == b"1, 2, 3"


def test_rule_18_the_birth_of_a_directory_is_read_as_it_was_written() -> None:
    disk = FakeDisk(process_clock(Scheduler()), RNG, image=born(DiskImage()), on_fatal=raise_it)
    assert stored_birth(disk) == BIRTH


@pytest.mark.parametrize("at", [0, 4, 20, -1])
def test_rule_18_a_damaged_birth_is_damage_and_no_other_cluster(image: DiskImage, at: int) -> None:
    row = bytearray(born(image).tables[Table.META][BIRTH_KEY])
    row[at] ^= 1
    image.tables[Table.META][BIRTH_KEY] = bytes(row)
    with pytest.raises(DataDamaged, match=r"meta/birth fails its checksum. Replace it with an empty one"):
        claim(image)


@pytest.mark.parametrize("vote", [struct.pack(">IBQQ", 0, 1, 1, 0), struct.pack(">IBQQ", 0, 1, 0, 1), b"cut"])
def test_rule_18_a_directory_that_has_voted_without_a_birth_never_counts_as_an_empty_one(
    image: DiskImage, vote: bytes
) -> None:
    """As builds before the first release left it. It holds data, and would let a new cluster begin."""
    image.tables[Table.RAFT_META][b"vote"] = struct.pack(">IBQQ", 0, 1, 0, 0)
    claim(image)
    image.tables[Table.RAFT_META][b"vote"] = vote
    with pytest.raises(DataDamaged, match=r"meta/birth is missing.*before the first release"):
        claim(image)


# -------------------------------------------------------------------------------------------------------- registration
# A process is registered however long a commit takes: its applied state says so, and any later barrier confirms it.
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
