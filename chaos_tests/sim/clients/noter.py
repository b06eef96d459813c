"""A client that uses what only level 2 has: it is refused until the cluster is there.

Owns nothing of the history: what its commands change is judged by the nodes' digests, and by the nodes that they stop.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Client, World
from chaos_tests.sim.levels import Note
from chaos_tests.sim.rpc import Call, Script
from smq.raft_state.ids import RequestId
from smq.replication.api import NodeApi

ATTEMPT_MS: Final = 1_500


class Noter(Client):
    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name)
        self.think_ms = think_ms

    def run(self) -> Script:
        while not self.world.stopped:
            yield self.think(self.think_ms)
            note = Note(request_id=RequestId(self.rng.randbytes(16)), text="x")

            def request(api: NodeApi, done: Callable[[Any], None], note: Note = note) -> None:
                api.propose(note, ATTEMPT_MS, done)

            yield Call(self.any_node(), request, ATTEMPT_MS * 1.5, ATTEMPT_MS)
