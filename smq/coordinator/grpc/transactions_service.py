"""The Transactions service: producers with a transactional id.

Owns the checks of the requests' fields; `service.transactions` owns the way to commands. Batches of a transaction
come by PublishRecord. Only the composition root imports it.
"""

from typing import TypeAlias

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.groups.coordinator import NO_MEMBER, GroupCoordinator
from smq.coordinator.grpc.required import check_fields, check_required, member_of
from smq.coordinator.grpc.service import Context, Service, deadline_ms, guarded, offset_commits, request_id_of
from smq.coordinator.limits import COMMIT_ITEMS_MAX
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.name_lookup import confirm_unknown, find_partition
from smq.coordinator.service.request_checks import check_count, check_group
from smq.coordinator.service.transactions import Producer, Transactions, includes
from smq.raft_state.commands import NO_FINGERPRINT, NO_GENERATION, CommitBatch, Fingerprint, StagedTransaction
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.limits import (
    BATCH_TRANSACTIONS_MAX,
    DIGEST_BYTES_MAX,
    PRODUCER_EPOCH_RETIRED,
    TRANSACTION_PARTITIONS_MAX,
)
from smq.replication.api import NodeApi

_Named: TypeAlias = (  # each names its producer by three fields
    pb.StartProducerRequest
    | pb.AddToTransactionRequest
    | pb.StageOffsetsRequest
    | pb.EndTransactionRequest
    | pb.StagedTransaction
)


class ProducerService(Service, smq_pb2_grpc.TransactionsServicer):
    def __init__(self, node: NodeApi, groups: GroupCoordinator) -> None:
        self.audience = Audience(node=node)
        self._calls = NodeCalls(node)
        self._transactions = Transactions(self._calls, groups)

    @guarded
    async def StartProducer(self, request: pb.StartProducerRequest, context: Context) -> pb.StartProducerResponse:
        producer = Producer(transactional_id=request.transactional_id)
        if request.HasField("producer_id") or request.HasField("producer_epoch"):
            check_fields(request, ("producer_id", "producer_epoch"))
            producer = _producer_of(request)
        timeout_ms = deadline_ms(request.timeout_ms, context)
        started = await self._transactions.start(
            producer, request.transaction_timeout_ms, timeout_ms, is_temporary=request.temporary
        )
        return pb.StartProducerResponse(producer_id=started.producer_id, producer_epoch=started.producer_epoch)

    @guarded
    async def AddToTransaction(
        self, request: pb.AddToTransactionRequest, context: Context
    ) -> pb.AddToTransactionResponse:
        check_count("partitions and groups", [*request.partitions, *request.groups], TRANSACTION_PARTITIONS_MAX)
        producer, timeout_ms = _producer_of(request), deadline_ms(request.timeout_ms, context)
        places = [await find_partition(self._calls, p.topic, p.partition, timeout_ms) for p in request.partitions]
        pids = tuple(place.pid for place in places)
        await self._transactions.add(producer, timeout_ms, partitions=pids, groups=tuple(request.groups))
        return pb.AddToTransactionResponse()

    @guarded
    async def StageOffsets(self, request: pb.StageOffsetsRequest, context: Context) -> pb.StageOffsetsResponse:
        check_count("offsets", request.offsets, COMMIT_ITEMS_MAX)
        check_group(request.group)
        producer, timeout_ms = _producer_of(request), deadline_ms(request.timeout_ms, context)
        items = await offset_commits(self._calls, request.offsets, timeout_ms)
        await confirm_unknown(self._calls, lambda state: includes(state, producer, request.group), timeout_ms)
        who, generation = member_of(request.member) if request.HasField("member") else (NO_MEMBER, NO_GENERATION)
        await self._transactions.stage(producer, request.group, items, timeout_ms, who=who, generation=generation)
        return pb.StageOffsetsResponse()

    @guarded
    async def EndTransaction(self, request: pb.EndTransactionRequest, context: Context) -> pb.EndTransactionResponse:
        timeout_ms = deadline_ms(request.timeout_ms, context)
        await self._transactions.end(_producer_of(request), timeout_ms, is_commit=request.commit)
        return pb.EndTransactionResponse()

    @guarded
    async def CommitBatch(self, request: pb.CommitBatchRequest, context: Context) -> pb.CommitBatchResponse:
        check_count("transactions", request.transactions, BATCH_TRANSACTIONS_MAX, is_empty_allowed=True)
        if request.batch_id and not request.app:
            raise SmqError(ErrorCode.INVALID_REQUEST, "a batch_id needs an app: without one it must be 0")
        staged = [_producer_of(transaction) for transaction in request.transactions]
        command = CommitBatch(
            request_id=request_id_of(request.request_id),
            app=request.app,
            batch_id=request.batch_id,
            transactions=tuple(
                StagedTransaction(
                    transactional_id=p.transactional_id, producer_id=p.producer_id, producer_epoch=p.producer_epoch
                )
                for p in staged
            ),
            fingerprint=_fingerprint_of(request),
        )
        committed = await self._transactions.commit_batch(command, deadline_ms(request.timeout_ms, context))
        return pb.CommitBatchResponse(replay=committed.is_replay)


def _fingerprint_of(request: pb.CommitBatchRequest) -> Fingerprint:
    """INVALID_REQUEST for one that no batch has."""
    if not request.HasField("fingerprint"):
        return NO_FINGERPRINT
    given = request.fingerprint
    check_required(given)
    if given.rows < 0 or len(given.digest) > DIGEST_BYTES_MAX:
        raise SmqError(
            ErrorCode.INVALID_REQUEST,
            f"a fingerprint has at least 0 rows and at most {DIGEST_BYTES_MAX} bytes, not {given.rows} and"
            f" {len(given.digest)}",
        )
    return Fingerprint(given.rows, given.digest)


def _producer_of(request: _Named) -> Producer:
    """INVALID_REQUEST for numbers that no producer has."""
    if request.producer_id < 0 or not 0 <= request.producer_epoch < PRODUCER_EPOCH_RETIRED:
        raise SmqError(
            ErrorCode.INVALID_REQUEST,
            f"producer_id {request.producer_id} and producer_epoch {request.producer_epoch} are not from StartProducer",
        )
    return Producer(
        transactional_id=request.transactional_id,
        producer_id=ProducerId(request.producer_id),
        producer_epoch=ProducerEpoch(request.producer_epoch),
    )
