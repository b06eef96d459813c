"""Blocking calls to the Transactions service: the start of a task's producer, its partitions, its end, and the commit.

Owns the requests. `cluster_calls` owns retries and finds the coordinator; every call may be repeated.
"""

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from smq.clients.pb import smq_pb2 as pb
from smq.spark_connector.cluster_calls import Cluster
from smq.spark_connector.read_bounds import PartitionKey

CALL_TIMEOUT_S: Final = 10.0  # of one attempt, at one node


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """The producer of one attempt of a task, with its transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


def start(cluster: Cluster, transactional_id: str, transaction_timeout_ms: int, *, is_temporary: bool) -> Producer:
    """Fences every earlier producer of this id, and aborts what it has staged."""
    request = pb.StartProducerRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=transaction_timeout_ms,
        temporary=is_temporary,
        timeout_ms=_node_ms(),
    )
    answer = cluster.ask(lambda at: cluster.transactions(at).StartProducer(request, timeout=CALL_TIMEOUT_S))
    return Producer(
        transactional_id=transactional_id, producer_id=answer.producer_id, producer_epoch=answer.producer_epoch
    )


def add_partitions(cluster: Cluster, producer: Producer, partitions: Iterable[PartitionKey]) -> None:
    request = pb.AddToTransactionRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        partitions=[pb.TopicPartition(topic=topic, partition=partition) for topic, partition in partitions],
        timeout_ms=_node_ms(),
    )
    cluster.ask(lambda at: cluster.transactions(at).AddToTransaction(request, timeout=CALL_TIMEOUT_S))


def abort(cluster: Cluster, producer: Producer, timeout_s: float) -> None:
    request = pb.EndTransactionRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        commit=False,
        timeout_ms=_node_ms(),
    )
    cluster.ask(lambda at: cluster.transactions(at).EndTransaction(request, timeout=CALL_TIMEOUT_S), timeout_s)


def abort_of_dead(cluster: Cluster, transactional_id: str, timeout_s: float) -> None:
    """What the present producer of this id has staged; it is fenced, too. A call that arrives late does not end the
    transaction of the next one, of the next batch, because it names the producer."""
    wanted = pb.DescribeTransactionRequest(transactional_id=transactional_id, timeout_ms=_node_ms())
    answer = cluster.ask(lambda at: cluster.admin(at).DescribeTransaction(wanted, timeout=CALL_TIMEOUT_S), timeout_s)
    request = pb.AbortTransactionRequest(
        transactional_id=transactional_id,
        producer_id=answer.transaction.producer_id,
        producer_epoch=answer.transaction.producer_epoch,
        timeout_ms=_node_ms(),
    )
    cluster.ask(lambda at: cluster.admin(at).AbortTransaction(request, timeout=CALL_TIMEOUT_S), timeout_s)


def commit_batch(
    cluster: Cluster, app: str, batch_id: int, producers: Collection[Producer], fingerprint: pb.Fingerprint | None
) -> bool:
    """Whether it was committed now. False: it had been committed before, and what was staged again is dropped.
    BATCH_DIFFERS if the batch that was committed under this number had other rows."""
    request = pb.CommitBatchRequest(
        app=app,
        batch_id=batch_id,
        transactions=[
            pb.StagedTransaction(
                transactional_id=p.transactional_id, producer_id=p.producer_id, producer_epoch=p.producer_epoch
            )
            for p in producers
        ],
        fingerprint=fingerprint,
        request_id=uuid.uuid4().bytes,
        timeout_ms=_node_ms(),
    )
    answer = cluster.ask(lambda at: cluster.transactions(at).CommitBatch(request, timeout=CALL_TIMEOUT_S))
    return not answer.replay


def _node_ms() -> int:
    """A little less than the call has, so that the node's own answer arrives."""
    return int(CALL_TIMEOUT_S * 900)
