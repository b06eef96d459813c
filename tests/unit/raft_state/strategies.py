"""Random commands and replies: any value that fits its field, valid or not."""

from typing import Any

from hypothesis import strategies as st

from smq.raft_state.commands import (
    AddPartitions,
    AdvanceExternalHwms,
    AdvanceHwms,
    AdvanceLogStart,
    AllocateProducerId,
    AlterTopicConfig,
    AssignMembers,
    Assignment,
    AssignOffsets,
    Barrier,
    Command,
    CommitCoordinatedOffsets,
    CommitMemberOffsets,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopic,
    Done,
    ElectLeader,
    ExpireOffsets,
    ExternalAdvance,
    ExternalHwm,
    FenceNode,
    FormGeneration,
    GenerationFormed,
    GroupMember,
    HwmAdvance,
    HwmsAdvanced,
    InitCluster,
    LeaderElected,
    OffsetCommit,
    OffsetsAssigned,
    ProducerIdAllocated,
    RegisterNode,
    Rejected,
    RemoveMembers,
    ReplaceMember,
    Reply,
    Results,
    SetNodeDrained,
    SetOffsetsRetention,
    TopicCreated,
    UnfenceNode,
)
from smq.raft_state.errors import ErrorCode

Any_ = st.SearchStrategy[Any]

i16: Any_ = st.integers(-(2**15), 2**15 - 1)
i32: Any_ = st.integers(-(2**31), 2**31 - 1)
i64: Any_ = st.integers(-(2**63), 2**63 - 1)
text: Any_ = st.text(max_size=20)
ids: Any_ = st.binary(max_size=20)
pids: Any_ = st.binary(min_size=20, max_size=20)
pairs: Any_ = st.lists(st.tuples(text, text), max_size=3).map(tuple)
nodes: dict[str, Any_] = {"node": i32, "incarnation": i64}


def _many(strategy: Any_) -> Any_:
    return st.lists(strategy, max_size=4).map(tuple)


coordinated: dict[str, Any_] = {"request_id": ids, "group": text, "coordinator_epoch": i32}
members: Any_ = st.builds(
    GroupMember,
    member_id=text,
    instance_id=text,
    client_id=text,
    client_host=text,
    session_timeout_ms=i32,
    rebalance_timeout_ms=i32,
    protocols=_many(st.tuples(text, ids)),
)
commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(InitCluster, cluster_id=text, topics_max=i64, partitions_max=i64, groups_max=i64, replies_max=i64),
    st.builds(RegisterNode, **nodes, disk=ids, grpc_address=text, http_address=text, kafka_address=text, rack=text),
    st.builds(FenceNode, **nodes),
    st.builds(UnfenceNode, **nodes),
    st.builds(
        CreateTopic,
        request_id=ids,
        name=text,
        topic_id=ids,
        partition_count=i64,
        replication_factor=i64,
        config=pairs,
        start_offset=i64,
        created_ms=i64,
    ),
    st.builds(DeleteTopic, request_id=ids, name=text),
    st.builds(AddPartitions, request_id=ids, name=text, partition_count=i64),
    st.builds(AlterTopicConfig, request_id=ids, name=text, set_=pairs, unset=_many(text)),
    st.builds(ElectLeader, partition=pids, expected_epoch=i32, candidate=i32, incarnation=i64, verified_end=i64),
    st.builds(
        AdvanceHwms,
        items=_many(st.builds(HwmAdvance, partition=pids, epoch=i32, hwm=i64, next_offset=i64, ts_ns=i64)),
    ),
    st.builds(AdvanceLogStart, request_id=ids, partition=pids, offset=i64),
    st.builds(AllocateProducerId, request_id=ids, producer_id=i64, producer_epoch=i16),
    st.builds(
        CommitOffsets,
        request_id=ids,
        group=text,
        items=_many(st.builds(OffsetCommit, partition=pids, offset=i64, metadata=text)),
        committed_ms=i64,
    ),
    st.builds(
        CommitMemberOffsets,
        request_id=ids,
        group=text,
        generation=i32,
        member_id=text,
        instance_id=text,
        items=_many(st.builds(OffsetCommit, partition=pids, offset=i64, metadata=text)),
        committed_ms=i64,
    ),
    st.builds(
        CommitCoordinatedOffsets,
        **coordinated,
        generation=i32,
        member_id=text,
        instance_id=text,
        items=_many(st.builds(OffsetCommit, partition=pids, offset=i64, metadata=text)),
        committed_ms=i64,
    ),
    st.builds(
        FormGeneration,
        **coordinated,
        expected_generation=i32,
        protocol_type=text,
        protocol=text,
        leader=text,
        members=_many(members),
    ),
    st.builds(AssignMembers, **coordinated, generation=i32, assignments=_many(st.tuples(text, ids))),
    st.builds(RemoveMembers, **coordinated, generation=i32, member_ids=_many(text), removed_ms=i64),
    st.builds(ReplaceMember, **coordinated, old_member_id=text, member=members),
    st.builds(DeleteGroup, request_id=ids, group=text),
    st.builds(DeleteOffsets, request_id=ids, group=text, generation=i32, partitions=_many(pids)),
    st.builds(ExpireOffsets, now_ms=i64),
    st.builds(SetOffsetsRetention, request_id=ids, retention_ms=i64),
    st.just(Barrier()),
    st.builds(SetNodeDrained, request_id=ids, node=i32, drained=st.booleans()),
    st.builds(
        AssignOffsets,
        items=_many(st.builds(Assignment, request_id=ids, partition=pids, count=i64, not_before=i64)),
    ),
    st.builds(AdvanceExternalHwms, items=_many(st.builds(ExternalAdvance, partition=pids, offset=i64))),
)

_rejections: Any_ = st.builds(Rejected, code=st.sampled_from(ErrorCode), message=text, lo=i64, hi=i64)
_results: Any_ = st.one_of(st.builds(OffsetsAssigned, base=i64, last=i64), st.builds(ExternalHwm, hwm=i64), _rejections)

replies: st.SearchStrategy[Reply] = st.one_of(
    st.just(Done()),
    _results,
    st.builds(Results, items=_many(_results)),
    st.builds(TopicCreated, topic_id=ids),
    st.builds(LeaderElected, epoch=i32, start=i64),
    st.builds(HwmsAdvanced, accepted=_many(st.booleans())),
    st.builds(ProducerIdAllocated, producer_id=i64, producer_epoch=i16),
    st.builds(GenerationFormed, generation=i32),
)
