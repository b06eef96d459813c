"""Seeded random streams, one per purpose, so that one more draw in one place changes nothing elsewhere.

Owns the derivation of streams from the run's seed. It must never use hash(), time or the global generator.
"""

import hashlib
import random


class Streams:
    """One independent `random.Random` per name; the same name gives the same object."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, random.Random] = {}

    def stream(self, name: str) -> random.Random:
        found = self._streams.get(name)
        if found is None:
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            found = self._streams[name] = random.Random(int.from_bytes(digest[:16], "big"))
        return found
