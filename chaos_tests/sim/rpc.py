"""The way of simulated clients to nodes: requests and responses with delay and loss, and scripts that wait for them.

Owns the client side of the virtual network and the stepping of scripts (generators that yield Sleep, Wait or Call). A
request to a killed process is refused. A request to a machine without power, or over a cut link, is never answered. It
also checks that a node answers every request once and in time.
"""

import enum
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from smq.raft_state.ids import NodeId
from smq.replication.api import NodeApi
from smq.testing.virtual.clock import NS_PER_MS, Event, Process, Scheduler
from smq.testing.virtual.rng import Streams

# A node may answer this long after the deadline that it was given, not longer; pauses of its process do not count:
# a fetch that must say "out of range" waits up to 5 s for a quorum (smq.replication.partition.reads.BARRIER_MS_MAX).
ANSWER_GRACE_MS = 3_000.0
ANSWER_CHANCES = 3


class Lost(enum.Enum):
    """No answer."""

    REFUSED = "refused"  # definite: no process listened
    TIMED_OUT = "timed_out"  # the request may have been executed, or still may be


@dataclass(frozen=True, slots=True)
class Sleep:
    ms: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A pause until the function that `register` receives is called."""

    register: Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Connection:
    """One client's connection to one process: requests arrive in order, and after one that is lost none arrives."""

    last_ns: int = 0  # when the latest request arrives
    process: Process | None = None  # that took the first request
    is_broken: bool = False  # a request was lost on the way: those sent after it are, too
    is_refused: bool = False  # one found no process, or one that did not listen yet: it opens no connection


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one node. `request` calls the node's handler with the given `done`."""

    node: NodeId
    request: Callable[[NodeApi, Callable[[Any], None]], object]
    timeout_ms: float  # after which the client gives up
    deadline_ms: float  # the time that the node is given
    is_tied: bool = False  # to a connection that the client closes when it gives up: it arrives before that, or never
    connection: Connection | None = None  # None: its own


Script = Generator[Sleep | Wait | Call, Any, None]


class Host(Protocol):
    """A node's machine, as clients see it."""

    @property
    def process(self) -> Process | None:
        """None while the node is down."""

    @property
    def api(self) -> NodeApi | None: ...

    @property
    def has_power(self) -> bool: ...


@dataclass(slots=True)
class ClientLink:
    """The link between all clients and one node."""

    requests_cut: bool = False
    responses_cut: bool = False


@dataclass(slots=True, kw_only=True)
class ClientProfile:
    delay_ms_min: float = 0.1
    delay_ms_mean: float = 0.5
    loss: float = 0.005  # chance that a request is lost, and that a response is
    straggler: float = 0.005  # chance of a request that arrives late, perhaps after the client gave up
    straggler_ms_max: float = 3000.0


