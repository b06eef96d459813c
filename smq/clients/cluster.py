"""The cluster as all clients use it: channels, metadata, and calls that are retried.

Owns the I/O around `metadata` and `retry`. It must never decide by itself whether an error may be retried. Only
`smq.clients` and `smq mirror` import it.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

import grpc

from smq.clients.arguments import Duration, check_kind, milliseconds
from smq.clients.channels import Channels, NodeStubs
from smq.clients.errors import build, error_from_rpc
from smq.clients.forked import check_owner
from smq.clients.login import Login, login_from_environment
from smq.clients.metadata import Metadata, Servers, parse_bootstrap, view_from_message
from smq.clients.pb import smq_pb2 as pb
from smq.clients.retry import Backoff, RandomFn, Step, decide_call, of_partition
from smq.clients.tls import Tls, tls_from_environment
from smq.raft_state.errors import ErrorCode, SmqError

T = TypeVar("T")

ATTEMPT_TIMEOUT_MS: Final = 10_000.0  # one node's share of a call's time, so that a hanging node does not use it all
VIEW_TIMEOUT_MS: Final = 2_000.0  # a cluster view comes from a node's memory
CONNECT_TIMEOUT_MS: Final = 10_000.0
CONNECT_GRACE_MS: Final = 1_000.0  # for the error of the last attempt, which names the reason
DEADLINE_GRACE_MS: Final = 500.0  # so that the node's own typed answer at its deadline arrives before gRPC's

# run(node, node_ms, call_s): one attempt; the node gives up after node_ms, the call itself a little later
CallFn = Callable[[NodeStubs, int, float], Awaitable[T]]


def now_ms() -> float:
    return time.monotonic() * 1000.0


class ClusterClient:
    """Shared by all kinds of clients. Everything runs on the event loop on which it is first used."""

    def __init__(
        self,
        bootstrap: Servers | None,
        *,
        servers: Servers | None = None,
        connect_timeout_ms: Duration = CONNECT_TIMEOUT_MS,
        backoff: Backoff | None = None,
        random_source: RandomFn = random.random,
        tls: Tls | None = None,
        login: Login | None = None,
    ) -> None:
        self._connect_timeout_ms = milliseconds("connect_timeout_ms", connect_timeout_ms)
        if tls is not None:
            check_kind("tls", tls, Tls)
        if login is not None:
            check_kind("login", login, Login)
        self.metadata = Metadata(parse_bootstrap(bootstrap, servers))
        self.channels = Channels(tls or tls_from_environment(), login or login_from_environment())
        self._pid = os.getpid()
        self.backoff = backoff or Backoff()
        self.random = random_source
        self._is_closed = False

    async def start(self) -> None:
        """Finds the cluster. UNREACHABLE if none of the addresses answers in time."""
        self.check_usable()
        timeout_ms = self._connect_timeout_ms
        try:
            async with asyncio.timeout((timeout_ms + CONNECT_GRACE_MS) / 1000.0):  # whatever gRPC does meanwhile
                await self.refresh((), timeout_ms=timeout_ms)
        except (TimeoutError, SmqError) as e:
            if isinstance(e, SmqError) and e.code is not ErrorCode.TIMED_OUT:
                raise
            message = f"no node answered at {', '.join(self.any_node())} within {timeout_ms:.0f} ms"
            reason = f" ({e.message})" if isinstance(e, SmqError) else ""
            raise SmqError(ErrorCode.UNREACHABLE, message + reason) from e

    def check_usable(self) -> None:
        """CLIENT_CLOSED after close(), FORKED in another process than the one that made the client."""
        check_owner(self._pid)
        if self._is_closed:
            raise SmqError(ErrorCode.CLIENT_CLOSED, "the client is closed")

    async def close(self) -> None:
        """Calls that wait end with the error of their last attempt."""
        self._is_closed = True
        await self.channels.close()

    async def refresh(self, topics: Collection[str], *, timeout_ms: float = VIEW_TIMEOUT_MS) -> frozenset[str]:
        """Fetches a view (of all topics if none is named). Returns the named topics that certainly do not exist.

        A lagging node may miss a new topic, so only a linearizable view counts as proof that a topic is missing."""
        seen = await self._view(topics, timeout_ms, linearizable=False)
        missing = frozenset(topics) - seen
        if missing:
            missing -= await self._view(topics, max(timeout_ms, VIEW_TIMEOUT_MS * 2), linearizable=True)
        for topic in missing:
            self.metadata.forget_topic(topic)
        return missing

    async def _view(self, topics: Collection[str], timeout_ms: float, *, linearizable: bool) -> frozenset[str]:
        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.DescribeClusterResponse:
            request = build(pb.DescribeClusterRequest, topics=topics, linearizable=linearizable, timeout_ms=node_ms)
            return await node.admin.DescribeCluster(request, timeout=call_s)

        try:
            message = await self.call(run, timeout_ms=timeout_ms, attempt_ms=VIEW_TIMEOUT_MS)
        except SmqError as e:
            if e.code is ErrorCode.UNKNOWN_TOPIC and len(topics) == 1:
                return frozenset()
            if e.code is ErrorCode.UNKNOWN_TOPIC and topics:  # one of them: a view of all topics shows which
                return await self._view((), timeout_ms, linearizable=linearizable)
            raise
        self.metadata.update(view_from_message(message))
        self.metadata.trust(t.name for t in message.topics)
        return frozenset(t.name for t in message.topics)

    def any_node(self) -> list[str]:
        return self.metadata.all_addresses(now_ms())

    async def call(
        self,
        run: CallFn[T],
        *,
        timeout_ms: float,
        candidates: Callable[[], list[str]] | None = None,
        is_repeatable: bool = True,
        attempt_ms: float = ATTEMPT_TIMEOUT_MS,
        topics: Collection[str] = (),
        follows_hints: bool = True,
    ) -> T:
        """Runs one logical call to success, at any node that serves it, within `timeout_ms`.

        `candidates` lists addresses, best first (default: any node); it is called again for every attempt.
        `topics` are refreshed if an error says that our metadata is out of date. `follows_hints`: an error that names
        the node to ask sends the next attempt there, whatever the candidates are.
        """
        self.check_usable()
        started, attempt, hint = now_ms(), 0, None
        while True:
            attempt += 1
            addresses = [hint] if hint else (candidates or self.any_node)()
            left_ms = timeout_ms - (now_ms() - started)
            if addresses:
                node_ms = max(min(left_ms, attempt_ms), 1.0)
                outcome = await self.attempt(run, addresses[0], node_ms)
                if not isinstance(outcome, SmqError):
                    return outcome[0]
                error, hint = outcome, outcome.details.leader_address if follows_hints else None
            else:
                error, hint = _no_node_error(topics), None
            decision = decide_call(
                error,
                attempt=attempt,
                elapsed_ms=now_ms() - started,
                timeout_ms=timeout_ms,
                is_repeatable=is_repeatable,
                backoff=self.backoff,
                random=self.random,
            )
            if decision.step is Step.GIVE_UP:
                raise of_partition(error) if topics else error
            if decision.wait_ms:
                await asyncio.sleep(decision.wait_ms / 1000.0)
            if self._is_closed:
                raise error
            if decision.step is Step.REFRESH and topics:
                hint = None
                await self._refresh_quietly(topics)

    async def call_replica(
        self, run: CallFn[T], topic: str, partition: int, *, only_node: int | None, timeout_ms: float
    ) -> T:
        """`call`, at a node with a copy of the partition, best its leader; or at `only_node`, and at no other."""
        if self.metadata.partition(topic, partition) is None:
            await self.refresh((topic,), timeout_ms=timeout_ms)

        def candidates() -> list[str]:
            if only_node is not None:
                return [a for a in [self.metadata.address(only_node)] if a]
            return self.metadata.replica_addresses(topic, partition, now_ms()) or self.any_node()

        return await self.call(
            run, timeout_ms=timeout_ms, candidates=candidates, topics=(topic,), follows_hints=only_node is None
        )

    async def attempt(self, run: CallFn[T], address: str, node_ms: float) -> tuple[T] | SmqError:
        """One attempt at one node: its answer, or the error (`run` may raise an SmqError from the answer)."""
        self.check_usable()
        node = self.channels.node(address)
        try:
            async with asyncio.timeout((node_ms + DEADLINE_GRACE_MS) / 1000.0):
                await node.log_in()
            answer = await run(node, int(node_ms), (node_ms + DEADLINE_GRACE_MS) / 1000.0)
        except (grpc.RpcError, SmqError, TimeoutError) as e:
            error = _error_of(e, address)
            if error.code is ErrorCode.LOGIN_NEEDED:
                return _without_token(error, node)
            if error.code.is_retriable and not error.details.leader_address:
                self.metadata.node_failed(address, now_ms())
            return error
        self.metadata.node_answered(address)
        return (answer,)

    async def _refresh_quietly(self, topics: Collection[str]) -> None:
        try:
            await self.refresh(topics)
        except SmqError:
            pass  # the next attempt meets the same error and reports it within its own deadline


def _without_token(error: SmqError, node: NodeStubs) -> SmqError:
    """The next attempt logs in again, if there is a user."""
    if node.token is None:
        message = f"the node at {node.address} asks for a user: give a login (`smq login`)"
        return SmqError(ErrorCode.AUTHENTICATION_FAILED, message)
    node.token.forget()
    return error


def _error_of(failure: grpc.RpcError | SmqError | TimeoutError, address: str) -> SmqError:
    if isinstance(failure, TimeoutError):
        return SmqError(ErrorCode.UNREACHABLE, f"the node at {address} did not log the user in in time")
    return failure if isinstance(failure, SmqError) else error_from_rpc(failure, address)


def _no_node_error(topics: Collection[str]) -> SmqError:
    names = ", ".join(topics)
    return SmqError(ErrorCode.LEADER_UNAVAILABLE, f"no node is known to serve {names or 'this'} now")
