"""One client's connection: frames in, responses out in the order of the requests, under bounds.

Owns the buffer of what has arrived, the headers of requests and responses, the queue of answers under way, and when
reading stops. The node stops reading a client that has too many bytes or requests in flight, or that does not read its
answers. It decides nothing about data. Requests that change or read the state of a group or a topic run one after
another, as in Kafka. Produce and Fetch need not wait for each other, and no request waits until other members have
joined a group.
"""

import asyncio
import math
import struct
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import structlog

from smq.coordinator.config.certificate_users import CertificateUsers, NoUser, certificate_of
from smq.coordinator.kafka import metadata
from smq.coordinator.kafka.acts import ACTS, outcome
from smq.coordinator.kafka.api_keys import SERVED, ApiKey, is_header_flexible, request_decoder, response_encoder
from smq.coordinator.kafka.authorization import Access, Complete, Refusal, check
from smq.coordinator.kafka.codec import Budget, Buffer, CodecError, Struct, read_nullable_string, read_tags
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal
from smq.coordinator.kafka.fetch import records_bytes
from smq.coordinator.kafka.fetch_sessions import SessionRefusal
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.group_membership import Client
from smq.coordinator.kafka.handlers import HANDLERS, LONG_POLLS
from smq.coordinator.kafka.oversized import Oversized
from smq.coordinator.kafka.produce import ProduceCall
from smq.coordinator.kafka.sasl import Login, SaslMisuse
from smq.coordinator.limits import (
    KAFKA_FETCHES_PER_CONNECTION_MAX,
    KAFKA_FRAME_BYTES_PER_S_MIN,
    KAFKA_FRAME_S_MAX,
    KAFKA_IDLE_S_MAX,
    KAFKA_INFLIGHT_BYTES_PER_CONNECTION_MAX,
    KAFKA_INFLIGHT_PER_CONNECTION_MAX,
    KAFKA_LARGE_REQUEST_BYTES,
    KAFKA_STUCK_FULL_S_MAX,
    KAFKA_STUCK_S_MAX,
    LOGIN_FAILED_DELAY_S,
    LOGIN_FAILED_LINGER_S,
    LOGIN_S_MAX,
    SASL_REQUEST_BYTES_MAX,
)
from smq.coordinator.service.audit import Sender
from smq.coordinator.service.quotas import ANONYMOUS, WINDOW_S, Allowance
from smq.coordinator.service.users import FAILED_LOGINS
from smq.raft_state.handlers.quotas import Key
from smq.replication.monitoring.measures import LATER_MAX
from smq.replication.net.listening import plain_host

log = structlog.get_logger(__name__)

_SIZE_BYTES: Final = 4
_LOGIN_KEYS: Final = (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)
# From this version on a request that makes or deletes too many partitions is refused (KIP-599); before, it is done, and
# its client waits. So it is with topics that are created by use.
_STRICT_VERSIONS: Final = {ApiKey.CREATE_TOPICS: 6, ApiKey.DELETE_TOPICS: 5, ApiKey.CREATE_PARTITIONS: 3}
_MUTATING: Final = frozenset({*_STRICT_VERSIONS, ApiKey.METADATA})
_INT32_MAX: Final = 2**31 - 1
_NS_PER_PERCENT: Final = 10**7  # of a second
_HEADER: Final = struct.Struct(">hhi")  # key, version, correlation id; a nullable string follows
_RESPONSE_HEADER: Final = struct.Struct(">ii")  # size, correlation id


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class Request:
    """`body` is None if the version of ApiVersions is unknown: the answer then names the known ones."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body: Struct | None


def parse_request(frame: memoryview) -> Request:
    """CodecError for a request that is not served: its sender might not be able to read any answer."""
    if len(frame) < _HEADER.size:
        raise CodecError(f"a request has at least {_HEADER.size} bytes, this has {len(frame)}")
    key, version, correlation_id = _HEADER.unpack_from(frame)
    row = SERVED.get(key)
    if row is None:
        raise CodecError(f"key {key} is not served")
    if version not in row.versions:
        if key == ApiKey.API_VERSIONS:
            return Request(key, version, correlation_id, "", None)
        raise CodecError(f"{row.name} is served in versions {row.versions.lo} to {row.versions.hi}, not {version}")
    client_id, position = _read_client(frame, _HEADER.size, is_flexible=is_header_flexible(key, version))
    return Request(key, version, correlation_id, client_id, request_decoder(key, version)(frame, position))


def _read_client(frame: memoryview, position: int, *, is_flexible: bool) -> tuple[str, int]:
    """The client's name, and the position after it and after the tags, of which none is known."""
    try:
        name, position = read_nullable_string(frame, position)
        if is_flexible:
            _, position = read_tags(frame, position, Budget())
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise CodecError(f"the header is cut or garbled: {e}") from e
    return name or "", position


