"""What goes wrong in the Raft simulation: crashes, cuts, pauses, slow and failing disks, hand-overs.

Owns the choice of faults and of their end. Every seed draws its own mixture, so that rare combinations are met.
"""

from collections.abc import Callable
from typing import Final

from chaos_tests.sim.raft.group import Host, Violation, World
from smq.replication.ports import Channel
from smq.testing.virtual.clock import Process

OVERSLEEP: Final = "oversleep"  # in a plan of this fault alone, no term may end


class Faults:
    """Chooses what goes wrong, and when it ends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.streams.stream("faults")
        self._gap_ms = self._rng.choice([80.0, 200.0, 400.0, 800.0])
        kinds: list[tuple[float, Callable[[], None]]] = [
            (4, self._crash_one),
            (1, self._crash_all),
            (3, self._isolate),
            (2, self._cut_one_way),
            (2, self._pause),
            (2, self._break_session),
            (1, self._stall_disk),
            (1, self._fail_disk),
            (1, self._hand_over),
            (1, self._slow_link),
        ]
        self._kinds = [(weight * self._rng.choice([0.0, 1.0, 1.0, 5.0]) + 0.01, fn) for weight, fn in kinds]
        self._kinds.append((1.0, self._oversleep))
        kinds.append((1, self._oversleep))
        if world.plan.only:
            self._gap_ms = 200.0
            self._kinds = [(weight, fn) for weight, fn in kinds if fn.__name__.lstrip("_") in world.plan.only]

    def schedule(self) -> None:
        self._world.scheduler.after_ms(self._rng.expovariate(1 / self._gap_ms), self._next)

    def _next(self) -> None:
        if not self._world.is_faulty:
            return
        weights = [weight for weight, _ in self._kinds]
        kind = self._rng.choices([fn for _, fn in self._kinds], weights)[0]
        self._world.trace(f"fault {kind.__name__}")
        kind()
        self.schedule()

    def _some(self) -> Host:
        """The leader more often than chance would have it."""
        leader = self._world.leader()
        if leader is not None and self._rng.random() < 0.6:
            return leader
        return self._rng.choice(list(self._world.hosts.values()))

    def _later(self, fn: Callable[[], None], mean_ms: float) -> None:
        def run() -> None:
            if self._world.is_faulty:
                fn()

        self._world.scheduler.after_ms(self._rng.expovariate(1 / mean_ms), run)

    def _restart_later(self, host: Host, mean_ms: float) -> None:
        self._later(lambda: None if host.is_up else host.start(), mean_ms)

    def _crash_one(self) -> None:
        host = self._some()
        if not host.is_running:
            return
        if self._rng.random() < 0.5:
            host.steps_left = self._rng.randrange(1, 60)
        else:
            host.crash(silently=self._rng.random() < 0.5)
        self._restart_later(host, 300)
        self._restart_later(host, 1500)

    def _crash_all(self) -> None:
        for host in self._world.hosts.values():
            host.crash(silently=True)
            self._restart_later(host, 100)

    def _isolate(self) -> None:
        host, network = self._some(), self._world.network
        others = [node for node in self._world.nodes if node != host.node]
        cut = others if self._rng.random() < 0.7 else others[: len(others) // 2]
        pairs = [(host.node, peer) for peer in cut] + [(peer, host.node) for peer in cut]
        for pair in pairs:
            network.cut(*pair)

        def heal() -> None:
            for pair in pairs:
                network.heal(*pair)

        self._later(heal, 900)

    def _cut_one_way(self) -> None:
        src, dst = self._rng.sample(self._world.nodes, 2)
        self._world.network.cut(src, dst)
        self._later(lambda: self._world.network.heal(src, dst), 700)

    def _pause(self) -> None:
        host = self._some()
        process = host.process
        if not host.is_running or process is None:
            return
        process.pause()

        def resume() -> None:
            process.resume()
            self._world.network.resumed(host.node)

        self._later(resume, 700)

    def _oversleep(self) -> None:
        """No node gets a processor, for longer than an election time-out, and one a little longer than another. None is
        silent while another runs, so if nothing else goes wrong, the leader and its term stay."""
        world, leader = self._world, self._world.leader()
        hosts = [host for host in world.hosts.values() if host.is_running and host.process is not None]
        if leader is None or len(hosts) < len(world.nodes):
            return
        timing, term = world.plan.timing, leader.engine.term
        lasting_ms = self._rng.uniform(timing.election_timeout_min_ms, 3 * timing.election_timeout_max_ms)
        for host in hosts:
            process = host.process
            assert process is not None
            process.pause()

            def resume(host: Host = host, process: Process = process) -> None:
                process.resume()
                world.network.resumed(host.node)

            world.scheduler.after_ms(lasting_ms + self._rng.uniform(0, timing.heartbeat_ms), resume)

        def check() -> None:
            if world.plan.only == (OVERSLEEP,) and not (leader.engine.is_leader and leader.engine.term == term):
                raise Violation(
                    f"node {leader.node} lost term {term} although all nodes merely slept {lasting_ms:.0f} ms"
                )

        world.scheduler.after_ms(lasting_ms + timing.election_timeout_max_ms, check)

    def _break_session(self) -> None:
        a, b = sorted(self._rng.sample(self._world.nodes, 2))
        self._world.network.break_session((a, b, Channel.CONTROL), drop_in_flight=True)

    def _stall_disk(self) -> None:
        host = self._some()
        if host.is_up:
            host.disk.stall(self._rng.uniform(20, 600))

    def _fail_disk(self) -> None:
        host = self._some()
        if host.is_up:
            host.disk.fail_next_commit(OSError(5, "input/output error"))
            self._restart_later(host, 800)

    def _hand_over(self) -> None:
        leader = self._world.leader()
        if leader is not None:
            leader.engine.transfer_leadership(None)

    def _slow_link(self) -> None:
        src, dst = self._rng.sample(self._world.nodes, 2)
        self._world.network.slow(src, dst, self._rng.choice([1.0, 5.0, 30.0]))
