"""What pysyncobj finds in place of the clock, random source, poller and pickle of its modules.

Owns nothing but the answers; it does not import the library. Only the engine imports it, and puts these in place.
"""

from smq.replication.raft.journal import RaftJournal
from smq.replication.raft.turns import TurnEngine
from smq.replication.raft.view import RaftViolation


class Surroundings:
    """What the library reads from its module globals, answered by the engine that has entered it.

    Many engines live in one process in the simulation, and each has its own clock and random source.
    """

    def __init__(self) -> None:
        self._entered: list[TurnEngine] = []

    def enter(self, engine: TurnEngine) -> None:
        self._entered.append(engine)

    def leave(self) -> None:
        self._entered.pop()

    def monotonic(self) -> float:
        return self._entered[-1].now()

    def random(self) -> float:
        return self._entered[-1].rng.random()

    def create_journal(self, _file: None) -> RaftJournal:
        return self._entered[-1].journal


class NoPoller:
    """The library owns no socket."""

    def poll(self, _timeout: float) -> None:
        pass


class NoPickle:
    """Whatever path of the library would reach pickle ends here (docs/rules.md, finding 16)."""

    def loads(self, *_args: object) -> object:
        raise RaftViolation("pysyncobj tried to unpickle something")

    dumps = loads
