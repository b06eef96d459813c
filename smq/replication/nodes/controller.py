"""The Raft leader's other work: watch, fence, elect, rebalance, raise the feature level.

Owns fencing, the time at which the feature level rises, and the choice of partition leaders (rules 11, 18, 20). It runs
on every node and does nothing on a node that does not lead Raft. It only proposes: apply checks everything again, so a
stale controller can do no harm. But its question seals a replica, so once it has asked, it sees the election through.
It must never touch a log or a high water mark.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from smq.raft_state.commands import Command, ElectLeader, FenceNode, RaiseFeatureLevel, Seal, UnfenceNode
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.elections import commit_floor, seals_needed
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, PartitionId
from smq.raft_state.limits import default_init
from smq.raft_state.replies import Reply
from smq.raft_state.state import NodeState, PartitionState
from smq.replication.host import Host
from smq.replication.net import wire
from smq.replication.net.wire import DiskCondition
from smq.replication.nodes.balancer import Balancer, is_heard
from smq.replication.nodes.liveness import Liveness
from smq.replication.partition.replicas import Replicas
from smq.replication.ports import Channel

REPORT_WAIT_NS: Final = 150_000_000  # for the reports of live but slow replicas
ROUND_NS_MAX: Final = 500_000_000  # after this time a round without a decision starts again
PROPOSAL_MS_MAX: Final = 2_000
SCAN_INTERVAL_NS: Final = 1_000_000_000  # between two scans of all partitions; events cause further ones
ELECTIONS_MAX: Final = 256  # proposed and not answered: thousands together would block the loop
DECISIONS_MAX: Final = 100  # per turn of the loop: some 5 ms if each ends in a proposal
QUERY_MAX: Final = 500  # partitions per query, and per turn of the loop: some 5 ms at either end
RESIGNED_NS: Final = 2_000_000_000  # how long other replicas are preferred to one that resigned


@dataclass(frozen=True, slots=True)
class _Report:
    incarnation: Incarnation
    end: Offset
    good: Offset


@dataclass(slots=True)
class _Round:
    """One collection of seals for one partition."""

    epoch: Epoch
    started_ns: int
    after_query: int  # the last one that may have named an older epoch: its answer judged the log by that
    reports: dict[NodeId, _Report] = field(default_factory=dict)
    proposed: bool = False


class Controller:
    def __init__(self, host: Host, liveness: Liveness, replicas: Replicas, log_warning: Callable[..., None]) -> None:
        self._host = host
        self._liveness = liveness
        self._replicas = replicas
        self._warn = log_warning
        self._led_since_ns: int | None = None  # by the clock of liveness
        self._rounds: dict[PartitionId, _Round] = {}  # bounded by the partitions
        self._to_decide: OrderedDict[PartitionId, None] = OrderedDict()  # something is new; first in, first out
        self._waits: deque[tuple[int, PartitionId]] = deque()  # when a round no longer waits for reports, in this order
        self._queries: deque[tuple[NodeId, list[PartitionId]]] = deque()  # of the rounds, not sent yet
        self._is_continuing = False  # a further turn for these two is scheduled
        self._resigned: dict[PartitionId, tuple[Epoch, NodeId, int]] = {}  # bounded by the partitions
        self._asked: dict[PartitionId, Epoch] = {}  # some replicas have sealed: only another epoch ends that; likewise
        self._under_way: set[tuple[str, NodeId]] = set()  # fencing proposals without an answer; two per node
        self._in_flight = 0  # elections proposed and not answered
        self._last_query = 0
        self._scan_ns = 0
        self._balancer = Balancer(host, liveness, replicas)
        self._is_check_scheduled = False
        self._reported_stuck: set[PartitionId] = set()

    # -------------------------------------------------------------------------------------- events
    def wake(self) -> None:
        """Something that elections depend on has changed: nodes, epochs, Raft's leader. Checks immediately."""
        self._scan_ns = 0
        if not self._is_check_scheduled and self._host.engine.is_leader:
            self._is_check_scheduled = True
            self._host.clock.call_soon(self._check)

    def rebalance_soon(self) -> None:
        """A node has been drained or undrained."""
        self._balancer.expedite()

    def _check(self) -> None:
        self._is_check_scheduled = False
        self.on_tick(self._host.clock.monotonic_ns())

    def on_leader_change(self) -> None:
        if not self._host.engine.is_leader:
            self._led_since_ns = None
            self._forget_rounds()
            self._under_way.clear()
        self.wake()

    def on_tick(self, now_ns: int) -> None:
        if not self._host.engine.is_leader:
            self._led_since_ns = None
            return
        if self._led_since_ns is None:
            self._led_since_ns = self._liveness.now_ns()
            self._balancer.start(now_ns)
            self._forget_rounds()
        if not self._host.state.cluster_id:
            self._init_cluster()
            return
        self._raise_level()
        self._watch(self._led_since_ns)
        if now_ns - self._scan_ns >= SCAN_INTERVAL_NS:
            self._scan_ns = now_ns
            self._scan(now_ns)
        while self._waits and self._waits[0][0] <= now_ns:
            self._to_decide[self._waits.popleft()[1]] = None
        self._decide_next(now_ns)
        self._balancer.on_tick(now_ns)

    def _forget_rounds(self) -> None:
        self._rounds.clear()
        self._to_decide.clear()
        self._waits.clear()
        self._queries.clear()
        self._asked.clear()

    def _continue_soon(self) -> None:
        if not self._is_continuing:
            self._is_continuing = True
            self._host.clock.call_soon(self._continue)

    def _continue(self) -> None:
        """The work that was too much for one turn of the loop."""
        self._is_continuing = False
        if self._host.engine.is_leader:
            now_ns = self._host.clock.monotonic_ns()
            self._send_queries(now_ns)
            self._decide_next(now_ns)

    def _init_cluster(self) -> None:
        config = self._host.config
        init = replace(default_init(config.cluster_id, self._host.identity.birth), replies_max=config.replies_max)
        self._propose_once("init", self._host.node_id, init)

    def _raise_level(self) -> None:
        """To what every node of the cluster knows, those included that are down or have never registered."""
        state, config = self._host.state, self._host.config
        if all(peer in state.nodes for peer in config.peers):
            level = min([config.feature_level, *(node.feature_level for node in state.nodes.values())])
            if level > state.feature_level:
                self._propose_once("level", self._host.node_id, RaiseFeatureLevel(level=level))

    def _propose_once(self, kind: str, node: NodeId, command: Command) -> bool:
        """At most one proposal per kind and node at a time: False if one is under way. Whatever its result, the next
        tick checks again."""
        key = (kind, node)
        if key in self._under_way:
            return False
        self._under_way.add(key)
        self._host.propose(command, PROPOSAL_MS_MAX, lambda _reply: self._under_way.discard(key))
        return True

    # -------------------------------------------------------------------------------------- liveness
    def _watch(self, led_since_ns: int) -> None:
        for node in self._host.state.nodes.values():
            is_dead = node.node != self._host.node_id and self._liveness.is_dead(node, since_ns=led_since_ns)
            if is_dead and not node.fenced:
                if self._propose_once("fence", node.node, FenceNode(node=node.node, incarnation=node.incarnation)):
                    self._warn("node fenced", node=node.node, incarnation=node.incarnation)
            elif node.fenced and not is_dead and not self._is_leaving(node) and self._is_heard(node):
                self._propose_once("unfence", node.node, UnfenceNode(node=node.node, incarnation=node.incarnation))

    def _is_leaving(self, node: NodeState) -> bool:
        return self._liveness.is_leaving(node.node, node.incarnation)

    def _is_heard(self, node: NodeState) -> bool:
        return is_heard(self._host, self._liveness, node)

    def _is_live(self, node: NodeId, incarnation: Incarnation | None = None) -> bool:
        state = self._host.state.nodes.get(node)
        return state is not None and not state.fenced and incarnation in (None, state.incarnation)

    # -------------------------------------------------------------------------------------- elections
    def resign(self, pid: PartitionId, epoch: Epoch) -> None:
        """Reports to the Raft leader, which may be this node, that this node stops leading the epoch."""
        message = wire.Resign(((pid, epoch),))
        leader = self._host.engine.leader
        if self._host.engine.is_leader:
            self.on_resign(self._host.node_id, message, self._host.clock.monotonic_ns())
        elif leader is not None:
            self._host.links.send(leader, Channel.CONTROL, message)

    def on_resign(self, peer: NodeId, message: wire.Resign, now_ns: int) -> None:
        for pid, epoch in message.partitions:
            part = self._host.state.partition(pid)
            if part is not None and part.epoch == epoch and part.leader == peer:
                self._resigned[pid] = (epoch, peer, now_ns)
        self.wake()

    def _leaderless(self) -> list[PartitionState]:
        """Partitions whose leader is down, is another process, or has resigned, and those whose replicas have been
        asked to seal. Cheap: there may be 100,000."""
        state = self._host.state
        live = {(n.node, n.incarnation) for n in state.nodes.values() if not n.fenced}
        found: list[PartitionState] = []
        for topic in state.topics.values():
            if not topic.partitions[0].is_external:
                found += [p for p in topic.partitions if (p.leader, p.leader_incarnation) not in live]
        epochs = {**self._asked, **{pid: epoch for pid, (epoch, _, _) in self._resigned.items()}}
        for pid, epoch in epochs.items():
            part = state.partition(pid)
            if part is not None and part.epoch == epoch and (part.leader, part.leader_incarnation) in live:
                found.append(part)
        return found

    def _scan(self, now_ns: int) -> None:
        to_query: dict[NodeId, list[PartitionId]] = {}
        seen: set[PartitionId] = set()
        for part in self._leaderless():
            pid = part.pid
            seen.add(pid)
            current = self._rounds.get(pid)
            if current is not None and current.epoch == part.epoch and now_ns - current.started_ns < ROUND_NS_MAX:
                self._to_decide[pid] = None  # what woke this scan may be what the round lacked
                continue
            # The queries of the last round named this epoch, too: their answers count however late they are. Otherwise
            # no election would end while a seal takes longer than a round. The reports that have come are not taken
            # over: a seal lasts, but a replica may have lost what made it a candidate (a majority, a sound batch).
            is_same_epoch = current is not None and current.epoch == part.epoch
            after = current.after_query if current is not None and is_same_epoch else self._last_query
            self._rounds[pid] = _Round(part.epoch, now_ns, after)
            self._waits.append((now_ns + REPORT_WAIT_NS, pid))
            for node in part.replicas:
                to_query.setdefault(node, []).append(pid)
        self._rounds = {pid: r for pid, r in self._rounds.items() if pid in seen}
        self._resigned = {pid: r for pid, r in self._resigned.items() if pid in seen}
        self._asked = {pid: epoch for pid, epoch in self._asked.items() if pid in seen}
        self._reported_stuck &= seen
        for start in range(0, max(map(len, to_query.values()), default=0), QUERY_MAX):
            self._queries.extend((node, to_query[node][start : start + QUERY_MAX]) for node in sorted(to_query))
        self._send_queries(now_ns)
        if seen:
            self._scan_ns = now_ns - SCAN_INTERVAL_NS + ROUND_NS_MAX  # scan again soon while anything is open

    def _send_queries(self, now_ns: int) -> None:
        """Sends the next queries, for the partitions that still have a round. Each names the epoch of that same round,
        because its answer must judge the log by that epoch."""
        left = QUERY_MAX
        while self._queries and left > 0:
            node, pids = self._queries.popleft()
            rounds = [(pid, self._rounds.get(pid)) for pid in pids]
            requested = tuple((pid, r.epoch) for pid, r in rounds if r is not None and not r.proposed)
            left -= len(requested)
            if requested:
                self._send_query(node, requested, now_ns)
        if self._queries:
            self._continue_soon()

    def _send_query(self, node: NodeId, partitions: tuple[tuple[PartitionId, Epoch], ...], now_ns: int) -> None:
        self._last_query += 1
        self._asked.update(partitions)
        if node == self._host.node_id:
            logs = self._replicas.seal(partitions)
            self.on_report(node, wire.ElectionReport(self._last_query, self._host.incarnation, logs), now_ns)
        else:
            query = wire.ElectionQuery(self._last_query, self._host.engine.term, partitions)
            self._host.links.send(node, Channel.CONTROL, query)

    def on_report(self, peer: NodeId, report: wire.ElectionReport, now_ns: int) -> None:
        for pid, end, good in report.logs:
            current = self._rounds.get(pid)
            if current is not None and not current.proposed and report.query > current.after_query:
                current.reports[peer] = _Report(report.incarnation, end, good)
                self._to_decide[pid] = None
        self._decide_next(now_ns)

    def _decide_next(self, now_ns: int) -> None:
        """Decides none while ELECTIONS_MAX are in flight: their replies continue with the rest."""
        for _ in range(min(DECISIONS_MAX, len(self._to_decide))):
            if self._in_flight >= ELECTIONS_MAX:
                return
            pid, _ = self._to_decide.popitem(last=False)
            current = self._rounds.get(pid)
            if current is not None and not current.proposed:
                self._decide(pid, current, now_ns)
        if self._to_decide:
            self._continue_soon()

    def _decide(self, pid: PartitionId, current: _Round, now_ns: int) -> None:
        """Proposes the best of the reported logs, once all live replicas have reported or the wait is over."""
        part = self._host.state.partition(pid)
        if part is None or part.epoch != current.epoch:
            del self._rounds[pid]
            return
        awaited = [n for n in part.replicas if self._is_live(n) and n not in current.reports]
        waited_ns = now_ns - current.started_ns
        if awaited and waited_ns < REPORT_WAIT_NS:
            return
        seals = self._seals(part, current)
        floor = self._floor(part, seals)
        live = {n: r for n, r in current.reports.items() if n in part.replicas and self._is_live(n, r.incarnation)}
        eligible = [n for n in part.replicas if n in live and floor is not None and live[n].good >= floor]
        if not eligible:
            self._report_stuck(part, current, floor, waited_ns)
            return
        # A longer log keeps more of what no majority has. Otherwise the order of the replicas spreads the leaders.
        current.proposed = True
        best = min(eligible, key=lambda n: (self._reluctance(pid, n, now_ns), -live[n].good))
        self._elect(pid, current, best, seals)

    def _seals(self, part: PartitionState, current: _Round) -> tuple[Seal, ...]:
        """Those that count at apply. A disk that may be an old copy proves nothing (rule 18)."""
        nodes, marks = self._host.state.nodes, self._host.engine.marks
        return tuple(
            Seal(node=n, incarnation=report.incarnation, end=report.end)
            for n, report in sorted(current.reports.items())
            if n in part.replicas and n not in part.incomplete
            if nodes[n].incarnation == report.incarnation and not marks.doubts(n, nodes[n].disk)
        )

    @staticmethod
    def _floor(part: PartitionState, seals: tuple[Seal, ...]) -> Offset | None:
        """What a candidate's log must reach (rule 11); None if there are too few seals to tell."""
        if len(seals) < seals_needed(len(part.replicas)):
            return None
        return max(part.hwm, commit_floor([seal.end for seal in seals], len(part.replicas)))

    def _reluctance(self, pid: PartitionId, node: NodeId, now_ns: int) -> tuple[bool, bool, DiskCondition]:
        """A node that is leaving, has just resigned or is drained, or whose disk is not fine, leads only if no other
        replica can."""
        state, resigned = self._host.state.nodes[node], self._resigned.get(pid)
        has_resigned = resigned is not None and resigned[1] == node and now_ns - resigned[2] < RESIGNED_NS
        return self._is_leaving(state) or has_resigned, state.drained, self._liveness.disk(node)

    def _report_stuck(self, part: PartitionState, current: _Round, floor: Offset | None, waited_ns: int) -> None:
        """Rule 20: the partition is unavailable, and the log says why. There is never an unsafe election."""
        if waited_ns < REPORT_WAIT_NS or part.pid in self._reported_stuck:
            return
        self._reported_stuck.add(part.pid)
        if floor is None:
            why = "too few replicas with complete logs can be asked what may be committed"
        else:
            why = "no replica of the partition reaches what may be committed and a majority of the others"
        self._warn(
            why,
            topic=self._host.state.topic_names[part.topic_id],
            partition=part.index,
            needed=int(part.hwm if floor is None else floor),
            reported_ends={int(n): int(report.end) for n, report in current.reports.items()},
            incomplete=sorted(part.incomplete),
        )

    def _elect(self, pid: PartitionId, current: _Round, candidate: NodeId, seals: tuple[Seal, ...]) -> None:
        report = current.reports[candidate]
        command = ElectLeader(
            partition=pid,
            expected_epoch=current.epoch,
            candidate=candidate,
            incarnation=report.incarnation,
            end=report.good,
            seals=seals,
        )
        self._in_flight += 1
        self._host.propose(command, PROPOSAL_MS_MAX, lambda reply: self._on_elected(pid, current, reply))

    def _on_elected(self, pid: PartitionId, current: _Round, reply: Reply | SmqError) -> None:
        self._in_flight -= 1
        if self._in_flight == ELECTIONS_MAX // 2:
            self._continue_soon()
        if self._rounds.get(pid) is current:
            del self._rounds[pid]
        if isinstance(reply, SmqError):
            self._scan_soon()

    def _scan_soon(self) -> None:
        """A little later: immediately, a rejected proposal would be rejected again."""
        self._scan_ns = self._host.clock.monotonic_ns() - SCAN_INTERVAL_NS + REPORT_WAIT_NS
