"""The faults by name: their descriptions, their requirements, and whether a majority stays untouched.

Owns CATALOGUE and NEEDS. It must never strike by itself.
"""

import resource
from typing import Final

from chaos_tests.live.environment.links import Link
from chaos_tests.live.faults import kinds as do
from chaos_tests.live.faults import network as net
from chaos_tests.live.faults.kinds import FLIPS, Arena, Fault

NEEDS: Final = {
    "block": "a network of ours between the nodes",
    "delay": "a network of ours between the nodes",
    "reset": "proxies between the nodes",
    "damage": "proxies between the nodes",
    "loss": "network namespaces",
    "power": "disk images",
    "clock": "the clock shim",
    "strace": "strace",
    "root": "root",
}

_BLOCK: Final = frozenset({"block"})
_DELAY: Final = frozenset({"delay"})
_POWER: Final = frozenset({"power"})
_STRACE: Final = frozenset({"strace"})
_CLOCK: Final = frozenset({"clock"})
CATALOGUE: Final = {
    fault.name: fault
    for fault in (
        Fault("kill-leader", "kill", "kill -9 of the node that leads most", do.killed(do.the_leader), do.started),
        Fault("kill-one", "kill", "kill -9 of any node", do.killed(do.any_node), do.started),
        Fault(
            "kill-majority",
            "kill",
            "kill -9 of a majority",
            do.killed(Arena.majority),
            do.started,
            keeps_majority=False,
        ),
        Fault("kill-all", "kill", "kill -9 of every node", do.killed(do.every_node), do.started, keeps_majority=False),
        Fault(
            "quick-restart",
            "kill",
            "the leader killed and restarted immediately, three times",
            do.quick_restart,
            do.nothing,
            keeps_majority=False,  # it strikes again before the cluster must have recovered
            hold_s=(0.5, 1.0),
        ),
        Fault(
            "rolling-restart",
            "restart",
            "SIGTERM and restart of every node in turn",
            do.rolling_restart,
            do.nothing,
            hold_s=(0.0, 0.0),
        ),
        Fault("pause-leader", "pause", "SIGSTOP of the leader", do.paused(do.the_leader), do.resumed),
        Fault("pause-one", "pause", "SIGSTOP of any node", do.paused(do.any_node), do.resumed),
        Fault(
            "pause-all", "pause", "SIGSTOP of every node", do.paused(do.every_node), do.resumed, keeps_majority=False
        ),
        Fault(
            "isolate-leader",
            "isolate",
            "the leader cut off from the others",
            net.isolated(do.the_leader),
            net.healed,
            _BLOCK,
        ),
        Fault(
            "isolate-one", "isolate", "any node cut off from the others", net.isolated(do.any_node), net.healed, _BLOCK
        ),
        Fault(
            "split-minority",
            "isolate",
            "a minority and a majority that do not hear each other",
            net.isolated(Arena.minority),
            net.healed,
            _BLOCK,
        ),
        Fault("deaf-leader", "network", "the leader hears no node, all hear it", net.deaf, net.healed, _BLOCK),
        Fault("mute-leader", "network", "the leader hears all, no node hears it", net.mute, net.healed, _BLOCK),
        Fault("bridge", "network", "two sides, connected only by one node", net.bridge, net.healed, _BLOCK),
        Fault("all-alone", "network", "no node hears another", net.all_alone, net.healed, _BLOCK, keeps_majority=False),
        Fault(
            "ring",
            "network",
            "every node hears only its two neighbours (with three nodes: one)",
            net.ring,
            net.healed,
            _BLOCK,
            keeps_majority=False,
        ),
        Fault("flapping-link", "network", "the leader's cable is loose", net.flapping, net.healed, _BLOCK),
        Fault(
            "slow-network",
            "network",
            "20-60 ms between all nodes",
            net.links(Link(delay_ms=20, jitter_ms=40)),
            net.healed,
            _DELAY,
        ),
        Fault(
            "uneven-network",
            "network",
            "0-80 ms between two nodes, different in each direction",
            net.uneven,
            net.healed,
            _DELAY,
        ),
        Fault(
            "lossy-network",
            "network",
            "5 % of the packets lost, 2 % duplicated, 0-10 ms of reordering",
            net.links(Link(loss=0.05, duplicate=0.02, jitter_ms=10)),
            net.healed,
            frozenset({"loss"}),
        ),
        Fault(
            "reset-connections",
            "network",
            "every connection between nodes reset, 5 times",
            net.reset,
            do.nothing,
            frozenset({"reset"}),
        ),
        Fault(
            "damaged-bytes",
            "network",
            "a bit flipped in 2 % of the chunks between all nodes",
            net.links(Link(damage=0.02)),
            net.healed,
            frozenset({"damage"}),
        ),
        Fault("wipe", "disk", "a node killed and restarted with an empty disk", do.wiped, do.started),
        Fault(
            "bit-flips",
            "disk",
            f"{FLIPS} bits of a stopped node's database flipped",
            do.damaged(do.flip_bits),
            do.repaired,
        ),
        Fault("truncation", "disk", "a stopped node's database truncated", do.damaged(do.truncate), do.repaired),
        Fault(
            "power-one",
            "disk",
            "power cut of one node: unsynced writes are gone",
            do.power_cut(do.any_node),
            do.started,
            _POWER,
        ),
        Fault(
            "power-all",
            "disk",
            "power cut of all nodes at the same moment",
            do.power_cut(do.every_node),
            do.started,
            _POWER,
            keeps_majority=False,
        ),
        Fault(
            "fsync-error",
            "disk",
            "no write of the leader reaches the disk: EIO",
            do.traced("fdatasync:error=EIO:when=20+", "fsync:error=EIO:when=20+", "pwrite64:error=EIO:when=20+"),
            do.untraced,
            _STRACE,
        ),
        Fault(
            "write-enospc",
            "disk",
            "the leader's disk is full: pwrite fails with ENOSPC",
            do.traced("pwrite64:error=ENOSPC:when=20+"),
            do.untraced,
            _STRACE,
        ),
        Fault(
            "slow-disk",
            "disk",
            "every write and fdatasync of the leader takes 30 ms more",
            do.traced("fdatasync:delay_enter=30000", "fsync:delay_enter=30000", "pwrite64:delay_enter=30000"),
            do.untraced,
            _STRACE,
        ),
        Fault(
            "hung-disk",
            "disk",
            "every write and fdatasync of the leader hangs, without an error, until the fault is over",
            do.traced(*(f"{call}:delay_enter=60000000" for call in ("fdatasync", "fsync", "pwrite64"))),
            do.untraced,
            _STRACE,
            hold_s=(12.0, 20.0),
        ),
        Fault(
            "slow-reads",
            "disk",
            "no read of the leader's batches finds them in memory, and each takes some half second",
            do.traced("preadv2:error=EAGAIN", "pread64:delay_enter=50000"),  # a read takes several calls
            do.untraced,
            _STRACE,
            hold_s=(6.0, 10.0),
        ),
        Fault(
            "clock-jump",
            "clock",
            "the leader's wall clock jumps by up to an hour either way",
            do.clock(lambda rng: rng.uniform(-3600, 3600)),
            do.clock_right,
            _CLOCK,
        ),
        Fault(
            "clock-drift",
            "clock",
            "the leader's wall clock runs 10 % fast",
            do.clock(lambda rng: 0.0, drift_ppm=100_000),
            do.clock_right,
            _CLOCK,
        ),
        Fault("busy-cores", "pressure", "twice as many busy processes as cores", do.burn, do.calm),
        Fault(
            "few-descriptors",
            "pressure",
            "the leader may open no more descriptors than it has",
            do.limited(resource.RLIMIT_NOFILE, do.descriptors),
            do.unlimited(resource.RLIMIT_NOFILE),
        ),
        Fault(
            "little-memory",
            "pressure",
            "the leader may get no more than 16 MiB of memory",
            do.limited(resource.RLIMIT_AS, do.memory),
            do.unlimited(resource.RLIMIT_AS),
        ),
        Fault(
            "leader-storm",
            "restart",
            "every node in turn is drained and undrained: all leaderships move twice",
            do.storm,
            do.nothing,
            hold_s=(0.5, 1.0),
        ),
        Fault(
            "hostile-bytes", "hostile", "noise on every port of every node", do.hostile, do.nothing, hold_s=(0.5, 1.0)
        ),
    )
}
