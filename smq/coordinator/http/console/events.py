"""What has happened to the cluster since this process started: the line of events that an operator reads first.

Owns the comparison of two moments of the replicated state, and a bounded memory of the differences. It looks once per
second, so what began and ended within one is not seen. Anomalies that the node has noted are taken over as they are. It
changes nothing. `console.site` and the composition root import it.
"""

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.view import PHASES
from smq.coordinator.service.turns import Turns
from smq.raft_state.ids import Epoch, Generation, NodeId, PartitionId
from smq.replication.api import NodeApi

LOOK_S: Final = 1.0
EVENTS_MAX: Final = 1_000  # 200 bytes each; days of a healthy cluster
PER_LOOK_MAX: Final = 20  # of one kind: beyond it they are counted, since a dead node moves thousands of leaderships


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float  # Unix time, as this node saw it
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Moment:
    raft_leader: NodeId | None
    nodes: dict[NodeId, tuple[int, bool, bool]]  # incarnation, fenced, drained
    epochs: dict[PartitionId, Epoch]  # of their leadership
    groups: dict[str, tuple[Generation, str, int]]  # generation, phase, members
    topics: frozenset[str]
    settings: dict[str, str]
    warnings: frozenset[str]


class EventLog:
    def __init__(self, node: NodeApi) -> None:
        self._node = node
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._before: _Moment | None = None
        self._anomalies = 0  # the number of the last one that is in the line
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.add("node", f"node {self._node.node_id}: this process has started")
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Notes what differs from the last look. The first one only remembers."""
        now, before = await self._moment(), self._before
        self._before = now
        self._take_anomalies()
        if before is None:
            return
        self._compare_nodes(before, now)
        self._compare_partitions(before, now)
        self._compare_groups(before, now)
        for kind, old, new in (("topic", before.topics, now.topics), ("warning", before.warnings, now.warnings)):
            made, gone = ("created", "deleted") if kind == "topic" else ("begins", "is over")
            self._add_all(kind, [f"{name}: {made}" for name in sorted(new - old)])
            self._add_all(kind, [f"{name}: {gone}" for name in sorted(old - new)])
        keys = sorted({*before.settings, *now.settings})
        changed = [key for key in keys if before.settings.get(key) != now.settings.get(key)]
        self._add_all("setting", [f"{key}: now {now.settings.get(key, 'the default')}" for key in changed])

    async def _moment(self) -> _Moment:
        state, status, turns = self._node.state, self._node.status(), Turns()
        epochs = {
            part.pid: part.epoch
            for topic in list(state.topics.values())
            async for part in turns.over(topic.partitions)
            if not part.is_external
        }
        groups = {
            name: (group.generation, PHASES[group.phase], len(group.members))
            async for name, group in turns.over(list(state.groups.items()))
        }
        return _Moment(
            raft_leader=status.raft_leader,
            nodes={n: (s.incarnation, s.fenced, s.drained) for n, s in state.nodes.items()},
            epochs=epochs,
            groups=groups,
            topics=frozenset(state.topics),
            settings=dict(state.config),
            warnings=frozenset(status.warnings),
        )

    def _take_anomalies(self) -> None:
        new = [seen for seen in self._node.anomalies() if seen.number > self._anomalies]
        if new:
            self._anomalies = new[-1].number
        self._add_all("anomaly", [f"{seen.kind}: {seen.text}" for seen in new])

    def _compare_nodes(self, before: _Moment, now: _Moment) -> None:
        if before.raft_leader != now.raft_leader:
            known = f"node {now.raft_leader} leads" if now.raft_leader else "no leader is known: no quorum"
            self.add("raft", known)
        for node, (incarnation, fenced, drained) in now.nodes.items():
            old = before.nodes.get(node)
            if old is None:
                self.add("node", f"node {node}: registered")
                continue
            if old[0] != incarnation:
                self.add("node", f"node {node}: restarted")
            if old[1] != fenced:
                self.add("node", f"node {node}: {'fenced, it is silent' if fenced else 'no longer fenced'}")
            if old[2] != drained:
                self.add("node", f"node {node}: {'drained' if drained else 'no longer drained'}")

    def _compare_partitions(self, before: _Moment, now: _Moment) -> None:
        """Names are looked up for what has moved only: there may be thousands of partitions."""
        moved, state = [], self._node.state
        for pid, epoch in now.epochs.items():
            part = state.partition(pid) if before.epochs.get(pid, epoch) != epoch else None
            if part is not None:
                name = f"{state.topic_names[part.topic_id]}/{part.index}"
                moved.append(f"{name}: node {part.leader} leads, epoch {part.epoch}")
        self._add_all("leader", moved)

    def _compare_groups(self, before: _Moment, now: _Moment) -> None:
        moved = [
            f"{name}: generation {generation}, {phase}, {members} members"
            for name, (generation, phase, members) in now.groups.items()
            if ((old := before.groups.get(name)) is None or old[0] != generation)
        ]
        self._add_all("group", moved)
        self._add_all("group", [f"{name}: deleted" for name in before.groups if name not in now.groups])

    def _add_all(self, kind: str, texts: list[str]) -> None:
        for text in texts[:PER_LOOK_MAX]:
            self.add(kind, text)
        if len(texts) > PER_LOOK_MAX:
            self.add(kind, f"and {len(texts) - PER_LOOK_MAX} more of this kind at the same moment")

    def add(self, kind: str, text: str) -> None:
        self.events.append(Event(time.time(), kind, text))
