"""Golden transcripts: commands and their outcomes, as text that a person can read and a diff can show.

Each file in tests/transcripts/*.txt holds lines that begin with ">" (a command, written in Python with the helpers of
`support`, or a word: state, groups, digest, snapshot, restart, bytes COMMAND) and, indented below, their outputs.
Lines that begin with "#" are comments. `pytest --rewrite` writes the present outputs; read the diff first.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.raft_state import commands, ids
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.raft_state.command_codec import FEATURE_LEVEL, encode_command, encode_reply
from smq.raft_state.command_table import COMMANDS
from smq.raft_state.config_keys import known_at
from smq.raft_state.ids import PartitionId
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied, Rejected
from smq.raft_state.state import ClusterState, GroupState, MemberState, PartitionState
from smq.raft_state.topic_config import TOPIC_CONFIG
from tests.unit.raft_state.life import DIRECTORY, commands_of, transcript, value_of
from tests.unit.raft_state.support import Driver

TRANSCRIPTS = sorted(DIRECTORY.glob("*.txt"))
INDENT = "    "
ROW_BYTES = 58  # of a snapshot, on one line


def _show_pid(state: ClusterState, pid: PartitionId) -> str:
    topic_id, index = ids.split_partition_id(pid)
    return f"{state.topic_names.get(topic_id, 'topic ' + topic_id.hex().lstrip('0'))}/{index}"


def _show_partition(state: ClusterState, p: PartitionState) -> str:
    history = " ".join(f"{entry.epoch}@{entry.start}" for entry in p.history)
    return (
        f"{_show_pid(state, p.pid)} leader {p.leader} (incarnation {p.leader_incarnation}) of {list(p.replicas)},"
        f" epoch {p.epoch} [{history}], log_start {p.log_start}, hwm {p.hwm}, next {p.next_offset}, ts {p.ts_ns}"
        f"{f', incomplete {sorted(p.incomplete)}' if p.incomplete else ''}"
        f"{', opening' if p.is_opening else ''}"
        f"{f', producers above {p.producers_start}' if p.producers_start > p.log_start else ''}"
        f"{_show_segments(p) if p.segments else ''}"
    )


def _show_segments(p: PartitionState) -> str:
    shown = [f"{s.start}{'*' if s.is_dirty else ''}" for s in p.segments]
    return f", compacted {p.compactions} times: {' '.join(shown)} to {p.compacted_end}"


def _show_applied(state: ClusterState, applied: Applied) -> Iterator[str]:
    reply = applied.reply
    if isinstance(reply, Rejected):
        where = f" (lo {reply.lo}, hi {reply.hi})" if reply.hi >= 0 else ""
        yield f"Rejected {reply.code.name}{where}: {reply.message}"
    else:
        yield repr(reply)
    for pid in applied.touched:
        partition = state.partition(pid)
        yield _show_partition(state, partition) if partition else f"{_show_pid(state, pid)} is gone"


def _show_state(state: ClusterState) -> Iterator[str]:
    yield f"cluster {state.cluster_id!r}, next producer id {state.next_producer_id}"
    for node in sorted(state.nodes.values(), key=lambda node: node.node):
        yield f"node {node.node} incarnation {node.incarnation}{' fenced' if node.fenced else ''}"
    for name in sorted(state.topics):
        yield f"topic {name} config {state.topics[name].config}"
        for partition in state.topics[name].partitions:
            yield _show_partition(state, partition)
    for name in sorted(state.groups):
        yield from _show_group(state, state.groups[name])
    for producer_id, epoch in state.producers.items():
        yield f"producer {producer_id} epoch {epoch}"
    for name in sorted(state.users):
        yield f"user {name}: {', '.join(map(repr, state.users[name].credentials))}"
    for row in (*state.acls, *state.quotas):
        yield repr(row)
    for request_id, reply in (item for cache in state.replies for item in cache.replies.items()):
        yield f"request {int.from_bytes(request_id, 'big')}: {reply.hex()}"


def _show_group(state: ClusterState, group: GroupState) -> Iterator[str]:
    offsets = sorted(group.offsets.items())
    yield f"group {group.name}: " + ", ".join(f"{_show_pid(state, pid)} at {c.offset}" for pid, c in offsets)
    if group.generation:
        yield f"  {group.phase.name}, generation {group.generation} of {group.protocol!r}, leader {group.leader!r}"
    for name, m in group.members.items():
        instance = f" (instance {m.member.instance_id})" if m.member.instance_id else ""
        yield f"  member {name}{instance}: {m.assignment!r}{_show_progress(m) if group.target_epoch else ''}"


def _show_progress(m: MemberState) -> str:
    shown = {"assigned": m.assigned, "revoking": m.revoking, "target": m.target}
    lists = [f", {word} {[i for _, found in part for i in found]}" for word, part in shown.items()]
    return f" in epoch {m.epoch}, before {m.previous_epoch}{''.join(lists)}"


class Player:
    """Plays the lines of one transcript."""

    def __init__(self) -> None:
        self.driver = Driver()

    def play(self, text: str) -> Iterator[str]:
        machine = self.driver.machine
        if text == "groups":
            for name in sorted(machine.state.groups):
                yield from _show_group(machine.state, machine.state.groups[name])
        elif text == "state":
            yield from _show_state(machine.state)
        elif text == "digest":
            yield machine.digest()
        elif text == "snapshot":
            snapshot = machine.snapshot()
            yield from (snapshot[at : at + ROW_BYTES].hex() for at in range(0, len(snapshot), ROW_BYTES))
        elif text == "restart":
            self.driver = Driver(Machine.restore(machine.snapshot()))
            yield "same" if self.driver.machine.digest() == machine.digest() else "DIFFERENT"
        elif text.startswith("bytes "):
            value = value_of(text.removeprefix("bytes "))
            yield (encode_command if isinstance(value, commands.Command) else encode_reply)(value).hex()
        else:
            applied = self.driver.apply(value_of(text))
            yield from _show_applied(self.driver.machine.state, applied)


def play(text: str) -> str:
    """The transcript with its present outputs."""
    player, lines = Player(), []
    for line in text.splitlines():
        if line.startswith(INDENT):
            continue
        lines.append(line)
        if line.startswith("> "):
            lines += [INDENT + output for output in player.play(line.removeprefix("> "))]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_has_not_changed(path: Path, is_rewriting: bool) -> None:
    before = path.read_text()
    now = play(before)
    if is_rewriting:
        path.write_text(now)
    else:
        assert now == before, f"{path.name} has changed: `pytest --rewrite` shows how, in the diff"


def test_there_are_transcripts() -> None:
    assert TRANSCRIPTS


@pytest.mark.parametrize("level", range(1, FEATURE_LEVEL + 1))
def test_the_outcomes_of_a_feature_level_are_frozen(level: int) -> None:
    """Every command and every setting of the level is in its transcript, which ends with the digest."""
    text = transcript(f"level_{level}")
    assert {type(command) for command in commands_of(text)} >= {
        row.record.cls for row in COMMANDS if row.since <= level
    }
    settings = {key for table in (CLUSTER_CONFIG, TOPIC_CONFIG) for key in known_at(table, level)}
    assert {key for key in settings if f"'{key}'" not in text} == set()
    assert "> digest" in text.split("\n\n")[-1]
