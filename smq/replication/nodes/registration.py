"""How a process takes its node's place in the cluster, and how a disk that has forgotten something becomes a new one.

Owns incarnation and disk id of this process, and whether the others have registered it (rules 2 and 18). It must never
let an incarnation or a disk id be registered that is not on disk. It does not judge whether a disk has forgotten: the
journal and `raft.voters` do. The node and its heartbeats import it.
"""

from collections.abc import Callable
from typing import Final

import structlog

from smq.raft_state.commands import Barrier, RegisterNode
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import DiskId
from smq.raft_state.replies import Reply
from smq.replication.host import Host
from smq.replication.net.disk_marks import Mark
from smq.replication.nodes.identity import claim_identity, replace_disk_id, replacement, replacement_over
from smq.replication.ports import Op, Rng
from smq.replication.raft.journal import RaftDamaged, forget_set_aside, set_aside

_log = structlog.get_logger("smq.node")

REGISTER_MS_MAX: Final = 2_000  # per attempt: whether one was applied, the state says
REGISTER_RETRY_MS: Final = 50
_CONFIRM_MS: Final = 24 * 3_600_000  # no attempts: the proposer repeats it at another leader, and any answer counts


class Registration:
    def __init__(
        self, host: Host, rng: Rng, on_registered: Callable[[], None], on_refused: Callable[[str], None]
    ) -> None:
        """`on_registered` is called when the registration has been applied here, `on_refused` if the cluster uses what
        this smq does not know."""
        self._host = host
        self._identity = host.identity
        self._disk = host.disk
        self._rng = rng
        self._on_registration = on_registered
        self._on_refused = on_refused
        self._is_stopped = False
        self.is_registered = False
        self._replaced = ""  # why this directory had to become another disk
        self._has_joined = False
        self._asked: DiskId | None = None  # a registration of this disk has been proposed, and not answered
        self._may_register = False  # disk id and incarnation are on disk, and no new one is being written

    # ---------------------------------------------------------------------------------------- identity
    def claim(self, at_least: int, done: Callable[[], None]) -> None:
        """Claims a new incarnation, durable before any node sees it. Raises DataDamaged, StartRefused."""

        def claimed() -> None:
            self._identity.incarnation = claim.incarnation
            if not self._identity.disk:  # otherwise it stays, or has been replaced meanwhile
                self._identity.disk = claim.disk
                self._may_register = True
            done()

        claim = claim_identity(self._disk, self._host.config, self._rng, at_least, claimed)

    def recover(self) -> None:
        """Loads what an earlier process knew. Raises DataDamaged."""
        self._replaced = replacement(self._disk)

    def replace_damaged(self, damage: RaftDamaged, done: Callable[[], None]) -> None:
        """The votes and acknowledgements of this disk are no longer known, so it is another disk now (rule 18): it
        neither votes nor leads before the others have let it in. Its records are judged as always."""

        def replaced() -> None:
            self._may_register = True
            done()

        self._replace(f"its Raft data was damaged: {damage}", set_aside(self._disk), replaced)

    def replace_old_copy(self, claim: Mark) -> None:
        """This directory was restored from an old copy, so it too is another disk. Its journal is kept: it holds an
        earlier state of the disk, which is a beginning. Only the promises since then are lost."""
        own = self._host.engine.marks.own
        why = (
            f"its data directory is an old copy, of write {min(own.base, own.writes)} of Raft's data, of a disk that "
            f"had reported write {claim.writes} (if a majority of nodes says so, all were restored from copies: stop "
            "them, restore the copies again, and run `smq disk forget` on each)"
        )
        self.forget_disk(why)

    def forget_disk(self, why: str) -> None:
        """This disk is another one from now on."""
        self.is_registered = False
        self._replace(why, [], self._claim_again)

    def _replace(self, why: str, ops: list[Op], done: Callable[[], None]) -> None:
        _log.error("rejoining as a replaced disk", node=self._host.node_id, why=why)
        self._replaced = why
        self._may_register = False
        self._identity.disk = replace_disk_id(self._disk, self._rng, why, ops, done)

    def _claim_again(self) -> None:
        """The disk may have had the incarnation of this process before."""

        def claimed() -> None:
            self._may_register = True
            self.register()

        if not self._is_stopped:
            self.claim(max(self._host.clock.wall_ns(), self._identity.incarnation + 1), claimed)

    def stop(self) -> None:
        self._is_stopped = True

    def warnings(self) -> list[str]:
        if not self._replaced:
            return []
        how = "has rejoined" if self.is_registered else "has no vote until the others let it in"
        return [f"{self._replaced}; it {how} as a replaced disk"]

    # ---------------------------------------------------------------------------------------- registration
    def join(self) -> None:
        """The node takes part from now on."""
        self._has_joined = True
        self.register()

    def register(self) -> None:
        """Also to be called when the state of a cluster comes to a node that had none."""
        if self._is_stopped or self.is_registered or not self._may_register:
            return
        config, disk = self._host.config, self._identity.disk
        if not self._has_joined or not self._host.state.cluster_id or self._asked == disk:
            return
        self._asked = disk
        command = RegisterNode(
            node=self._host.node_id,
            incarnation=self._identity.incarnation,
            disk=disk,
            grpc_address=config.grpc_address,
            http_address=config.http_address,
            kafka_address=config.kafka_address,
            rack=config.rack,
            feature_level=config.feature_level,
            listeners=config.listeners,
        )
        self._host.propose(command, REGISTER_MS_MAX, lambda reply: self._on_registered(disk, reply))

    def _on_registered(self, disk: DiskId, reply: Reply | SmqError) -> None:
        self._asked = None if self._asked == disk else self._asked
        if disk != self._identity.disk:
            return  # the code that made the new one registers it
        if not isinstance(reply, SmqError) or self._is_applied():
            self._on_registration()
            self._confirm(disk)
        elif reply.code is ErrorCode.UPGRADE_NEEDED:
            self._on_refused(f"{reply.message}: run a newer smq on this node")
        elif reply.code is ErrorCode.STALE_INCARNATION:
            registered = self._host.state.nodes[self._host.node_id].incarnation
            _log.warning("a newer process of this node had registered", registered=registered)
            self.claim(registered + 1, self.register)
        else:
            self._host.clock.call_later(REGISTER_RETRY_MS, self.register)

    def _is_applied(self) -> bool:
        """Whether a registration of this process and disk has been applied here, by whichever attempt."""
        me = self._host.state.nodes.get(self._host.node_id)
        return me is not None and (me.incarnation, me.disk) == (self._identity.incarnation, self._identity.disk)

    def _confirm(self, disk: DiskId) -> None:
        """One entry after the registration: a node that stores it also stores that the registration is committed.
        Otherwise a power loss of all nodes could leave a replaced disk that no node remembers as a voter (rule 18)."""
        if not self._is_stopped and disk == self._identity.disk:
            self._host.propose(Barrier(), _CONFIRM_MS, lambda reply: self._on_confirmed(disk, reply))

    def _on_confirmed(self, disk: DiskId, reply: Reply | SmqError) -> None:
        if disk != self._identity.disk:
            return
        if isinstance(reply, SmqError):
            self._host.clock.call_later(REGISTER_RETRY_MS, lambda: self._confirm(disk))
            return
        self.is_registered = True
        if self._replaced:
            _log.info("the others have let this disk in", node=self._host.node_id, after=self._replaced)
            self._disk.submit([*forget_set_aside(), *replacement_over()])
