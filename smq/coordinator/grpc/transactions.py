"""The transaction part of the Admin service: list, describe, abort, and the apps of CommitBatch.

Owns no state: each answer is read from the replicated state after a barrier, and the id's coordinator aborts.
`grpc.admin` extends it.
"""

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.grpc.service import Context, Service, deadline_ms, guarded
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.transactions import open_ms, state_name
from smq.coordinator.service.turns import Turns
from smq.coordinator.transactions import Transactions, producer_of
from smq.raft_state.cluster_config import offsets_retention_ms
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import split_partition_id
from smq.raft_state.state import AppState, ClusterState, TransactionOutcome, TransactionPhase, TransactionState


class TransactionAdmin(Service, smq_pb2_grpc.AdminServicer):
    _calls: NodeCalls
    _groups: GroupCoordinator

    @guarded
    async def ListTransactions(
        self, request: pb.ListTransactionsRequest, context: Context
    ) -> pb.ListTransactionsResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        state = self._calls.node.state
        found = [transaction for _, transaction in sorted(state.transactions.items())]
        return pb.ListTransactionsResponse(transactions=[_summary(state, t) async for t in Turns().over(found)])

    @guarded
    async def DescribeTransaction(
        self, request: pb.DescribeTransactionRequest, context: Context
    ) -> pb.DescribeTransactionResponse:
        transaction = await self._find(request.transactional_id, deadline_ms(request.timeout_ms, context))
        state = self._calls.node.state
        slot = coordinator_of(state, transaction.transactional_id)
        out = pb.DescribeTransactionResponse(
            transaction=_summary(state, transaction),
            coordinator=slot.node if slot.node else None,
            groups=sorted(transaction.offsets),
        )
        for pid in sorted(transaction.partitions):
            topic_id, index = split_partition_id(pid)
            out.partitions.append(pb.TopicPartition(topic=state.topic_names.get(topic_id, ""), partition=index))
        return out

    @guarded
    async def AbortTransaction(
        self, request: pb.AbortTransactionRequest, context: Context
    ) -> pb.AbortTransactionResponse:
        """A repetition finds the transaction aborted, and is answered as the first."""
        timeout_ms = deadline_ms(request.timeout_ms, context)
        transaction = await self._find(request.transactional_id, timeout_ms)
        if transaction.phase is not TransactionPhase.ONGOING:
            if transaction.outcome is TransactionOutcome.ABORTED:
                return pb.AbortTransactionResponse()
            name = transaction.transactional_id
            raise SmqError(ErrorCode.INVALID_TRANSACTION_STATE, f"transactional id {name!r} has no open transaction")
        await Transactions(self._calls, self._groups).abort(producer_of(transaction), timeout_ms)
        return pb.AbortTransactionResponse()

    @guarded
    async def ListApps(self, request: pb.ListAppsRequest, context: Context) -> pb.ListAppsResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        state = self._calls.node.state
        apps = sorted(state.apps.items())
        return pb.ListAppsResponse(apps=[_app(state, name, app) async for name, app in Turns().over(apps)])

    async def _find(self, name: str, timeout_ms: int) -> TransactionState:
        await self._calls.barrier(timeout_ms)
        transaction = self._calls.node.state.transactions.get(name)
        if transaction is None:
            raise SmqError(ErrorCode.UNKNOWN_TRANSACTIONAL_ID, f"there is no transactional id {name!r}")
        return transaction


def _app(state: ClusterState, name: str, app: AppState) -> pb.App:
    idle_ms, retention_ms = state.expiry_clock_ms - app.used_ms, offsets_retention_ms(state.config)
    return pb.App(
        app=name,
        batch_id=app.batch_id,
        idle_ms=idle_ms,
        expires_ms=max(retention_ms - idle_ms, 0) if retention_ms else None,
    )


def _summary(state: ClusterState, transaction: TransactionState) -> pb.TransactionSummary:
    return pb.TransactionSummary(
        transactional_id=transaction.transactional_id,
        state=state_name(transaction),
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        transaction_timeout_ms=transaction.timeout_ms,
        open_ms=open_ms(state, transaction),
    )
