"""Bugs planted into the nodes of a run: most of them only a real disk or a real network reveals.

Owns the list PLANTED and the process that runs a broken node:
`python -m chaos_tests.live.faults.planted NAME CONFIG`. Each is a few lines over the production code, here and nowhere
else; the live harness must find every one.
"""

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Plant:
    """`scenario` reveals the bug within a history or two, as one of `anomalies`."""

    name: str
    says: str
    scenario: str
    anomalies: frozenset[str]
    install: Callable[[], None]


def _open_with(**changed: Any) -> None:
    from smq.replication.storage import disk_lmdb

    library: Any = vars(disk_lmdb)["lmdb"]  # through its one adapter, as in all code that uses LMDB
    original = library.open

    def opened(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **{**options, **changed})

    library.open = opened


def _no_sync() -> None:
    from smq.replication.storage import write_ahead

    _open_with(sync=False, metasync=False)
    vars(write_ahead).update(_WAITS=0, _DIRECT=0)


def _no_metasync() -> None:
    _open_with(metasync=False)


def _bind_all() -> None:
    """Binds every listener between nodes to all addresses."""
    from smq.coordinator import listeners
    from smq.replication.net import tcp

    def bound(host: str, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))
        sock.listen(128)
        sock.setblocking(False)
        return sock

    vars(tcp)["bind_listener"] = bound
    vars(listeners)["bind_listener"] = bound


def _last_records_go() -> None:
    """Compaction takes every record of a key that it has seen for superseded, the last one, too."""
    from smq.records import KeyedRecord
    from smq.replication.log.cleaning import Cleaner

    def select(self: Any, records: list[KeyedRecord]) -> list[bool]:
        return [key is None or offset > self._table.newest([key])[0] for offset, key, _ in records]

    planted: Any = Cleaner
    planted._select = select


def _too_much_goes() -> None:
    """Retention keeps half of what it is asked for."""
    from smq.raft_state.topic_config import Retention
    from smq.replication.partition.look_ups import LookUps

    planted: Any = LookUps
    original = planted.retained_start

    def halved(self: Any, replica: Any, limits: Retention, now_ms: int, done: Any) -> Any:
        half = Retention(*(None if limit is None else limit // 2 for limit in limits))
        return original(self, replica, half, now_ms, done)

    planted.retained_start = halved


def _kafka_leaves_out() -> None:
    """The Kafka port takes a batch from which compaction has removed a record for damaged, and leaves it out. gRPC's
    readers are given all of it."""
    from smq.coordinator.kafka import fetch
    from smq.records import parse_header

    planted: Any = fetch
    original = planted._fill

    def is_whole(batch: Any) -> bool:
        header = parse_header(batch)
        return bool(header.count == header.last_offset_delta + 1)

    def fill(gateway: Any, version: int, want: Any, answer: Any, outcome: Any, hints: Any) -> None:
        original(gateway, version, want, answer, outcome, hints)
        answer["records"] = [batch for batch in answer["records"] if not batch or is_whole(batch)]

    planted._fill = fill


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
            _no_sync,
        ),
        Plant(
            "no-metasync",
            "LMDB syncs data and not its meta page: the last commits are gone after a power cut",
            "power-all",
            _LOSS | _REFUSED,
            _no_metasync,
        ),
        Plant(
            "bind-to-all",
            "the listener between nodes binds all addresses",
            "kill-one",
            frozenset({"bound-beyond"}),
            _bind_all,
        ),
        Plant(
            "last-records-go",
            "compaction removes the last record of a key, too",
            "kill-one",
            frozenset({"lost-key"}),
            _last_records_go,
        ),
        Plant(
            "too-much-goes",
            "retention keeps half of what it is asked for",
            "kill-one",
            frozenset({"early-deletion"}),
            _too_much_goes,
        ),
        Plant(
            "kafka-leaves-out",
            "the Kafka port leaves out batches from which compaction has removed a record",
            "kill-one",
            frozenset({"lost-key"}),
            _kafka_leaves_out,
        ),
    )
}


def command_of(name: str) -> tuple[str, ...]:
    """The command that starts a node with that bug; the caller appends its config file."""
    return sys.executable, "-m", "chaos_tests.live.faults.planted", PLANTED[name].name


def main(arguments: list[str]) -> None:
    name, config = arguments
    PLANTED[name].install()
    from smq.coordinator.cli.main import main as smq

    sys.argv = ["smq", "serve", "--config", config]
    smq()


if __name__ == "__main__":
    main(sys.argv[1:])
