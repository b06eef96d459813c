"""Fetches the raw batches of one range, from any replica that has them, and proves that none is missing.

Owns failover in the middle of a task, and the check that every offset of the range has arrived. One request is always
under way while the batches of the previous one are decoded, so a task holds at most two answers.
"""

import logging
from collections.abc import Iterator
from typing import Any, Final

import grpc

from smq.clients.errors import error_from_detail
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import BatchCorrupt, check_crc, parse_header
from smq.spark_connector.cluster_calls import FETCH_TIMEOUT_S, GONE, Cluster, Retries, as_smq_error
from smq.spark_connector.decode import RawBatch
from smq.spark_connector.errors import OptionError, report_loss
from smq.spark_connector.planning import Range

log = logging.getLogger(__name__)

FETCH_BYTES: Final = 4 << 20  # per request; with two of them in flight, larger ones read no faster
FETCH_WAIT_MS: Final = 500  # how long a replica may wait for a high water mark that it has not applied yet


class RangeFetcher:
    """Iterates over the batches that hold [lo, hi) of one partition; the first and the last may reach beyond."""

    def __init__(self, cluster: Cluster, wanted: Range, *, fail_on_data_loss: bool) -> None:
        self._cluster = cluster
        self._range = wanted
        self._fail_on_data_loss = fail_on_data_loss
        self._topic_id = bytes.fromhex(wanted.topic_id)
        self._position = wanted.lo
        self._replicas = cluster.failed_last(wanted.replicas)
        self._tried = 0  # replicas that failed since the last progress
        self._retries = Retries(cluster.retry_timeout_s)

    def __iter__(self) -> Iterator[RawBatch]:
        if not self._replicas:
            self._look_up_replicas()
        pending = self._request()
        try:
            while pending is not None:
                batches = self._take(pending)
                pending = self._request()
                yield from batches
        finally:
            if pending is not None:
                pending.cancel()

    def _request(self) -> Any:
        """Starts the call for the next batches; None at the end of the range."""
        if self._position >= self._range.hi:
            return None
        request = pb.FetchRequest(max_wait_ms=FETCH_WAIT_MS, max_bytes=FETCH_BYTES)
        request.partitions.add(
            topic=self._range.topic,
            topic_id=self._topic_id,
            partition=self._range.partition,
            offset=self._position,
            max_bytes=FETCH_BYTES,
        )
        return self._cluster.broker(self._replicas[0]).Fetch.future(request, timeout=FETCH_TIMEOUT_S)

    def _take(self, pending: Any) -> list[RawBatch]:
        """The batches of one answer; moves the position past them, or to another replica."""
        address = self._replicas[0]
        try:
            answer = pending.result()
            part = answer.partitions[0]
            if part.HasField("error"):
                raise error_from_detail(part.error)
            stored = [b for b in part.batches if b.last_offset >= self._position]
            batches = [self._checked(b) for b in stored if b.data]  # without data: nothing to read
        except (grpc.RpcError, SmqError) as e:
            self._failed(address, as_smq_error(e, address))
            return []
        if not stored:
            self._next_replica()
            return []
        self._follow(stored, part.log_start)
        self._retries.reset()
        self._tried = 0
        return batches

    def _checked(self, batch: pb.Batch) -> RawBatch:
        data = batch.data  # each access to the field makes a copy
        try:
            header = parse_header(data)
            check_crc(data, header)
        except BatchCorrupt as e:
            raise SmqError(ErrorCode.DATA_DAMAGED, f"the batch at {batch.base_offset} of {self._range}: {e}") from e
        return RawBatch(header=header, data=data, ts_ns=batch.ts_ns)

    def _follow(self, batches: list[pb.Batch], log_start: int) -> None:
        """Moves the position over `batches`, which must leave no gap."""
        for batch in batches:
            if batch.base_offset > self._position and self._position < self._range.hi:
                reason = f"the log now starts at {log_start}" if log_start > self._position else "the log has a gap"
                self._lost(self._position, min(batch.base_offset, self._range.hi), reason)
            self._position = max(self._position, batch.last_offset + 1)

    def _failed(self, address: str, error: SmqError) -> None:
        if error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
            lo = error.details.lo
            if lo is not None and lo > self._position:
                self._lost(self._position, min(lo, self._range.hi), f"the log now starts at {lo}")
                self._position = lo
                return
        elif error.code in GONE:
            # A replica may not know a new topic yet; the linearizable layout does.
            self._look_up_replicas()
            if self._position >= self._range.hi:
                return
        elif not error.code.is_retriable:
            raise error
        log.warning("%s at %d: %s failed (%s), trying another replica", self._range, self._position, address, error)
        self._retries.record(address, error)
        self._cluster.failed(address)
        self._next_replica()

    def _lost(self, lo: int, hi: int, reason: str) -> None:
        message = f"offsets [{lo}, {hi}) of {self._range.topic}-{self._range.partition} are gone: {reason}"
        report_loss(message, fail=self._fail_on_data_loss)

    def _next_replica(self) -> None:
        """Switches to another replica; after all of them have failed, waits and looks them up again."""
        self._replicas.append(self._replicas.pop(0))
        self._tried += 1
        if self._tried >= len(self._replicas):
            self._tried = 0
            self._retries.pause(f"{self._range} could not be read from offset {self._position} on")
            self._look_up_replicas()

    def _look_up_replicas(self) -> None:
        view = self._cluster.layout().views.get((self._range.topic, self._range.partition))
        if view is None or view.topic_id != self._range.topic_id:
            reason = "the topic or the partition is gone" if view is None else "the topic was deleted and created again"
            self._lost(self._position, self._range.hi, reason)
            self._position = self._range.hi
        elif view.replicas:
            self._replicas = self._cluster.failed_last(view.replicas)
        elif not self._replicas:
            raise OptionError(f"no replica of {self._range} has a gRPC address: set it in the nodes' configuration")
