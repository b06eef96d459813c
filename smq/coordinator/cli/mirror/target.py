"""This cluster as a mirror writes to it: batches at their own offsets, sent again until they are there.

Owns the retries, which are safe because the same batch again is the same. All of `smq mirror` imports it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

import grpc

from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.errors import error_from_detail, error_from_rpc
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError

PATIENCE_MS: Final = 60_000.0  # several elections; then the caller looks at everything again
ANSWER_S: Final = 40.0  # of a node that hangs
STREAMS_MAX: Final = 8  # per mirror; a node takes 16 from one connection


class Target:
    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._streams = asyncio.Semaphore(STREAMS_MAX)

    async def append(self, topic: str, partition: int, batches: Sequence[bytes]) -> None:
        """Returns when a majority has them all. Raises an SmqError that sending them again does not help against, or
        the last one after a while."""
        left, began, attempt = list(batches), now_ms(), 0
        while left:
            attempt += 1
            done, error = await self._send(topic, partition, left)
            left = left[done:]
            if error is None:
                continue
            if not error.code.is_retriable or now_ms() - began > PATIENCE_MS:
                raise error
            backoff = self._cluster.backoff
            await asyncio.sleep(backoff.delay_ms(attempt, self._cluster.random, error.details.retry_after_ms) / 1_000)
            try:
                await self._cluster.refresh((topic,))
            except SmqError:
                pass  # the next attempt meets the same error

    async def _send(self, topic: str, partition: int, batches: list[bytes]) -> tuple[int, SmqError | None]:
        """How many of the batches are there, and why the next one is not."""
        address = self._cluster.metadata.leader_address(topic, partition)
        if address is None:
            return 0, SmqError(ErrorCode.LEADER_UNAVAILABLE, f"{topic}/{partition} has no leader")

        async def requests() -> AsyncIterator[pb.PublishRecordRequest]:
            for i, batch in enumerate(batches):
                yield pb.PublishRecordRequest(topic=topic, partition=partition, correlation_id=i, batch=batch)

        answers: dict[int, pb.PublishRecordResponse] = {}
        lost = SmqError(ErrorCode.TIMED_OUT, f"the node at {address} has not answered")
        async with self._streams:
            try:
                async with asyncio.timeout(ANSWER_S):
                    async for answer in self._cluster.channels.node(address).agent.MirrorRecord(requests()):
                        answers[answer.correlation_id] = answer
            except grpc.RpcError as e:
                lost = error_from_rpc(e, address)
            except TimeoutError:
                pass
        for i in range(len(batches)):
            found = answers.get(i)
            if found is None:
                return i, lost
            if found.HasField("error"):
                return i, error_from_detail(found.error)
        return len(batches), None