class ClientNet:
    """Carries the calls of all clients of a run."""

    def __init__(
        self,
        scheduler: Scheduler,
        streams: Streams,
        hosts: dict[NodeId, Host],
        profile: ClientProfile,
        report_violation: Callable[[NodeId, str], None],
    ) -> None:
        self.scheduler = scheduler
        self.profile = profile
        self.links = {node: ClientLink() for node in hosts}
        self._hosts = hosts
        self._rng = streams.stream("clients/network")
        self._report_violation = report_violation

    def heal(self) -> None:
        for link in self.links.values():
            link.requests_cut = link.responses_cut = False
        self.profile.loss = self.profile.straggler = 0.0

    def _delay_ms(self) -> float:
        return self.profile.delay_ms_min + self._rng.expovariate(1.0) * self.profile.delay_ms_mean

    def call(self, call: Call, on_result: Callable[[Any], None]) -> None:
        """`on_result` gets the handler's result, its SmqError, or Lost; exactly once."""
        pending = _Pending(on_result)
        conclude = pending.conclude
        pending.patience = self.scheduler.after_ms(call.timeout_ms, partial(conclude, Lost.TIMED_OUT))
        delay = self._delay_ms()
        if self._rng.random() < self.profile.straggler:
            delay += self._rng.random() * self.profile.straggler_ms_max
        is_lost = self._rng.random() < self.profile.loss or self.links[call.node].requests_cut
        if call.connection is not None:
            delay = self._follow(call.connection, delay)
        is_lost |= call.is_tied and delay >= call.timeout_ms
        if call.connection is not None:
            is_lost = call.connection.is_broken = call.connection.is_broken or is_lost
        if not is_lost:
            self.scheduler.after_ms(delay, partial(self._arrive, call, conclude))

    def _follow(self, connection: Connection, delay_ms: float) -> float:
        """A request never overtakes an earlier one of its connection."""
        now_ns = self.scheduler.now_ns
        connection.last_ns = max(connection.last_ns + 1, now_ns + int(delay_ms * NS_PER_MS))
        return (connection.last_ns - now_ns) / NS_PER_MS

    def _arrive(self, call: Call, conclude: Callable[[Any], None]) -> None:
        host = self._hosts[call.node]
        process, api = host.process, host.api
        if call.connection is not None:
            if call.connection.process is None:
                call.connection.process = process
            if call.connection.process is not process:
                return  # the connection ended with its process
            call.connection.is_refused |= process is None or api is None
        if process is None or api is None or (call.connection is not None and call.connection.is_refused):
            if host.has_power:
                self.scheduler.after_ms(self._delay_ms(), partial(conclude, Lost.REFUSED))
            return
        overdue: list[Event] = []  # emptied by the answer

        def done(result: object) -> None:
            if not overdue:
                self._report_violation(call.node, f"answered a request twice, the second time with {result!r}")
                return
            overdue.pop().cancel()
            if self._rng.random() >= self.profile.loss and not self.links[call.node].responses_cut:
                self.scheduler.after_ms(self._delay_ms(), partial(conclude, result))

        check = partial(self._check_answered, call, process, overdue, ANSWER_CHANCES)
        overdue.append(self.scheduler.after_ms(call.deadline_ms + ANSWER_GRACE_MS, check, process))

        def serve() -> None:
            call.request(api, done)

        process.execute(Event((self.scheduler.now_ns, 0, serve, process)))

    def _check_answered(self, call: Call, process: Process, overdue: list[Event], chances: int) -> None:
        """Runs inside the process: no answer can be expected while the process is paused, or right afterwards."""
        if chances:
            again = partial(self._check_answered, call, process, overdue, chances - 1)
            overdue[0] = self.scheduler.after_ms(ANSWER_GRACE_MS, again, process)
        else:
            self._report_violation(call.node, f"never answered a request with a deadline of {call.deadline_ms} ms")


class _Pending:
    """One call: concluded once, by its answer or by the client's time-out."""

    __slots__ = ("_on_result", "patience")

    def __init__(self, on_result: Callable[[Any], None]) -> None:
        self._on_result: Callable[[Any], None] | None = on_result
        self.patience: Event | None = None

    def conclude(self, result: object) -> None:
        on_result, self._on_result = self._on_result, None
        if on_result is not None:
            if self.patience is not None:
                self.patience.cancel()
            on_result(result)


class Actor:
    """Steps one script to its end."""

    def __init__(self, net: ClientNet, script: Script, on_end: Callable[[], None] | None = None) -> None:
        self._net = net
        self._script = script
        self._on_end = on_end
        net.scheduler.after_ms(0, partial(self._step, None))

    def _step(self, value: object) -> None:
        try:
            step = self._script.send(value)
        except StopIteration:
            if self._on_end is not None:
                self._on_end()
            return
        if isinstance(step, Sleep):
            self._net.scheduler.after_ms(step.ms, partial(self._step, None))
        elif isinstance(step, Wait):
            step.register(partial(self._step, None))
        else:
            self._net.call(step, self._step)
