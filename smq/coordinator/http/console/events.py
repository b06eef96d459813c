"""What has happened to the cluster, as this node saw it: the line of events that an operator reads first.

Owns the comparison of two moments of the replicated state, and a bounded memory of the differences, in a file of the
data directory, so that a node which was killed still shows them. It looks once per second, so what began and ended
within one is not seen. Anomalies that the node has noted are taken over as they are. It changes nothing.
`console.site` and the composition root import it.
"""

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from smq.coordinator.service.group_lag import state_of
from smq.coordinator.service.turns import Turns
from smq.raft_state.ids import Epoch, Generation, NodeId, PartitionId
from smq.raft_state.state import GroupState
from smq.replication.api import NodeApi

LOOK_S: Final = 1.0
PER_LOOK_MAX: Final = 20  # of one kind: beyond it they are counted, since a dead node moves thousands of leaderships
NAMES_MAX: Final = 5  # of members in one event
FILE: Final = "events.log"
EVENTS_MAX: Final = 1_000  # 200 bytes each; days of a healthy cluster
_FILE_BYTES_MAX: Final = 16 << 20  # far more than it ever has: a larger one is not ours
_TEXT_CHARS_MAX: Final = 2_000

_log = logging.getLogger("smq.events")


class Event(NamedTuple):
    at_s: float  # Unix time, as this node saw it
    kind: str
    text: str


class EventFile:
    """One line of JSON for each event, after the CRC of that line. It is bounded: twice the events that are kept, and
    then it is written again. It is an aid to the reader and no part of the data: a line that is damaged is left out, a
    file that cannot be written costs the node nothing, and nothing is synced. Its methods block: call them off the
    loop."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._lines = 0
        self._has_failed = False

    def load(self) -> tuple[list[Event], int]:
        """The last events, and how many lines are damaged."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    lines = file.read(_FILE_BYTES_MAX).splitlines()
            except FileNotFoundError:
                return [], 0
            except OSError as e:
                self._failed(e)
                return [], 0
            read = [_parsed(line) for line in lines]
            events = [event for event in read if event is not None][-EVENTS_MAX:]
            damaged = sum(event is None for event in read)
            self._lines = len(lines)
            if damaged:
                self._rewrite(events)  # whatever follows a torn line would be part of it
            return events, damaged

    def add(self, new: Sequence[Event], kept: Iterable[Event]) -> None:
        """Appends `new`, or writes what is `kept`, which includes it, once the file has grown too long."""
        with self._lock:
            try:
                if self._lines + len(new) > 2 * EVENTS_MAX:
                    self._rewrite(kept)
                    return
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "ab") as file:
                    file.write(b"".join(map(_line, new)))
                self._lines += len(new)
            except OSError as e:
                self._failed(e)

    def _rewrite(self, events: Iterable[Event]) -> None:
        lines = list(map(_line, events))
        other = self._path.with_suffix(".new")
        try:
            descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(b"".join(lines))
            other.replace(self._path)
            self._lines = len(lines)
        except OSError as e:
            self._failed(e)

    def _failed(self, error: OSError) -> None:
        """Once per process: a full disk would otherwise fill the log, too."""
        if not self._has_failed:
            self._has_failed = True
            _log.warning("events are not kept in %s: %s", self._path, error.strerror or error)


def _line(event: Event) -> bytes:
    written = json.dumps([event.at_s, event.kind, event.text[:_TEXT_CHARS_MAX]]).encode()
    return b"%08x %s\n" % (zlib.crc32(written), written)


