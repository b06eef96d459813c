"""The birth of a cluster: once, of empty disks, while all of its nodes are there (rule 18).

Owns this directory's birth (a random id, and the disk of each node at that time), what the peers say of theirs, and
from which peers this node takes anything. It must never make a birth while a node is missing or has one, nor take
another one than its own. The argument is in docs/decisions/a-cluster-is-born-once.md. The node imports it, and so do
its heartbeats and the dispatcher.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from smq.raft_state.ids import NO_BIRTH, NO_DISK, BirthId, DiskId, NodeId
from smq.raft_state.limits import BIRTH_ID_BYTES
from smq.replication.host import Host
from smq.replication.monitoring.anomalies import Kind
from smq.replication.net import wire
from smq.replication.nodes.identity import birth_row, stored_birth
from smq.replication.ports import Channel, Rng

_log = structlog.get_logger("smq.node")


class BirthDiffers(Exception):
    """The replicated state is of another birth than the directory: neither can be trusted."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a peer has said of itself in the present session."""

    birth: BirthId
    disk: DiskId
    may_found: bool


class Births:
    def __init__(
        self,
        host: Host,
        rng: Rng,
        *,
        is_at_address: Callable[[NodeId], bool],
        on_born: Callable[[], None],
        on_forgotten: Callable[[str], None],
    ) -> None:
        """`is_at_address`: the peer's session is of the process that answers at the peer's address. `on_born` is called
        when the directory has got its birth, which is on disk then. `on_forgotten`, with the reason, when its disk had
        a vote before, and must become another one."""
        self._host = host
        self._rng = rng
        self._is_at_address = is_at_address
        self._on_born = on_born
        self._on_forgotten = on_forgotten
        self._peers = tuple(sorted(n for n in host.config.peers if n != host.node_id))
        self._own: wire.Birth | None = None
        self._pending: wire.Birth | None = None  # is being written
        self._claims: dict[NodeId, Claim] = {}
        self._others: dict[NodeId, BirthId] = {}  # peers of another birth, until they say something else
        self._refusal = ""  # of a birth that this node was offered
        self.may_found = False  # an operator has asked this process for a first start
        self.shut = frozenset(self._peers)  # nothing but heartbeats and births is taken from these

    def recover(self) -> None:
        """Reads the directory's birth if it has one. Raises DataDamaged."""
        self._own = stored_birth(self._host.disk)
        self.may_found = self.may_found and self._own is None
        self._note_own()

    def begin(self) -> None:
        """The node takes part from now on."""
        if self._own is None:
            self._try_to_found()

    def allow_first_start(self) -> None:
        """An operator says that there is to be a new cluster. One node that knows it is enough."""
        if not self.may_found and self._own is None:
            self.may_found = True
            self._try_to_found()

    @property
    def claim(self) -> BirthId:
        """For this node's heartbeats. Not on disk yet, perhaps: from now on the disk counts as used."""
        known = self._own or self._pending
        return known.birth if known is not None else NO_BIRTH

    def disk_of(self, node: NodeId) -> DiskId | None:
        """The disk that the node had at the birth, and that has its vote until another one is registered."""
        return dict(self._own.disks).get(node) if self._own is not None else None

    def check(self) -> None:
        """BirthDiffers unless the replicated state is of the directory's birth."""
        birth = self._host.state.birth
        if self._own is not None and birth not in (NO_BIRTH, self._own.birth):
            raise BirthDiffers(
                f"the replicated state is of birth {birth.hex()}, and the data directory of {self._own.birth.hex()}: "
                "this directory was put together from two clusters. Move it away, and start the node with an empty one"
            )

    # ------------------------------------------------------------------------------------------------- peers
    def session_over(self, peer: NodeId) -> None:
        self._claims.pop(peer, None)

    def hear(self, peer: NodeId, birth: BirthId, disk: DiskId, *, may_found: bool) -> bool:
        """What a peer's heartbeat says of it. False if the peer is of another cluster."""
        before = self._claims.get(peer)
        self._claims[peer] = Claim(birth, disk, may_found)
        if self._own is None:
            self._try_to_found()
            return True
        if birth not in (NO_BIRTH, self._own.birth):
            self._note_other(peer, birth)
            return False
        if self._others.pop(peer, None) is not None:
            self._close()
        if birth == NO_BIRTH:
            self._offer(peer, disk)
        if (before is None or before.disk != disk) and not self._has_vote(peer, disk):
            _log.warning(
                "a node has come back on a disk that has no vote yet", peer=peer, votes_left=self._votes_left()
            )
        return True

    def _offer(self, peer: NodeId, disk: DiskId) -> None:
        if self._own is not None:
            known = self._host.state.nodes.get(peer)
            forgotten = disk if known is not None and known.disk == disk else NO_DISK
            self._host.links.send(peer, Channel.CONTROL, replace(self._own, forgotten=forgotten))

    def on_birth(self, peer: NodeId, birth: wire.Birth) -> None:
        """A node of a cluster offers its birth, because this one has none."""
        if self._own is not None or self._pending is not None:
            return
        disks, host = dict(birth.disks), self._host
        if birth.forgotten == host.identity.disk:
            self._on_forgotten("its data directory is a copy from before the first start of its cluster")
        elif set(disks) != set(host.config.peers):
            self._refuse(f"node {peer} is of a cluster of the nodes {_listed(disks)}, and [peers] names others")
        elif disks[host.node_id] != host.identity.disk or self._is_at_address(peer):
            # Otherwise this disk is to get a vote, by a process that may be a second one of that node. The peer's
            # address has not answered yet; the offer comes again with the next heartbeat.
            self._take(birth)

    # ------------------------------------------------------------------------------------------------ the birth
    @property
    def _founder(self) -> NodeId:
        """The only node that makes a birth, so that there are never two. It dials all others: what it knows of them
        comes from the processes at their addresses."""
        return min(self._host.config.peers)

    def _try_to_found(self) -> None:
        if self._pending is None and self._may_be_born():
            disks = {peer: claim.disk for peer, claim in self._claims.items()}
            disks[self._host.node_id] = self._host.identity.disk
            birth = BirthId(self._rng.randbytes(BIRTH_ID_BYTES))
            self._take(wire.Birth(birth, tuple(sorted(disks.items()))))

    def _may_be_born(self) -> bool:
        """Every node is there, with an empty disk, and one has been asked for a first start."""
        is_wanted = self.may_found or any(claim.may_found for claim in self._claims.values())
        is_founder = self._host.node_id == self._founder and bool(self._host.identity.disk)
        return is_founder and is_wanted and self._are_all_empty()

    def _are_all_empty(self) -> bool:
        return all(peer in self._claims and self._claims[peer].birth == NO_BIRTH for peer in self._peers)

    def _take(self, birth: wire.Birth) -> None:
        def taken() -> None:
            self._own, self._pending = birth, None
            self._note_own()
            self._say_born(birth)
            for peer, claim in sorted(self._claims.items()):
                if claim.birth == NO_BIRTH:
                    self._offer(peer, claim.disk)
                elif claim.birth != birth.birth:
                    self._note_other(peer, claim.birth)
            self._on_born()

        self._pending = birth
        self._host.disk.submit([birth_row(birth)], taken)

    def _say_born(self, birth: wire.Birth) -> None:
        me, known = self._host.node_id, {"node": self._host.node_id, "birth": birth.birth.hex()}
        if dict(birth.disks)[me] == self._host.identity.disk:
            _log.info("the cluster is born", **known)
        elif self.may_found:
            _log.warning("first start refused: a node has the data of a cluster, which this one joins", **known)
        else:
            _log.info("joining a cluster with an empty disk", **known)

    def _note_own(self) -> None:
        if self._own is not None:
            self._host.identity.birth = self._own.birth
            self._close()

    def _close(self) -> None:
        self.shut = frozenset(self._others)

    def _refuse(self, why: str) -> None:
        if why != self._refusal:
            self._refusal = why
            _log.error("refused the birth of a cluster", node=self._host.node_id, why=why)

    def _note_other(self, peer: NodeId, birth: BirthId) -> None:
        if self._others.get(peer) != birth:
            self._others[peer] = birth
            self._close()
            _log.error("a node is of another cluster", peer=peer, birth=birth.hex(), own=self.claim.hex())
            self._host.anomalies.note(Kind.OTHER_BIRTH, self._other(peer, birth))

    # ------------------------------------------------------------------------------------------- for the operator
    def unborn(self) -> str:
        """Why the directory belongs to no cluster yet; empty if it does."""
        if self._own is not None:
            return ""
        missing = [peer for peer in self._peers if peer not in self._claims]
        if self._refusal:
            return self._refusal
        if missing:
            there = f"nodes {_listed(missing)} are not connected, and a cluster begins with all of its nodes"
            return f"the data directory is empty: {there}"
        if self._pending is None and not (self.may_found or any(c.may_found for c in self._claims.values())):
            return (
                "the data directory is empty, as on all other nodes: for a new cluster, run `smq first-start` on one "
                "of them. If there was a cluster, start the nodes that have its data"
            )
        return "the cluster is about to begin"

    def warnings(self) -> list[str]:
        if self._own is None:
            return [self.unborn()]
        found = [self._other(peer, birth) for peer, birth in sorted(self._others.items())]
        nodes, left = len(self._host.config.peers), self._votes_left()
        if left < nodes // 2 + 1:
            found.append(
                f"{nodes - left} of {nodes} nodes run on disks that have no vote, and no majority is left to let them "
                "in: start them on the directories that they had (docs/operations.md, too few disks)"
            )
        elif not self._has_vote(self._host.node_id, self._host.identity.disk):
            found.append("its disk is new to the cluster: it has no vote until the others let it in")
        return found

    def _other(self, peer: NodeId, birth: BirthId) -> str:
        return (
            f"node {peer} is of another cluster with the same name (birth {birth.hex()}, and this node's is "
            f"{self.claim.hex()}): nothing is taken from it. One of the two has the wrong data directory"
        )

    def _has_vote(self, node: NodeId, disk: DiskId) -> bool:
        registered = self._host.state.nodes.get(node)
        return disk == (registered.disk if registered is not None else self.disk_of(node))

    def _votes_left(self) -> int:
        """Of all nodes, those that are away included."""
        here = {peer: claim.disk for peer, claim in self._claims.items() if peer not in self._others}
        here[self._host.node_id] = self._host.identity.disk
        if len(self._peers) <= 1:
            return len(self._host.config.peers)  # with two voters the rule is off
        return len(self._host.config.peers) - sum(not self._has_vote(node, disk) for node, disk in here.items())


def _listed(nodes: object) -> str:
    return ", ".join(map(str, sorted(nodes)))  # type: ignore[call-overload]  # of node ids
