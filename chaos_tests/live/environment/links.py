"""The links between nodes: the rules of every directed link, and the port that imposes them.

Owns the vocabulary of faults (Link, Links) and the port (Network) with two implementations: `proxies` (loopback, on any
machine) and `namespaces` (a switch in user space, if the machine allows it). It does no I/O.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Pair = tuple[int, int]  # (sender, receiver); node ids


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes. Chances are per packet; times in ms. Jitter is uniform on top of the delay,
    and reorders packets if the network can (TCP hides that from the nodes, but not its cost)."""

    blocked: bool = False
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    damage: float = 0.0  # chance of a chunk of bytes to arrive with a flipped bit


GOOD = Link()


@dataclass(slots=True)
class Links:
    """The state of the whole network; links without a rule are good."""

    rules: dict[Pair, Link] = field(default_factory=dict)

    def of(self, sender: int, receiver: int) -> Link:
        return self.rules.get((sender, receiver), GOOD)

    @classmethod
    def cut(cls, pairs: Iterable[Pair]) -> "Links":
        """Blocks these directions."""
        return cls(dict.fromkeys(pairs, Link(blocked=True)))

    @classmethod
    def all_of(cls, nodes: Iterable[int], link: Link) -> "Links":
        ids = list(nodes)
        return cls({(a, b): link for a in ids for b in ids if a != b})


def both(one: Iterable[int], other: Iterable[int]) -> list[Pair]:
    """Every pair between two sides, in both directions."""
    left, right = list(one), list(other)
    return [pair for a in left for b in right for pair in ((a, b), (b, a))]


class Network(Protocol):
    """The network of a run's nodes."""

    name: str
    can: frozenset[str]  # of "block", "delay", "reset", "damage", "loss"

    def prepare(self, configs: list[Path]) -> None:
        """Rewrites the node.toml files so that nodes connect through this network. Called before any node starts."""

    def command(self, node: int, command: list[str]) -> list[str]:
        """The command that starts this node's process in this network."""

    def impose(self, links: Links) -> None:
        """Replaces all rules; returns when they are in force."""

    def close(self) -> None: ...
