"""What holds in every state: the checks behind the promise "a broken invariant ends the process".

Owns InvariantBroken and the full check. Tests run it after every apply, a restore runs it once. The cheap part,
`check_offsets`, runs at every change of a partition. It must never change the state. Any module may import it.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from smq.raft_state.handlers.acls import acl_fault
from smq.raft_state.handlers.quotas import quota_fault
from smq.raft_state.handlers.users import credential_fault, name_fault
from smq.raft_state.ids import (
    NO_NODE,
    NO_PRODUCER,
    Epoch,
    Offset,
    PartitionId,
    ProducerId,
    partition_id,
    split_partition_id,
)
from smq.raft_state.limits import (
    ACLS_MAX,
    APPS_MAX,
    ASSIGNED_MAX,
    COORDINATOR_SLOTS,
    DISK_ID_BYTES,
    GROUP_MEMBERS_MAX,
    NODES_MAX,
    PRODUCER_EPOCH_RETIRED,
    PRODUCER_MARKS_MAX,
    PRODUCERS_MAX,
    QUOTAS_MAX,
    REQUEST_ID_BYTES,
    TRANSACTIONAL_IDS_MAX,
    USERS_MAX,
)
from smq.raft_state.state import (
    AWAY_EPOCH,
    ClusterState,
    EpochStart,
    GroupKind,
    GroupPhase,
    GroupState,
    PartitionState,
    ReplyCache,
    TopicState,
    TransactionPhase,
    TransactionState,
    held,
    members_bytes,
)
from smq.raft_state.topic_config import is_external

STEP_ITEMS: Final = 250  # between two yields: half a millisecond


class InvariantBroken(Exception):
    """The state is impossible: a bug or damaged memory. The process must end; nothing may catch this."""


def check(state: ClusterState) -> None:
    """InvariantBroken with the reason, if anything is wrong."""
    for _ in check_steps(state):
        pass


def check_steps(state: ClusterState) -> Iterator[None]:
    """As `check`, with one millisecond of work between two yields. The state must not change before the last."""
    _require(state.feature_level >= 1, f"feature level {state.feature_level}")
    if not state.cluster_id:
        remembers = any(cache.counted for cache in state.replies)
        empty = not (state.nodes or state.topics or state.groups or remembers or state.next_producer_id)
        _require(empty, "there is state before InitCluster")
    _check_nodes(state)
    _require(len(state.topics) <= state.topics_max, "more topics than topics_max")
    _require(len(state.topic_names) == len(state.topics), "topic_names and topics differ")
    for name, topic in state.topics.items():
        _require(topic.name == name, f"topic {topic.name} is filed as {name}")
        yield from _check_topic(state, topic)
    partition_count = sum(len(topic.partitions) for topic in state.topics.values())
    _require(partition_count <= state.partitions_max, "more partitions than partitions_max")
    yield from _check_groups(state)
    _check_coordinators(state)
    yield
    total = sum(members_bytes(group.members) for group in state.groups.values())
    _require(state.member_bytes == total, f"member_bytes is {state.member_bytes}, the members have {total}")
    _check_producers(state)
    yield
    yield from _check_transactions(state)
    _check_apps(state)
    _check_users(state)
    _check_acls(state)
    _check_quotas(state)
    yield from _check_assigned(state)
    for cache in state.replies:
        yield
        _check_replies(state, cache)


def check_offsets(partition: PartitionState) -> None:
    """The part that each change of a partition checks: log_start <= hwm <= next_offset."""
    if not 0 <= partition.log_start <= partition.hwm <= partition.next_offset:
        raise InvariantBroken(
            f"partition {partition.pid.hex()}: log_start {partition.log_start}, hwm {partition.hwm},"
            f" next_offset {partition.next_offset} do not ascend"
        )


def _require(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise InvariantBroken(otherwise)


def _check_nodes(state: ClusterState) -> None:
    _require(len(state.nodes) <= NODES_MAX, "more nodes than NODES_MAX")
    for node, entry in state.nodes.items():
        _require(entry.node == node and node >= 1, f"node {entry.node} is filed as {node}")
        _require(len(entry.disk) == DISK_ID_BYTES, f"node {node} has a disk id of {len(entry.disk)} bytes")
        knows = entry.feature_level >= state.feature_level
        _require(knows, f"node {node} knows level {entry.feature_level}, the cluster is at {state.feature_level}")


def _check_replies(state: ClusterState, cache: ReplyCache) -> None:
    _require(len(cache.replies) <= state.replies_max, "more replies than replies_max")
    _require(cache.counted >= len(cache.replies), f"{len(cache.replies)} replies, {cache.counted} counted")
    _require(all(len(request_id) == REQUEST_ID_BYTES for request_id in cache.replies), "a request id's length")


def _check_topic(state: ClusterState, topic: TopicState) -> Iterator[None]:
    _require(state.topic_names.get(topic.topic_id) == topic.name, f"the id of {topic.name} leads elsewhere")
    _require(bool(topic.partitions), f"{topic.name} has no partitions")
    for index, partition in enumerate(topic.partitions):
        where = f"{topic.name}/{index}"
        _require(partition.pid == partition_id(topic.topic_id, partition.index), f"{where}: its id")
        _require(partition.topic_id == topic.topic_id and partition.index == index, f"{where} is in a wrong place")
        _require(len(partition.replicas) == topic.replication_factor, f"{where}: number of replicas")
        _require(partition.is_external == is_external(topic.config), f"{where}: replicas do not fit the storage")
        _check_partition(state, partition, where)
        if index % STEP_ITEMS == 0:
            yield


def _check_partition(state: ClusterState, partition: PartitionState, where: str) -> None:
    replicas = partition.replicas
    _require(len(set(replicas)) == len(replicas), f"{where}: a replica twice")
    _require(all(node in state.nodes for node in replicas), f"{where}: a replica that never registered")
    if partition.is_external:
        _require(partition.leader == NO_NODE and partition.epoch == 0, f"{where}: external storage with a leader")
    else:
        _require(partition.leader in replicas, f"{where}: its leader is no replica")
        incarnation = state.nodes[partition.leader].incarnation
        _require(partition.leader_incarnation <= incarnation, f"{where}: a leader from the future")
    check_offsets(partition)
    _require(partition.ts_ns >= 0, f"{where}: ts_ns {partition.ts_ns}")
    _require(0 <= partition.producers_start <= partition.hwm, f"{where}: producers start above the hwm")
    marks = partition.producer_marks
    _require(len(marks) <= PRODUCER_MARKS_MAX, f"{where}: more than PRODUCER_MARKS_MAX marks")
    hwms = [partition.producers_start, *(mark.hwm for mark in marks), partition.hwm + 1]
    _require(all(a < b for a, b in pairwise(hwms)), f"{where}: the marks of producers do not ascend")
    _require(all(a.clock_ms < b.clock_ms for a, b in pairwise(marks)), f"{where}: the marks' times do not ascend")
    history = partition.history
    _require(bool(history) and history[-1].epoch == partition.epoch, f"{where}: the history's last epoch")
    for a, b in pairwise(history):
        _require(a.epoch < b.epoch and a.start <= b.start, f"{where}: the history does not ascend")
    for a, b in pairwise(history[1:]):
        _require(a.start < b.start, f"{where}: the history holds an epoch without records")
    is_first = history[0] == EpochStart(Epoch(0), partition.log_start)  # the log start has never moved
    begins_below = is_first or history[0].start < partition.log_start
    _require(begins_below, f"{where}: the history does not begin below the log start")
    _require(history[-1].start <= partition.next_offset, f"{where}: the epoch starts above the next offset")
    _require(partition.incomplete <= set(replicas), f"{where}: an incomplete node that is no replica")
    _check_segments(partition, where)
    # Equal is valid: a log that ends at the log start is judged by the epoch that ends there (rule 20).
    is_pruned = len(history) < 2 or history[1].start >= partition.log_start
    _require(is_pruned, f"{where}: the history holds an epoch that ended below the log start")


def _check_segments(partition: PartitionState, where: str) -> None:
    segments = partition.segments
    _require(partition.compacted_end <= partition.hwm, f"{where}: compacted above the hwm")
    if segments:
        starts = [*(segment.start for segment in segments), partition.compacted_end]
        _require(all(a < b for a, b in pairwise(starts)), f"{where}: the segments do not ascend")
        _require(starts[0] <= partition.log_start < starts[1], f"{where}: the first segment lacks the log start")


def _check_groups(state: ClusterState) -> Iterator[None]:
    _require(len(state.groups) <= state.groups_max, "more groups than groups_max")
    for name, group in state.groups.items():
        _require(group.name == name, f"group {name!r} is misfiled")
        _require(group.changes >= 0, f"group {name!r} has changed {group.changes} times")
        _require(group.is_unused or not group.was_unused, f"group {name!r} counts as unused and is used")
        _check_members(group)
        for number, (pid, committed) in enumerate(group.offsets.items()):
            if number % STEP_ITEMS == 0:
                yield
            # Formatted only when it is needed: there may be a million commits.
            if state.partition(pid) is None:
                topic_id, _ = split_partition_id(pid)
                raise InvariantBroken(f"group {name!r} committed for a topic {topic_id.hex()} gone")
            if committed.order > state.offset_commits:
                raise InvariantBroken(f"group {name!r}: commit {committed.order} of {state.offset_commits}")


def _check_members(group: GroupState) -> None:
    name = group.name
    _require((group.phase is GroupPhase.EMPTY) == (not group.members), f"group {name!r} is {group.phase.name}")
    _require(group.generation >= (1 if group.members else 0), f"group {name!r} is in generation {group.generation}")
    _require(len(group.members) <= GROUP_MEMBERS_MAX, f"group {name!r} has {len(group.members)} members")
    instances = [m.member.instance_id for m in group.members.values() if m.member.instance_id]
    _require(len(set(instances)) == len(instances), f"group {name!r} has an instance twice")
    holders = [(partition, member_id) for member_id, m in group.members.items() for partition in held(m)]
    _require(dict(holders) == group.owners, f"group {name!r}: the owners are not those of its members")
    _require(len(holders) == len(group.owners), f"group {name!r}: a partition has two owners")
    for member_id, entry in group.members.items():
        _require(entry.member.member_id == member_id, f"group {name!r}: member {member_id!r} is misfiled")
    if group.kind is GroupKind.CONSUMER:
        _check_consumers(group)
        return
    for member_id, entry in group.members.items():
        member = entry.member
        protocols = [protocol for protocol, _ in member.protocols]
        _require(group.protocol in protocols, f"group {name!r}: {member_id!r} does not know {group.protocol!r}")
        is_assigned = group.phase is not GroupPhase.COMPLETING or not entry.assignment
        _require(is_assigned, f"group {name!r} has assignments before its leader gave them")
    # The leader may have been removed: then the remaining members must rebalance.
    has_leader = group.leader in group.members or group.phase in (GroupPhase.EMPTY, GroupPhase.PREPARING)
    _require(has_leader, f"group {name!r}: its leader {group.leader!r} is no member")


def _check_consumers(group: GroupState) -> None:
    name = group.name
    _require(0 <= group.target_epoch <= group.generation, f"group {name!r}: target of epoch {group.target_epoch}")
    _require(group.phase in (GroupPhase.EMPTY, GroupPhase.STABLE), f"group {name!r} is {group.phase.name}")
    targets = [(topic_id, i) for m in group.members.values() for topic_id, indexes in m.target for i in indexes]
    _require(len(set(targets)) == len(targets), f"group {name!r}: a partition is in two targets")
    for member_id, m in group.members.items():
        is_known = m.epoch == AWAY_EPOCH or 0 <= m.epoch <= group.target_epoch
        _require(is_known, f"group {name!r}: {member_id!r} is in epoch {m.epoch}")


def _check_coordinators(state: ClusterState) -> None:
    _require(len(state.coordinators) == COORDINATOR_SLOTS, "the number of coordinator slots")
    for slot in state.coordinators:
        node = state.nodes.get(slot.node)
        _require((slot.epoch == 0) == (slot.node == 0), f"coordinator {slot.node} in epoch {slot.epoch}")
        _require(slot.node == 0 or node is not None, f"coordinator {slot.node} never registered")
        _require(node is None or slot.incarnation <= node.incarnation, f"coordinator {slot.node} is from the future")


def _check_producers(state: ClusterState) -> None:
    _require(len(state.producers) <= PRODUCERS_MAX, "more producers than PRODUCERS_MAX")
    for producer_id, epoch in state.producers.items():
        _require(0 <= producer_id < state.next_producer_id and epoch > 0, f"producer {producer_id}, epoch {epoch}")


def _check_transactions(state: ClusterState) -> Iterator[None]:
    _require(len(state.transactions) <= TRANSACTIONAL_IDS_MAX, "more transactional ids than TRANSACTIONAL_IDS_MAX")
    endings: dict[PartitionId, set[ProducerId]] = {}
    leading = 0  # producer ids that lead to a transactional id
    for number, (name, transaction) in enumerate(state.transactions.items()):
        if number % STEP_ITEMS == 0:
            yield
        _require(transaction.transactional_id == name, f"transactional id {name!r} is misfiled")
        for producer_id in transaction.producer_ids:
            owner = state.transactional_ids.get(producer_id)
            _require(owner == name, f"producer {producer_id} of {name!r} leads to {owner!r}")
            _require(0 <= producer_id < state.next_producer_id, f"{name!r}: a producer that was never given")
        leading += len(transaction.producer_ids)
        _check_epochs(transaction)
        is_open = transaction.phase is TransactionPhase.ONGOING
        _require(is_open or not transaction.offsets, f"{name!r} has staged offsets without a transaction")
        is_empty = transaction.phase is TransactionPhase.EMPTY
        _require(not is_empty or not transaction.partitions, f"{name!r} has partitions without a transaction")
        _require(not transaction.is_ending or bool(transaction.partitions), f"{name!r} ends without partitions")
        for pid in transaction.partitions:
            _require(state.partition(pid) is not None, f"{name!r} wrote to a partition that is gone")
            if transaction.is_ending:
                endings.setdefault(pid, set()).add(transaction.marked_as[0])
    _require(len(state.transactional_ids) == leading, "transactional_ids and transactions differ")
    _require(state.endings == endings, "the endings are not those of the transactions")
    total = sum(transaction.items for transaction in state.transactions.values())
    _require(state.transaction_items == total, f"transaction_items is {state.transaction_items}, not {total}")


def _check_apps(state: ClusterState) -> None:
    _require(len(state.apps) <= APPS_MAX, "more apps than APPS_MAX")
    for name, app in state.apps.items():
        _require(bool(name) and app.batch_id >= 0, f"app {name!r} with batch {app.batch_id}")
        _require(app.used_ms <= state.expiry_clock_ms, f"app {name!r} was used in the future")
        _require(app.fingerprint.rows >= -1, f"app {name!r} has written {app.fingerprint.rows} rows")


def _check_users(state: ClusterState) -> None:
    _require(len(state.users) <= USERS_MAX, "more users than USERS_MAX")
    for name, user in state.users.items():
        _require(user.name == name and name_fault(name) is None, f"user {user.name!r} is filed as {name!r}")
        mechanisms = [credential.mechanism for credential in user.credentials]
        is_in_order = bool(mechanisms) and all(a < b for a, b in pairwise(mechanisms))
        _require(is_in_order, f"user {name!r} has the mechanisms {mechanisms}")
        _require(not any(map(credential_fault, user.credentials)), f"user {name!r} has a bad credential")


def _check_acls(state: ClusterState) -> None:
    _require(len(state.acls) <= ACLS_MAX, "more rules than ACLS_MAX")
    _require(all(a < b for a, b in pairwise(state.acls)), "the rules do not ascend")
    _require(not any(map(acl_fault, state.acls)), "a rule that is none")


def _check_quotas(state: ClusterState) -> None:
    _require(len(state.quotas) <= QUOTAS_MAX, "more quotas than QUOTAS_MAX")
    _require(all(a[:2] < b[:2] for a, b in pairwise(state.quotas)), "the quotas do not ascend")
    _require(not any(quota_fault(quota) or not quota.thousandths for quota in state.quotas), "a quota that is none")


def _check_epochs(transaction: TransactionState) -> None:
    """The end of a transaction leaves its producer in the same epoch, in the next one, or in the first one of a fresh
    id; so at most one step lies between the producer that has ended it and the present one."""
    name, epoch = transaction.transactional_id, transaction.producer_epoch
    is_epoch = 0 <= epoch <= PRODUCER_EPOCH_RETIRED
    _require(is_epoch and transaction.last_epoch < epoch, f"{name!r}: its producer epochs")
    ended_id, ended = transaction.ended_id, transaction.ended_epoch
    if ended_id == NO_PRODUCER:
        _require(ended == -1, f"{name!r}: epoch {ended} of no producer has ended a transaction")
    elif ended_id == transaction.producer_id:
        is_one_step = ended in (epoch, epoch - 1) and 0 <= ended < PRODUCER_EPOCH_RETIRED
        _require(is_one_step, f"{name!r}: epoch {ended} has ended a transaction, and the present one is {epoch}")
    else:
        is_last = ended == PRODUCER_EPOCH_RETIRED - 1 and epoch == 0
        _require(is_last, f"{name!r}: producer {ended_id} was replaced in epoch {ended}, by epoch {epoch}")


def _check_assigned(state: ClusterState) -> Iterator[None]:
    """The known assignments of a partition follow one another without a gap, up to its next offset."""
    _require(len(state.assigned) <= ASSIGNED_MAX, "more assignments than ASSIGNED_MAX")
    ends = dict(state.assigned_before)
    for pid, end in ends.items():
        partition = state.partition(pid)
        _require(partition is not None and partition.is_external and end > 0, f"assignments of {pid.hex()} forgotten")
    for number, (request_id, assigned) in enumerate(state.assigned.items()):
        if number % STEP_ITEMS == 0:
            yield
        _require(len(request_id) == REQUEST_ID_BYTES, "a request id's length")
        partition = state.partition(assigned.partition)
        if partition is None:
            continue  # the topic was deleted; its first answers still hold
        where = f"assignment {assigned.base} of {assigned.partition.hex()}"
        _require(partition.is_external and assigned.count >= 1, where)
        expected = ends.get(assigned.partition, assigned.base)
        _require(assigned.base == expected, f"{where} does not follow the one before it")
        ends[assigned.partition] = Offset(assigned.base + assigned.count)
    for pid, end in ends.items():
        partition = state.partition(pid)
        assert partition is not None  # checked above
        _require(partition.next_offset == end, f"assignments of {pid.hex()} end before its next offset")
