"""One fixed life of a cluster that uses every command and fills every part of the state.

Run as a program it prints the digest of the end: that of a fresh process, under whatever PYTHONHASHSEED.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from smq.raft_state.commands import (
    AddPartitions,
    AdvanceClock,
    AdvanceLogStart,
    AllocateProducerId,
    AlterClusterConfig,
    AlterTopicConfig,
    Barrier,
    Command,
    Coordinated,
    DeleteTopic,
    FenceNode,
    OffsetCommit,
    RaiseFeatureLevel,
    SetNodeDrained,
    UnfenceNode,
)
from smq.raft_state.ids import Incarnation, LogIndex, NodeId, Offset, ProducerEpoch, ProducerId
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from tests.unit.raft_state.support import (
    CURRENT,
    add,
    advance,
    advance_external,
    advances,
    aged,
    assign,
    assign_members,
    batch,
    commit,
    compact,
    completed,
    delete_group,
    delete_offsets,
    elect,
    end,
    external_topic,
    form,
    init_transactions,
    join,
    listener,
    marked,
    member,
    member_commit,
    pid,
    proposed,
    register,
    remove,
    replaced,
    retained,
    retention,
    rid,
    seal,
    settings,
    stage,
    topic,
    written,
)


def commands() -> list[Command]:
    """The life, in order."""
    return [
        *_nodes_and_topics(),
        SetNodeDrained(node=NodeId(3), drained=True),
        register(3, incarnation=2),
        *_external_offsets(),
        *_groups_with_members(),
        register(3, incarnation=3, rack="süd", listeners=(listener("inside"), listener("outside"))),
        form("again", CURRENT, 0, member("g")),  # counts on from the group that is gone
        assign_members("again", CURRENT, 3, g=b"x"),
        aged(0, AllocateProducerId(request_id=rid(50))),
        AllocateProducerId(request_id=rid(51)),
        aged(0, AllocateProducerId(request_id=rid(50))),
        *_transactions(),
        *_batches(),
    ]


def _transactions() -> list[Command]:
    """One in each phase, and one that has come to its end. Their producers are 7 to 14."""
    return [
        init_transactions("forgotten"),
        settings(transactional_id_expiration_ms=1),
        AdvanceClock(seen_ms=500_000, elapsed_ms=10, now_ms=500_020),
        settings("transactional.id.expiration.ms"),
        *(init_transactions(name) for name in ("ended", "open", "committing", "aborting", "idle")),
        init_transactions("idle", 12, 0),
        init_transactions("idle", 12, 0),  # a repetition
        init_transactions("idle", 12, 5),
        init_transactions("long", timeout_ms=900_001),
        *(add(name, 8 + n, 0, pid(2, 0)) for n, name in enumerate(("ended", "open", "committing", "aborting"))),
        add("open", 9, 0, pid(2, 1), groups=("team", "staged")),
        stage("open", 9, 0, "staged", (pid(2, 0), 7), (pid(2, 1), 8)),
        add("ended", 8, 0, groups=("by-transaction",)),
        stage("ended", 8, 0, "by-transaction", (pid(2, 0), 9)),
        end("ended", 8, 0, commit=True),
        add("ended", 8, 0, pid(2, 0)),
        end("committing", 10, 0, commit=True),
        end("aborting", 11, 0, commit=False, fencing=True),
        written((pid(2, 0), 2, 8, 7), (pid(2, 0), 1, 10, 4)),
        end("ended", 8, 0, commit=False),
        init_transactions("second"),  # of Kafka's second protocol
        init_transactions("second-open"),
        join((pid(2, 0), 13, 0), (pid(2, 1), 13, 0), (pid(2, 0), 14, 0), (pid(2, 0), 99, 0), (pid(2, 0), 8, 0)),
        stage("second", 13, 0, "joined", (pid(2, 0), 3), joining=True),
        end("second", 13, 0, commit=True, bumping=True),
        end("second", 13, 0, commit=True, bumping=True),  # a repetition
        end("second", 13, 0, commit=False, bumping=True),
        join((pid(2, 0), 13, 1)),
    ]


def _batches() -> list[Command]:
    """One that is committed, of which a temporary id has come to its end; its replay, which is dropped; one of no app.
    Their producers are 15 to 18."""
    return [
        *(replace(init_transactions(f"task-{n}"), is_temporary=n == 1) for n in range(4)),
        *(add(f"task-{n}", 15 + n, 0, pid(2, n % 2)) for n in range(4)),
        batch("query", 5, ("task-0", 15, 0), ("task-1", 16, 0)),
        batch("query", 5, ("task-2", 17, 0)),
        batch("query", 6, ("task-3", 18, 0), ("task-0", 15, 0)),
        replace(batch("", 0, ("task-3", 18, 0)), request_id=rid(70)),
        written((pid(2, 1), 1, 16, 5)),
        init_transactions("forgotten", 7, 0),  # gets producer 19
    ]


def _external_offsets() -> list[Command]:
    return [
        external_topic(4, "elsewhere", partitions=2, start=50),
        assign((rid(100), pid(4), 5), (rid(101), pid(4, 1), 1), (rid(102), pid(4), 3), (rid(103), pid(2), 1)),
        assign((rid(100), pid(4), 5)),
        advance_external((pid(4), 57), (pid(4), 51), (pid(4, 1), 99)),
    ]


def _groups_with_members() -> list[Command]:
    """In every phase."""
    return [
        AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=1),  # starts the clock
        *(register(node, 7, kafka=f"host:{node}") for node in (2, 4)),
        form("team", CURRENT, 0, member("a"), member("b", "range", "sticky", instance="i")),
        assign_members("team", CURRENT, 1, a=b"\0", b=b"\xff"),
        member_commit("team", 1, "a", (pid(2, 0), 19), epoch=CURRENT),
        replaced("team", CURRENT, "b", member("c", "range", instance="i")),
        form("torn", CURRENT, 0, member("e"), member("f")),
        member_commit("torn", 1, "e", (pid(2, 0), 1), epoch=CURRENT),
        remove("torn", CURRENT, 1, "e"),
        commit("short", (pid(2, 0), 1), (pid(2, 1), 1)),
        delete_offsets("short", 0, pid(2, 1)),
        commit("deleted", (pid(2, 0), 1)),
        replace(delete_group("deleted"), request_id=rid(40)),
        AlterClusterConfig(
            set_=(
                ("num.partitions", "4"),
                ("offsets.retention.minutes", "17"),
                ("default.replication.factor", "1"),
                ("producer.id.expiration.ms", "700000"),
            ),
            request_id=rid(41),
        ),
        AlterClusterConfig(unset=("default.replication.factor",)),
        AdvanceClock(seen_ms=1, elapsed_ms=400_000, now_ms=500_000),
        form("left", CURRENT, 0, member("d")),
        remove("left", CURRENT, 1, "d"),
        delete_group("left"),
        register(4, 8, kafka="moved:1"),
    ]


def _nodes_and_topics() -> list[Command]:
    return [
        default_init("life"),
        *(register(node) for node in (3, 1, 4, 2)),
        FenceNode(node=NodeId(4), incarnation=Incarnation(1)),
        replace(topic(2, "zebra", partitions=3), config=(("max.message.bytes", "1000"),)),
        replace(topic(1, "ant", partitions=4, replicas=2, start=2**40), request_id=rid(9)),
        topic(3, "gone", replicas=1),
        UnfenceNode(node=NodeId(4), incarnation=Incarnation(1)),
        AddPartitions(name="ant", partition_count=6, request_id=rid(3)),
        AddPartitions(name="ant", partition_count=7, assignments=((NodeId(4), NodeId(1)),)),
        advances(
            advance(pid(2, 0), 0, 10, 12, 1_000), advance(pid(2, 1), 0, 7, 7, 2_000), advance(pid(1), 0, 2**40 + 1)
        ),
        elect(pid(2, 0), 0, candidate=2, end=10),
        advances(advance(pid(2, 0), 1, 20, 25, 3_000)),
        elect(pid(2, 0), 1, candidate=3, end=20),
        AdvanceLogStart(partition=pid(2, 0), offset=Offset(11)),
        AlterTopicConfig(name="ant", set_=(("retention.bytes", "9"), ("retention.ms", "8"))),
        advances(advance(pid(1), 0, 2**40 + 3), advance(pid(1, 1), 0, 2**40 + 2)),
        retention(
            retained(pid(1), 0, 2**40 + 2, ms=8, size=9),
            retained(pid(1, 1), 0, 2**40 + 1, ms=8, size=9, records=7),
            retained(pid(1, 2), 0, 2**40 + 1, ms=8, size=9),
            retained(pid(3), 0, 1, ms=8, size=9),
        ),
        AlterTopicConfig(name="zebra", set_=(("cleanup.policy", "compact,delete"), ("delete.retention.ms", "9"))),
        compact(pid(2, 0), 2, 0, 10, 14, tombstones_ms=8, log_start=11),
        compact(pid(2, 0), 2, 1, 14, 19, 2),
        compact(pid(2, 0), 2, 2, 10, 14, 3, is_reset=True),
        commit("readers", (pid(2, 1), 5), (pid(2, 0), 19), (pid(3), 0)),
        commit("gone-readers", (pid(3), 0)),
        replace(
            commit("Äpfel", request=rid(1), at_ms=77),
            items=(OffsetCommit(partition=pid(1, 5), offset=Offset(1), metadata="ß", leader_epoch=3),),
        ),
        *(AllocateProducerId(request_id=rid(20 + n)) for n in range(3)),
        *(AllocateProducerId(request_id=rid(60 + n), is_from_node=True) for n in range(2)),
        AllocateProducerId(producer_id=ProducerId(2), producer_epoch=ProducerEpoch(0)),
        AllocateProducerId(producer_id=ProducerId(0), producer_epoch=ProducerEpoch(0)),
        DeleteTopic(name="missing", request_id=rid(2)),
        DeleteTopic(name="gone"),
        AlterTopicConfig(name="ant", set_=(("max.message.bytes", "2000"),)),
        register(1, incarnation=5, address="moved:1", level=3),
        elect(pid(2, 1), 0, candidate=2, end=9, seals=(seal(2, 9), seal(3, 7))),
        elect(pid(2, 2), 0, candidate=2, end=4, by_leader=True),
        elect(pid(2, 2), 1, candidate=3, end=2, seals=(seal(3, 2), seal(2, 1))),
        register(2, incarnation=2, disk=22, kafka="host:2"),
        marked(3, pid(2, 0), pid(2, 1), pid(1)),
        completed((pid(2, 0), 2, 3), (pid(2, 1), 0, 3)),
        RaiseFeatureLevel(level=1),
        Barrier(),
    ]


def run(machine: Machine, steps: Sequence[Command], first_index: int = 1) -> None:
    for index, command in enumerate(steps, first_index):
        machine.apply(
            LogIndex(index), proposed(machine.state, command) if isinstance(command, Coordinated) else command
        )


def end_of_life() -> Machine:
    """A machine after the whole life."""
    machine = Machine()
    run(machine, commands())
    return machine


if __name__ == "__main__":
    sys.stdout.write(end_of_life().digest())
