"""Network faults, and how each is undone: every shape of partition, slow and lossy links, resets.

Owns which links a fault changes. The implementations of `links.Network` own the effect of a changed link.
"""

import time
from collections.abc import Callable
from typing import Final

from chaos_tests.live.environment.links import Link, Links, both
from chaos_tests.live.environment.proxies import ProxyNetwork
from chaos_tests.live.faults.kinds import Arena, Strike

_UNEVEN_MS: Final = 40


def _others(arena: Arena, nodes: list[int]) -> list[int]:
    return [node for node in arena.nodes if node not in nodes]


def isolated(choose: Callable[[Arena], list[int]]) -> Strike:
    def strike(arena: Arena) -> list[int]:
        nodes = choose(arena)
        arena.fleet.network.impose(Links.cut(both(nodes, _others(arena, nodes))))
        return nodes

    return strike


def deaf(arena: Arena) -> list[int]:
    """The leader receives nothing and reaches all: the shape that makes two leaders if leases are careless."""
    node = arena.leader()
    arena.fleet.network.impose(Links.cut((other, node) for other in _others(arena, [node])))
    return [node]


def mute(arena: Arena) -> list[int]:
    node = arena.leader()
    arena.fleet.network.impose(Links.cut((node, other) for other in _others(arena, [node])))
    return [node]


def bridge(arena: Arena) -> list[int]:
    """Two sides, connected only by one node."""
    middle = arena.any_node()
    rest = _others(arena, [middle])
    arena.rng.shuffle(rest)
    half = max(1, len(rest) // 2)
    arena.fleet.network.impose(Links.cut(both(rest[:half], rest[half:])))
    return [middle]


def all_alone(arena: Arena) -> list[int]:
    nodes = arena.nodes
    arena.fleet.network.impose(Links.cut((a, b) for a in nodes for b in nodes if a != b))
    return nodes


def ring(arena: Arena) -> list[int]:
    """Every node hears a majority, no two nodes the same one; with three nodes, each hears only one neighbour."""
    order = arena.nodes
    arena.rng.shuffle(order)
    size = len(order)
    heard = {(order[i], order[(i + 1) % size]) for i in range(size)}
    if size > 3:
        heard |= {(b, a) for a, b in heard}
    arena.fleet.network.impose(Links.cut((a, b) for a in order for b in order if a != b and (a, b) not in heard))
    return order


def uneven(arena: Arena) -> list[int]:
    """Every direction of every link has a delay of its own."""
    nodes = arena.nodes
    delays = {
        (a, b): Link(delay_ms=arena.rng.uniform(0, _UNEVEN_MS), jitter_ms=arena.rng.uniform(0, _UNEVEN_MS))
        for a in nodes
        for b in nodes
        if a != b
    }
    arena.fleet.network.impose(Links(delays))
    return nodes


def links(link: Link) -> Strike:
    def strike(arena: Arena) -> list[int]:
        arena.fleet.network.impose(Links.all_of(arena.nodes, link))
        return arena.nodes

    return strike


def flapping(arena: Arena) -> list[int]:
    """A loose cable: cut and restored in alternation."""
    node = arena.leader()
    cut = Links.cut(both([node], _others(arena, [node])))
    for _ in range(6):
        arena.fleet.network.impose(cut)
        time.sleep(arena.rng.uniform(0.1, 0.6))
        arena.fleet.network.impose(Links())
        time.sleep(arena.rng.uniform(0.1, 0.6))
    return [node]


def healed(arena: Arena, nodes: list[int]) -> None:
    arena.fleet.network.impose(Links())


def reset(arena: Arena) -> list[int]:
    network = arena.fleet.network
    assert isinstance(network, ProxyNetwork), "drawn only with proxies"
    for _ in range(5):
        for node in arena.nodes:
            network.reset(node)
        time.sleep(0.2)
    return arena.nodes
