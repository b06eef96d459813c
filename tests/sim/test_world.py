"""The simulated clock, processes and network keep the promises of the ports they stand for."""

from smq.raft_state.ids import NodeId
from smq.replication.ports import Channel
from smq.testing.virtual.clock import NS_PER_MS, Machine, Process, Scheduler, SimClock
from smq.testing.virtual.network import LinkProfile, SimNetwork, SimPort
from smq.testing.virtual.rng import Streams

A, B = NodeId(1), NodeId(2)


class Listener:
    """Records the callbacks of the network."""

    def __init__(self, world: "Wire", node: NodeId) -> None:
        self.received: list[str] = []
        self.process = Process(world.scheduler, str(node), _raise)
        self.port = SimPort(world.network, node, self.process)
        self.port.start(self)

    def on_session_open(self, peer: NodeId, channel: Channel) -> None:
        if channel is Channel.DATA:
            self.received.append("open")

    def on_session_close(self, peer: NodeId, channel: Channel) -> None:
        if channel is Channel.DATA:
            self.received.append("close")

    def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        self.received.append(bytes(payload).decode())

    def send(self, peer: NodeId, *texts: str) -> list[bool]:
        return [self.port.send(peer, Channel.DATA, [text.encode()]) for text in texts]


class Wire:
    def __init__(self, seed: int = 1, **profile: float) -> None:
        self.scheduler = Scheduler()
        self.network = SimNetwork(self.scheduler, Streams(seed), (A, B), LinkProfile(**profile))
        self.a = Listener(self, A)
        self.b = Listener(self, B)
        self.scheduler.run_for_ms(500)

    def run(self, ms: float) -> None:
        self.scheduler.run_for_ms(ms)


def _raise(error: Exception) -> None:
    raise error


def test_messages_of_a_session_arrive_in_order_despite_jitter() -> None:
    wire = Wire(tail_probability=0.3, delay_ms_mean=5.0)
    texts = [str(n) for n in range(200)]
    wire.a.send(B, *texts)
    wire.run(2000)
    assert wire.b.received == ["open", *texts]


def test_nothing_is_sent_without_a_session() -> None:
    wire = Wire()
    wire.network.detach(B, silently=False)
    wire.run(50)
    assert wire.a.received == ["open", "close"]
    assert wire.a.send(B, "x") == [False]


def test_one_way_cut_holds_messages_and_heals_without_loss_before_the_keepalive() -> None:
    wire = Wire(keepalive_ms_min=1000, keepalive_ms_max=1000)
    wire.network.cut(A, B)
    assert wire.a.send(B, "x", "y") == [True, True]
    wire.b.send(A, "z")
    wire.run(300)
    assert wire.a.received == ["open", "z"]
    assert wire.b.received == ["open"]
    wire.network.heal(A, B)
    wire.run(300)
    assert wire.b.received == ["open", "x", "y"]


def test_long_cut_ends_the_session_and_drops_what_it_held() -> None:
    wire = Wire(keepalive_ms_min=100, keepalive_ms_max=100)
    wire.network.cut(A, B)
    wire.a.send(B, "x")
    wire.run(1000)
    assert wire.a.received == wire.b.received == ["open", "close"]
    wire.network.heal(A, B)
    wire.run(1000)
    wire.a.send(B, "y")
    wire.run(300)
    assert wire.b.received == ["open", "close", "open", "y"]


def test_killed_process_still_delivers_what_it_had_sent() -> None:
    wire = Wire()
    wire.a.send(B, "last message")
    wire.a.process.kill()
    wire.network.detach(A, silently=False)
    wire.run(500)
    assert wire.b.received == ["open", "last message", "close"]


def test_stalled_channel_keeps_its_session_and_its_order() -> None:
    wire = Wire()
    wire.network.stall(A, B, Channel.DATA)
    wire.a.send(B, "x")
    wire.run(5000)
    assert wire.b.received == ["open"]
    wire.network.unstall(A, B, Channel.DATA)
    wire.a.send(B, "y")
    wire.run(500)
    assert wire.b.received == ["open", "x", "y"]


def test_backlog_counts_what_the_line_has_not_taken() -> None:
    wire = Wire(bytes_per_ms=1.0)
    wire.a.send(B, "x" * 100)
    assert wire.a.port.backlog_bytes(B, Channel.DATA) == 100
    wire.run(150)
    assert wire.a.port.backlog_bytes(B, Channel.DATA) == 0


def test_dead_process_runs_nothing_and_paused_one_catches_up() -> None:
    scheduler = Scheduler()
    process = Process(scheduler, "p", _raise)
    clock = SimClock(process, Machine())
    ran: list[str] = []
    clock.call_later(10, lambda: ran.append("first"))
    clock.call_later(20, lambda: ran.append("second"))
    process.pause()
    scheduler.run_for_ms(100)
    assert ran == []
    process.resume()
    scheduler.run_for_ms(1)
    assert ran == ["first", "second"]
    clock.call_later(10, lambda: ran.append("never"))
    process.kill()
    scheduler.run_for_ms(100)
    assert ran == ["first", "second"]


def test_cancelled_timer_does_not_run() -> None:
    scheduler = Scheduler()
    clock = SimClock(Process(scheduler, "p", _raise), Machine())
    ran: list[str] = []
    clock.call_later(10, lambda: ran.append("x")).cancel()
    scheduler.run_for_ms(100)
    assert ran == []


def test_wall_clock_jumps_and_monotonic_does_not() -> None:
    scheduler = Scheduler()
    machine = Machine(rate=1.01)
    clock = SimClock(Process(scheduler, "p", _raise), machine)
    wall, monotonic = clock.wall_ns(), clock.monotonic_ns()
    machine.wall_offset_ns -= 5_000 * NS_PER_MS
    scheduler.run_for_ms(1000)
    assert clock.wall_ns() < wall
    passed = clock.monotonic_ns() - monotonic
    assert 1009 * NS_PER_MS < passed < 1011 * NS_PER_MS


def test_exception_kills_the_process_and_is_reported() -> None:
    scheduler = Scheduler()
    errors: list[Exception] = []

    def fail() -> None:
        raise ZeroDivisionError

    process = Process(scheduler, "p", errors.append)
    SimClock(process, Machine()).call_soon(fail)
    scheduler.run_for_ms(1)
    assert not process.alive
    assert isinstance(errors[0], ZeroDivisionError)


def test_streams_are_independent_of_each_other() -> None:
    one, two = Streams(7), Streams(7)
    one.stream("other").random()
    assert one.stream("network").random() == two.stream("network").random()
    assert Streams(8).stream("network").random() != two.stream("network").random()


def test_session_that_ended_while_a_node_was_paused_is_opened_again_after_its_crash() -> None:
    wire = Wire(keepalive_ms_min=10, keepalive_ms_max=10)
    wire.b.process.pause()
    wire.network.break_session((A, B, Channel.DATA), drop_in_flight=True)
    wire.run(100)
    wire.b.process.kill()
    wire.network.detach(B, silently=True)
    wire.run(100)
    wire.b = Listener(wire, B)
    wire.run(500)
    assert wire.a.send(B, "x") == [True]
    wire.run(100)
    assert wire.b.received == ["open", "x"]