def encode_response(request: Request, body: Struct) -> list[Buffer]:
    """The response as parts to be sent in this order."""
    version = request.version if request.body is not None else 0
    parts = response_encoder(request.key, version)(body)
    # The header of an ApiVersions response is never flexible: its reader does not know the node's versions yet.
    tags = b"\0" if request.key != ApiKey.API_VERSIONS and is_header_flexible(request.key, version) else b""
    size = 4 + len(tags) + sum(map(len, parts))
    return [_RESPONSE_HEADER.pack(size, request.correlation_id) + tags, *parts]


async def answer(gateway: Gateway, request: Request) -> Struct:
    """For every key but Produce and those of LONG_POLLS."""
    if request.body is None:
        return metadata.api_versions(KafkaError.UNSUPPORTED_VERSION)
    return await HANDLERS[request.key](gateway, request.version, request.body)


def begin(gateway: Gateway, request: Request, host: str) -> Awaitable[Struct]:
    """For those of LONG_POLLS. The request has begun when this returns; the awaitable is the answer."""
    assert request.body is not None, "only an ApiVersions of an unknown version has none"
    return LONG_POLLS[request.key](gateway, request.version, request.body, Client(request.client_id, f"/{host}"))


class _Work:
    """How long a request has the loop for itself, without its waits."""

    def __init__(self) -> None:
        self._spent_ns = 0
        self._since_ns = 0  # when the present stretch began; 0 between two

    def begin(self) -> None:
        self._since_ns = time.perf_counter_ns()

    def pause(self) -> None:
        self._spent_ns, self._since_ns = self.spent_ns, 0

    @property
    def spent_ns(self) -> int:
        return self._spent_ns + (time.perf_counter_ns() - self._since_ns if self._since_ns else 0)

    async def over(self, work: Coroutine[Any, Any, None]) -> None:
        await self._steps(work)

    @types.coroutine
    def _steps(self, work: Coroutine[Any, Any, None]) -> Generator[Any, None, None]:
        error: BaseException | None = None
        while True:
            self.begin()
            try:
                waits_for = work.send(None) if error is None else work.throw(error)
            except StopIteration:
                return
            finally:
                self.pause()
            try:
                error = None
                yield waits_for
            except BaseException as e:  # noqa: BLE001 - a cancellation, too, is the work's own to treat
                error = e


class _Slot:
    """The place of one answer in the queue. `size` is what it holds: the request's bytes, then the answer's.
    `is_counted`: it is one of the connection's fetches. `began_ns`: of a Produce request that is timed; 0 of others.
    `wait_s`: what the client has to wait after the answer. `work`: of a client with a quota of request time.
    `act` and `on`: of an administrative request."""

    __slots__ = ("act", "began_ns", "completes", "is_counted", "is_done", "on", "parts", "size", "wait_s", "work")

    def __init__(self, size: int) -> None:
        self.size = size
        self.began_ns = 0
        self.is_done = False
        self.is_counted = False
        self.wait_s = 0.0
        self.work: _Work | None = None
        self.act = ""
        self.on: list[str] | None = None
        self.parts: list[Buffer] | None = None  # None when done: the client wants no answer
        # What the user's rights and then the fetch session make of the answer.
        self.completes: tuple[Complete, ...] = ()