def _parsed(line: bytes) -> Event | None:
    crc, _, written = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(written):
        return None
    try:
        at_s, kind, text = json.loads(written)
        return Event(float(at_s), str(kind), str(text))
    except (ValueError, TypeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class _Moment:
    raft_leader: NodeId | None
    nodes: dict[NodeId, tuple[int, bool, bool]]  # incarnation, fenced, drained
    epochs: dict[PartitionId, Epoch]  # of their leadership
    groups: dict[str, tuple[Generation, str, frozenset[str]]]  # generation, phase, names of the members
    topics: frozenset[str]
    settings: dict[str, str]
    warnings: frozenset[str]


class EventLog:
    def __init__(self, node: NodeApi, directory: Path) -> None:
        self._node = node
        self._file = EventFile(directory)
        self._unsaved: list[Event] = []
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._before: _Moment | None = None
        self._has_caught_up = False  # since this process started
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
        self.add("node", f"node {self._node.node_id}: this process stops")
        await self.save()

    async def _run(self) -> None:
        await self._remember()
        while True:
            await self.look()
            await self.save()
            await asyncio.sleep(LOOK_S)

    async def _remember(self) -> None:
        """What earlier processes of this node have seen."""
        before, damaged = await asyncio.to_thread(self._file.load)
        self.events = deque([*before, *self.events], maxlen=EVENTS_MAX)
        if damaged:
            self.add("node", f"node {self._node.node_id}: {damaged} earlier events are damaged, and left out")

    async def save(self) -> None:
        """Off the loop: a disk that hangs delays events alone."""
        new, self._unsaved = self._unsaved, []
        if new:
            await asyncio.to_thread(self._file.add, new, list(self.events))

    async def look(self) -> None:
        """Notes what differs from the last look. The first one only remembers, and so do those of a node that applies
        what it has missed: that is old, and the others have seen it."""
        is_ready = self._node.status().is_ready
        now, before = await self._moment(), self._before
        self._before = now
        self._take_anomalies()
        if before is None or not self._has_caught_up:
            self._has_caught_up = is_ready
            return
        self._compare_nodes(before, now)
        await self._compare_partitions(before, now)
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
            name: (group.generation, state_of(group), self._members(group))
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

    def _members(self, group: GroupState) -> frozenset[str]:
        """They change with the generation only, so nothing is built for a group that has not moved."""
        old = self._before.groups.get(group.name) if self._before is not None else None
        if old is not None and old[0] == group.generation and old[1] == state_of(group):
            return old[2]
        return frozenset(f"{m.member.member_id} ({m.member.client_host})" for m in group.members.values())

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

    async def _compare_partitions(self, before: _Moment, now: _Moment) -> None:
        """Names are looked up for what has moved only: there may be thousands of partitions."""
        moved, state = [], self._node.state
        async for pid, epoch in Turns().over(now.epochs.items()):
            part = state.partition(pid) if before.epochs.get(pid, epoch) != epoch else None
            if part is not None:
                name = f"{state.topic_names[part.topic_id]}/{part.index}"
                moved.append(f"{name}: node {part.leader} leads, epoch {part.epoch}")
        self._add_all("leader", moved)

    def _compare_groups(self, before: _Moment, now: _Moment) -> None:
        moved = []
        for name, (generation, phase, members) in now.groups.items():
            old = before.groups.get(name)
            if old is None or old[0] != generation:
                changes = _difference(old[2] if old is not None else frozenset(), members)
                moved.append(f"{name}: generation {generation}, {phase}, {len(members)} members{changes}")
        self._add_all("group", moved)
        self._add_all("group", [f"{name}: deleted" for name in before.groups if name not in now.groups])

    def _add_all(self, kind: str, texts: list[str]) -> None:
        for text in texts[:PER_LOOK_MAX]:
            self.add(kind, text)
        if len(texts) > PER_LOOK_MAX:
            self.add(kind, f"and {len(texts) - PER_LOOK_MAX} more of this kind at the same moment")

    def add(self, kind: str, text: str) -> None:
        event = Event(time.time(), kind, text)
        self.events.append(event)
        self._unsaved.append(event)


def _difference(before: frozenset[str], now: frozenset[str]) -> str:
    """Which members have come and gone."""
    return "".join(
        f"; {what}: {', '.join(names[:NAMES_MAX])}"
        + (f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else "")
        for what, names in (("new", sorted(now - before)), ("gone", sorted(before - now)))
        if names
    )
