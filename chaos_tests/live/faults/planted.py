"""Bugs planted into the nodes of a run: most of them only a real disk or a real network reveals.

Owns the list PLANTED and the process that runs a broken node:
`python -m chaos_tests.live.faults.planted NAME CONFIG`. Each is a few lines over the production code, here and nowhere
else; the live harness must find every one.
"""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from chaos_tests.sim.planted.logs import LAST_RECORDS_GO
from chaos_tests.sim.replacement import Fault, Replacement, replace


@dataclass(frozen=True, slots=True)
class Plant:
    """`scenario` reveals the bug within a history or two, as one of `anomalies`. `install`: what is not a replacement
    of production code."""

    name: str
    says: str
    scenario: str
    anomalies: frozenset[str]
    faults: tuple[Replacement, ...] = ()
    install: Callable[[], None] = lambda: None


def _open_with(**changed: Any) -> None:
    from smq.replication.storage import index

    library: Any = vars(index)["lmdb"]  # through its one adapter, as in all code that uses LMDB
    original = library.open

    def opened(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **{**options, **changed})

    library.open = opened


def _without_sync(original: Fault, path: Any, flags: int) -> Any:
    return original(path, flags & ~os.O_DSYNC)


def _no_sync() -> None:
    _open_with(sync=False, metasync=False)
    replace("smq.replication.storage.node_log:_opened", by=_without_sync).install()


def _no_metasync() -> None:
    _open_with(metasync=False)


def _to_all_addresses(_original: Fault, _host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("0.0.0.0", port))
    sock.listen(128)
    sock.setblocking(False)
    return sock


def _halved(original: Fault, look_ups: Any, replica: Any, limits: Any, *rest: Any) -> Any:
    half = type(limits)(*(None if limit is None else limit // 2 for limit in limits))
    return original(look_ups, replica, half, *rest)


def _leaves_out(original: Fault, gateway: Any, version: int, want: Any, answer: Any, *rest: Any) -> None:
    """The Kafka port takes a batch from which compaction has removed a record for damaged. gRPC's readers get it."""
    from smq.records import parse_header

    original(gateway, version, want, answer, *rest)
    headers = [(batch, parse_header(batch) if batch else None) for batch in answer["records"]]
    answer["records"] = [batch for batch, h in headers if h is None or h.count == h.last_offset_delta + 1]


# If the cluster does not recover, no full read finds the loss; reused offsets reveal it before that. So do records that
# were read and are others now, and commits that are gone.
_LOSS: Final = frozenset({"lost-write", "offset-reuse", "inconsistent-offsets", "stale-commit"})
# The write-ahead file shows that LMDB has lost a commit: the nodes refuse their directories, and nothing goes on.
_REFUSED: Final = frozenset({"no-progress"})
PLANTED: Final = {
    plant.name: plant
    for plant in (
        Plant(
            "ack-before-fsync",
            "no write waits for the disk: acknowledged records lie in the page cache",
            "power-all",
            _LOSS | _REFUSED | {"two-leaders-in-term"},  # votes are forgotten, too
            install=_no_sync,
        ),
        Plant(
            "no-metasync",
            "LMDB syncs data and not its meta page: the last commits are gone after a power cut",
            "power-all",
            _LOSS | _REFUSED,
            install=_no_metasync,
        ),
        Plant(
            "bind-to-all",
            "the listener between nodes binds all addresses",
            "kill-one",
            frozenset({"bound-beyond"}),
            (replace("smq.replication.net.listening:bind_listener", by=_to_all_addresses),),
        ),
        Plant(
            "last-records-go",
            "compaction removes the last record of a key, too",
            "kill-one",
            frozenset({"lost-key"}),
            (LAST_RECORDS_GO,),
        ),
        Plant(
            "too-much-goes",
            "retention keeps half of what it is asked for",
            "kill-one",
            frozenset({"early-deletion"}),
            (replace("smq.replication.partition.log_search:LookUps.retained_start", by=_halved),),
        ),
        Plant(
            "kafka-leaves-out",
            "the Kafka port leaves out batches from which compaction has removed a record",
            "kill-one",
            frozenset({"lost-key"}),
            (replace("smq.coordinator.kafka.fetch:_fill", by=_leaves_out),),
        ),
    )
}


def command_of(name: str) -> tuple[str, ...]:
    """The command that starts a node with that bug; the caller appends its config file."""
    return sys.executable, "-m", "chaos_tests.live.faults.planted", PLANTED[name].name


def main(arguments: list[str]) -> None:
    name, config = arguments
    PLANTED[name].install()
    for fault in PLANTED[name].faults:
        fault.install()
    from smq.coordinator.cli.main import main as smq

    sys.argv = ["smq", "serve", "--config", config]
    smq()


if __name__ == "__main__":
    main(sys.argv[1:])