class Connection(asyncio.Protocol):
    """The listener makes it and calls `sweep` now and then, so that no connection needs a timer."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        on_open: Callable[["Connection"], None],
        on_close: Callable[["Connection"], None],
        login: Login | None = None,
        access_of: Callable[[str, str], Access] | None = None,
        certificate_users: CertificateUsers | None = None,
    ) -> None:
        """With a `login`, the client is served once it has proven its user, as far as that user's rights go: those of
        `access_of(user, host)`. With `certificate_users` its certificate, which the handshake has verified, says who it
        is."""
        self._gateway = gateway
        self._times = gateway.request_times.series(SERVED[ApiKey.PRODUCE].name)
        self._times_later = self._times.later
        self._timed_turns = gateway.timed_turns
        self._node_inflight = gateway.inflight
        self._quotas = gateway.quotas
        self._muted: asyncio.TimerHandle | None = None  # until its client may be read again
        self._on_open = on_open
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._peer = "?"
        self._chunks: deque[memoryview] = deque()
        self._buffered = 0
        self._slots: deque[_Slot] = deque()
        self._inflight_bytes = 0  # the sum of the rest, as the node counts it
        self._coming_bytes = 0  # of the request that has begun to arrive, in full
        self._large_bytes = 0  # the same, of a large one
        self._awaits_room = False  # for a large one
        self._oversized: Oversized | None = None
        self._unsent_bytes = 0  # of answers in the socket's buffer
        self._in_turn = asyncio.Lock()
        # Granted in the order of the requests, as the answers are sent: the first never waits for a later one.
        self._fetches = asyncio.Semaphore(KAFKA_FETCHES_PER_CONNECTION_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._login = login
        self._access_of = access_of
        self._certificate_users = certificate_users
        self._access: Access | None = None  # None on a listener that asks for no user: everything is allowed
        self._is_proving = False  # its user, or answering ApiVersions before: one request at a time
        self._is_reading = True
        self._is_writable = True
        self._frame_since: float | None = None  # when the first byte of an unfinished frame arrived
        self._active_at = self._unread_since = self._login_since = self._loop.time()

    # ------------------------------------------------------------------------------------------ the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but not the base
        peer = self._transport.get_extra_info("peername")
        self._peer = f"{plain_host(peer[0])}:{peer[1]}" if peer else "?"
        self._on_open(self)
        if self._certificate_users is not None and self._access_of is not None:
            try:
                user = self._certificate_users.user_of(certificate_of(self._transport))
            except NoUser as e:
                FAILED_LOGINS.warn("login_failed", purpose="Kafka", address=self._peer, reason=str(e))
                self._gateway.audit.refused(self._sender, "Connect", str(e))
                self.close()
                self._transport = None  # nothing is served any more, whatever has arrived
                return
            self._access = self._access_of(user, self._peer.rpartition(":")[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._chunks.clear()
        self._buffered = 0
        for slot in self._slots:
            if slot.on is not None and not slot.is_done:
                self._gateway.audit.acted(self._sender, slot.act, slot.on, None)
        self._slots.clear()
        if self._muted is not None:
            self._muted.cancel()
        self._node_inflight.forget(self._recheck)
        self._node_inflight.arriving.forget(self._on_room)
        self._end_arrival()
        self._account(-self._inflight_bytes)
        for task in self._tasks:
            task.cancel()
        self._on_close(self)

    def close(self, reason: str = "") -> None:
        if self._transport is not None:
            if reason:
                log.info("kafka_connection_closed", peer=self._peer, reason=reason)
            self._transport.abort()

    def eof_received(self) -> bool:
        return False  # a client that stops writing wants no answers either

    def pause_writing(self) -> None:
        self._is_writable = False
        self._unread_since = self._loop.time()
        self._set_reading()

    def resume_writing(self) -> None:
        self._is_writable = True
        unsent, self._unsent_bytes = self._unsent_bytes, 0
        self._account(-unsent)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._active_at = self._loop.time()
        self._chunks.append(memoryview(data))
        self._buffered += len(data)
        self._take_frames()

    def sweep(self, now: float) -> None:
        """Closes a client that is idle, does not complete a request, or does not read its answers."""
        frame_s_max = KAFKA_FRAME_S_MAX + self._coming_bytes / KAFKA_FRAME_BYTES_PER_S_MIN
        if self._frame_since is not None and self._is_reading and now - self._frame_since > frame_s_max:
            self.close(f"a request was not complete within {frame_s_max:.0f} s")
        elif not self._is_writable and now - self._unread_since > self._stuck_s_max:
            self.close(f"answers were not read for {self._stuck_s_max} s")
        elif not self._slots and now - self._active_at > KAFKA_IDLE_S_MAX:  # muted, too: it may be gone, unnoticed
            self.close(f"idle for {KAFKA_IDLE_S_MAX} s")
        elif self._login is not None and not self._login.is_open and now - self._login_since > LOGIN_S_MAX:
            self.close(f"no user was proven within {LOGIN_S_MAX} s")

    def check_user(self) -> None:
        """Closes the connection of a user that is gone, or has another password."""
        if self._login is not None and not self._login.is_valid():
            self.close("its user was deleted, or has another password")

    @property
    def _stuck_s_max(self) -> int:
        return KAFKA_STUCK_FULL_S_MAX if self._node_inflight.is_full else KAFKA_STUCK_S_MAX

    # ----------------------------------------------------------------------------------------------- requests
    @property
    def _has_capacity(self) -> bool:
        """A request that has begun to arrive is already counted in full: it may be completed on a full node."""
        return (
            self._is_writable
            and not self._is_proving
            and self._muted is None
            and not self._awaits_room
            and len(self._slots) < KAFKA_INFLIGHT_PER_CONNECTION_MAX
            and self._inflight_bytes - self._coming_bytes < KAFKA_INFLIGHT_BYTES_PER_CONNECTION_MAX
            and (self._coming_bytes > 0 or not self._node_inflight.is_full)
        )

    def _account(self, size: int) -> None:
        """Negative to give back."""
        self._inflight_bytes += size
        if size < 0:
            self._node_inflight.release(-size)
        else:
            self._node_inflight.take(size)

    def _recheck(self) -> None:
        """The node is no longer full."""
        self._loop.call_soon(self._take_frames)

    def _take_frames(self) -> None:
        """Starts the requests that have arrived, up to the bounds."""
        began_ns = 0
        if next(self._timed_turns):  # one reading of the clock for all that have arrived
            began_ns = time.monotonic_ns()
            if len(self._times_later) >= LATER_MAX:  # beyond it there are as many as requests in flight
                self._times.fold()
        try:
            while self._buffered and self._transport is not None and self._has_capacity:
                if (frame := self._next_frame()) is None:
                    break
                self._start(frame, began_ns)
        except (CodecError, SaslMisuse) as e:
            self.close(str(e))
            return
        if self._buffered == 0:
            self._frame_since = None
        elif self._frame_since is None or not self._is_reading:
            self._frame_since = self._loop.time()
        self._set_reading()

    def _next_frame(self) -> memoryview | None:
        """The next complete request without its size; None if it has not arrived yet."""
        if self._oversized is not None:
            return self._without_records(self._oversized)
        if self._buffered < _SIZE_BYTES:
            return None
        if len(self._chunks[0]) < _SIZE_BYTES:
            self._join_chunks()
        size = int.from_bytes(self._chunks[0][:_SIZE_BYTES], "big", signed=True)
        if size < 0:
            raise CodecError(f"a request of {size} bytes")
        if self._login is not None and not self._login.is_open and size > SASL_REQUEST_BYTES_MAX:
            raise CodecError(f"a request of {size} bytes before a user was proven")
        if size > self._gateway.request_bytes_max:
            self._chunks[0] = self._chunks[0][_SIZE_BYTES:]
            self._buffered -= _SIZE_BYTES
            self._oversized = Oversized(size)
            return self._without_records(self._oversized)
        end = _SIZE_BYTES + size
        if self._buffered < end:
            if not self._coming_bytes and not self._admits(end):
                return None
            self._account(end - self._coming_bytes)
            self._coming_bytes = end
            return None
        if len(self._chunks[0]) < end:
            self._join_chunks()
        data = self._chunks.popleft()
        if len(data) > end:
            self._chunks.appendleft(data[end:])
        self._buffered -= end
        self._frame_since = None
        return data[_SIZE_BYTES:end]

    def _without_records(self, oversized: Oversized) -> memoryview | None:
        """What is left of a request that is too large, once all of it has arrived."""
        while self._chunks and oversized.frame is None:
            chunk = self._chunks.popleft()
            used = oversized.feed(chunk)
            self._buffered -= used
            if used < len(chunk):
                self._chunks.appendleft(chunk[used:])
        return oversized.frame

    def _admits(self, size: int) -> bool:
        """Whether a request may arrive now. Large ones share a part of the node's bytes: however slowly they arrive,
        the rest is there for others."""
        if size <= KAFKA_LARGE_REQUEST_BYTES:
            return True
        arriving = self._node_inflight.arriving
        if arriving.try_acquire(size):
            self._large_bytes = size
            return True
        self._awaits_room = True
        arriving.notify_when_free(self._on_room)
        return False

    def _on_room(self) -> None:
        self._awaits_room = False
        self._recheck()

    def _end_arrival(self) -> None:
        if self._large_bytes:
            self._node_inflight.arriving.release(self._large_bytes)
            self._large_bytes = 0

    def _join_chunks(self) -> None:
        """Joins what has arrived: once per request that came in many pieces."""
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._chunks.append(memoryview(data))

    def _start(self, frame: memoryview, began_ns: int) -> None:
        is_login = self._login is not None and self._is_of_login(self._login, frame)
        request = parse_request(frame)
        slot = _Slot(len(frame))
        self._slots.append(slot)
        self._account(slot.size - self._coming_bytes)
        self._coming_bytes = 0
        if self._large_bytes:
            self._end_arrival()
        oversized, self._oversized = self._oversized, None
        if is_login and self._login is not None:
            self._is_proving = True
            self._run(self._prove(slot, request, self._login))
            return
        if request.key in ACTS and request.body is not None and not request.body.get("validate_only"):
            slot.act = SERVED[request.key].name
            slot.on = ACTS[request.key](request.body)  # now: later the request has only what its user may do
        if self._quotas.state().quotas:
            if self._allowance(Key.REQUESTS, request) is not None:
                slot.work = _Work()
            if request.key == ApiKey.PRODUCE:
                size = len(frame) if oversized is None else oversized.size
                self._throttle(slot, self._use(Key.PRODUCED, request, size))
        if request.key == ApiKey.PRODUCE and request.body is not None:
            if slot.work is not None:
                slot.work.begin()  # until the node has the batches; what it then does belongs to many requests
            if not self._may_begin(slot, request):
                return
            slot.began_ns = began_ns
            # Not closures: each variable that they share is one more object for the garbage collector, per request.
            respond, fail = partial(self._finish, slot, request), self._on_failed_without_answer
            oversize = oversized.size if oversized is not None else 0
            ProduceCall(self._gateway, request.version, respond, fail, oversize).start(request.body)
            if slot.work is not None:
                slot.work.pause()
            return
        work = self._serve(slot, request, began_ns or time.monotonic_ns())
        self._run(work if slot.work is None else slot.work.over(work))

    def _may_begin(self, slot: _Slot, request: Request) -> bool:
        """Whether a Produce request, or what is left of it, is done. If not, it is answered."""
        is_unanswered = request.body is not None and request.body["acks"] == 0
        try:
            self._judge(slot, request)
        except Refusal as e:
            self._note_refusal(request, "no right")
            if is_unanswered:
                self._on_failed_without_answer()
            else:
                self._finish(slot, request, e.answer)
            return False
        if is_unanswered and slot.completes:  # a part of it is refused, and only the end can say so
            self._on_failed_without_answer()
            return False
        return True

    def _judge(self, slot: _Slot, request: Request) -> None:
        """Leaves in the request what the user may do, or raises Refusal. When the request begins and not before: by
        its turn the user may have lost a right."""
        if self._access is not None and request.body is not None:  # without a body it asks for the versions
            complete = check(self._access, request.key, request.version, request.body)
            if complete is not None:
                slot.completes = (complete, *slot.completes)

    def _join_session(self, slot: _Slot, request: Request) -> None:
        """Makes a fetch of a session a whole one, or raises SessionRefusal."""
        shorten = self._gateway.fetch_sessions.begin(self._user, request.version, cast(Struct, request.body))
        if shorten is not None:
            slot.completes = (shorten,)

    # ------------------------------------------------------------------------------------------------- quotas
    @property
    def _user(self) -> str:
        """Empty if the port asks for none."""
        return self._access.user if self._access is not None else ""

    @property
    def _sender(self) -> Sender:
        address = self._peer.rpartition(":")[0]
        return Sender(user=self._user, address=address, port="kafka", listener=self._gateway.listener)

    def _note_refusal(self, request: Request, why: str) -> None:
        self._gateway.audit.refused(self._sender, SERVED[request.key].name, why)

    def _use(self, key: Key, request: Request, amount: float) -> float:
        return self._quotas.use(key, self._user or ANONYMOUS, request.client_id, amount)

    def _allowance(self, key: Key, request: Request) -> Allowance | None:
        return self._quotas.of(key, self._user or ANONYMOUS, request.client_id)

    def _throttle(self, slot: _Slot, wait_s: float) -> None:
        """The answer says how long the client has to wait, and until then nothing more is read from it (KIP-219)."""
        if not wait_s or self._transport is None:
            return
        slot.wait_s = max(slot.wait_s, wait_s)
        until = self._loop.time() + wait_s
        if self._muted is not None:
            if self._muted.when() >= until:
                return
            self._muted.cancel()
        self._muted = self._loop.call_at(until, self._unmute)
        self._set_reading()

    def _unmute(self) -> None:
        self._muted = None
        self._take_frames()

    def _limit_fetch(self, request: Request) -> None:
        """No answer is larger than what the quota allows in its window, if batches are not."""
        allowance = self._allowance(Key.CONSUMED, request)
        if allowance is not None and request.body is not None:
            request.body["max_bytes"] = min(request.body["max_bytes"], int(allowance.rate * WINDOW_S))

    def _gateway_for(self, slot: _Slot, request: Request) -> Gateway:
        """The connection's, or one by which the handler counts the partitions that it makes and deletes."""
        if request.key not in _MUTATING or self._allowance(Key.MUTATIONS, request) is None:
            return self._gateway
        return replace(self._gateway, mutate=partial(self._mutate, slot, request))

    def _mutate(self, slot: _Slot, request: Request, partitions: int) -> None:
        is_strict = request.version >= _STRICT_VERSIONS.get(cast(ApiKey, request.key), request.version + 1)
        wait_s = self._use(Key.MUTATIONS, request, 0 if is_strict else partitions)
        self._throttle(slot, wait_s)
        if is_strict and wait_s:
            message = f"the quota of partitions that are made or deleted is used up: try again in {wait_s:.1f} s"
            raise KafkaRefusal(KafkaError.THROTTLING_QUOTA_EXCEEDED, message)
        if is_strict:
            self._use(Key.MUTATIONS, request, partitions)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_of_login(self, login: Login, frame: memoryview) -> bool:
        """Whether the request is one by which a client proves its user. SaslMisuse for any other before that: it is not
        even parsed. Each request learns whether the user may still be here."""
        key = int.from_bytes(frame[:2], "big")
        if not login.is_valid():
            raise SaslMisuse("its user was deleted, or has another password")
        if login.is_open and key not in _LOGIN_KEYS:
            login.check_session(self._loop.time())
            if self._access is None:
                raise SaslMisuse("its user's rights are not known")
            return False
        if key not in _LOGIN_KEYS and not (key == ApiKey.API_VERSIONS and login.is_new):
            raise SaslMisuse(f"a request of key {key} before its user was proven")
        return True

    async def _prove(self, slot: _Slot, request: Request, login: Login) -> None:
        """Answers one request of a login. After a failure the answer is the connection's last."""
        try:
            if request.key == ApiKey.SASL_HANDSHAKE and request.body is not None:
                self._login_since = self._loop.time()
                body = login.handshake(request.body)
            elif request.key == ApiKey.SASL_AUTHENTICATE and request.body is not None:
                body = await login.authenticate(request.body, self._loop.time())
                if login.identity is not None and self._access is None and self._access_of is not None:
                    self._access = self._access_of(login.identity.user, self._peer.rpartition(":")[0])
            else:
                body = await answer(self._gateway, request)
            if reason := login.take_failure():
                FAILED_LOGINS.warn("login_failed", purpose="Kafka", address=self._peer, reason=reason)
                self._note_refusal(request, reason)
                await asyncio.sleep(LOGIN_FAILED_DELAY_S)
            self._is_proving = login.has_failed  # then nothing more is taken
            self._finish(slot, request, body)
        except SaslMisuse as e:
            self.close(str(e))
        except Exception as e:
            log.error("kafka_request_failed", key=request.key, version=request.version, exc_info=e)
            self.close("the request failed")
        else:
            if login.has_failed and self._transport is not None:
                self._transport.close()  # once it has sent the answer; what is still in the queue is dropped
                self._loop.call_later(LOGIN_FAILED_LINGER_S, self.close)

    def _on_failed_without_answer(self) -> None:
        self.close("a request without acknowledgements was refused or failed")

    async def _serve(self, slot: _Slot, request: Request, began_ns: int) -> None:
        try:
            try:
                body = await self._answer(slot, request)
            except (Refusal, SessionRefusal) as e:
                body = e.answer
                if isinstance(e, Refusal) and slot.on is None:
                    self._note_refusal(request, "no right")
            self._gateway.request_times.observe(time.monotonic_ns() - began_ns, SERVED[request.key].name)
            self._finish(slot, request, body)
        except Exception as e:
            log.error("kafka_request_failed", key=request.key, version=request.version, exc_info=e)
            self.close("the request failed")

    async def _answer(self, slot: _Slot, request: Request) -> Struct:
        """In its turn. Refusal, SessionRefusal."""
        if request.key == ApiKey.FETCH:
            await self._fetches.acquire()
            slot.is_counted = True
            self._join_session(slot, request)
            self._judge(slot, request)
            if not self._quotas.state().quotas:
                return await answer(self._gateway, request)
            self._limit_fetch(request)
            body = await answer(self._gateway, request)
            self._throttle(slot, self._use(Key.CONSUMED, request, records_bytes(body)))
            return body
        async with self._in_turn:
            self._judge(slot, request)
            if request.key not in LONG_POLLS:
                return await answer(self._gateway_for(slot, request), request)
            begun = begin(self._gateway, request, self._peer.rpartition(":")[0])
        return await begun

    # ---------------------------------------------------------------------------------------------- responses
    def _finish(self, slot: _Slot, request: Request, body: Struct | None) -> None:
        if slot.began_ns:
            self._times_later.append(time.monotonic_ns() - slot.began_ns)
        if self._transport is None:
            return
        if slot.work is not None:
            self._throttle(slot, self._use(Key.REQUESTS, request, slot.work.spent_ns / _NS_PER_PERCENT))
        if body is not None:
            if slot.wait_s:
                body = body | {"throttle_time_ms": min(math.ceil(slot.wait_s * 1000), _INT32_MAX)}
            for complete in slot.completes:
                body = complete(body)
        if slot.on is not None and body is not None:
            errors, refused, in_part = outcome(body)
            self._gateway.audit.acted(self._sender, slot.act, slot.on, errors, refused=refused, in_part=in_part)
        slot.parts = encode_response(request, body) if body is not None else None
        slot.is_done = True
        grown, slot.size = -slot.size, sum(map(len, slot.parts or ()))
        self._flush(grown + slot.size)

    def _flush(self, grown: int = 0) -> None:
        """Sends the answers that are ready, in the order of the requests, while the client reads. `grown`: what an
        answer has more bytes than its request had, which is yet to be counted."""
        out: list[Buffer] = []
        size = 0
        while self._slots and self._slots[0].is_done and self._is_writable:
            slot = self._slots.popleft()
            size += slot.size
            if slot.is_counted:
                self._fetches.release()
            if slot.parts is not None:
                out.extend(slot.parts)
        if out and self._transport is not None:
            self._transport.writelines(out)
        if self._is_writable:
            self._account(grown - size)  # the socket has taken all of it, or nearly all
        else:
            self._account(grown)
            self._unsent_bytes += size
        self._active_at = self._loop.time()
        if self._buffered:
            self._loop.call_soon(self._take_frames)  # not directly: this may run inside a request's start
        elif not self._is_reading:
            self._set_reading()

    def _set_reading(self) -> None:
        if self._transport is None:
            return  # and it must not be paused any more
        may_read = self._has_capacity
        if not may_read and self._node_inflight.is_full:
            self._node_inflight.notify_when_free(self._recheck)
        if may_read == self._is_reading:
            return
        self._is_reading = may_read
        if may_read:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
