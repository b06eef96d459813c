"""A client that uses what only level 2 has: it is refused until the cluster is there.

Owns nothing of the history: what its commands change is judged by the nodes' digests, and by the nodes that they stop.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Client, World
from chaos_tests.sim.levels import SETTING, Note
from chaos_tests.sim.rpc import Call, Script
from smq.raft_state.commands import AlterClusterConfig, Command
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
            request_id = RequestId(self.rng.randbytes(16))
            command: Command = Note(request_id=request_id, text="x")
            if self.rng.random() < 0.5:
                value = self.rng.choice("01")
                command = AlterClusterConfig(request_id=request_id, set_=((SETTING, value),))

            def request(api: NodeApi, done: Callable[[Any], None], command: Command = command) -> None:
                api.propose(command, ATTEMPT_MS, done)

            yield Call(self.any_node(), request, ATTEMPT_MS * 1.5, ATTEMPT_MS)
