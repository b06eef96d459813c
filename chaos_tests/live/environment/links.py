"""What may lie between two nodes: the rules of every directed link, and who can impose them.

Owns the vocabulary that faults speak (Link, Links) and the port (Network) that two things implement: `proxies`
(loopback, anywhere) and `namespaces` (a switch in user space, where the machine allows it). It does no I/O.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Pair = tuple[int, int]  # (sender, receiver); node ids


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes. Chances are per packet; times in ms. Jitter is uniform on top of the delay,
    and reorders packets where the network can (TCP hides that from the nodes, but not its price)."""

    blocked: bool = False
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0


GOOD = Link()


@dataclass(slots=True)
class Links:
    """The state of the whole network; what is not named is good."""

    rules: dict[Pair, Link] = field(default_factory=dict)

    def of(self, sender: int, receiver: int) -> Link:
        return self.rules.get((sender, receiver), GOOD)

    @classmethod
    def cut(cls, pairs: Iterable[Pair]) -> "Links":
        """These directions let nothing through."""
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
    """Where the nodes of a run live."""

    name: str
    can: frozenset[str]  # of "block", "delay", "reset", "loss"

    def prepare(self, configs: list[Path]) -> None:
        """Rewrites the node.toml files so that the nodes meet through this network. Before any node starts."""

    def command(self, node: int, command: list[str]) -> list[str]:
        """How that node's process is started here."""

    def impose(self, links: Links) -> None:
        """Replaces all rules; returns when they are in force."""

    def close(self) -> None: ...
