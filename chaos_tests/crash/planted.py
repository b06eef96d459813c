"""Bugs planted into the real disk: the crash images, and the tests of the log's rules, must find every one.

Owns the list. Each breaks one of the rules that `docs/decisions/one-log-per-node.md` numbers.
"""

import os
from typing import Any, Final

from chaos_tests.sim.replacement import Fault, Replacement, nothing, replace, returns


def _without_sync(original: Fault, path: Any, flags: int) -> Any:
    return original(path, flags & ~os.O_DSYNC)


def _named_too_early(_original: Fault, log: Any, file: Any) -> None:
    """The index names the copies, and their file's own name is not durable."""
    with log._names:  # the recorder cannot tell the order of two calls at a time
        whole = file.path.with_suffix(".sorted")
        file.path.rename(whole)
        file.path = whole
        log.files[file.number] = file


def _place_before_rows(original: Fault, index: Any, layer: Any) -> None:
    index.set_place(layer.end)
    original(index, layer)


def _of_any_generation(original: Fault, fd: int, at: int, size: int, _generation: bytes, number: int) -> Any:
    from smq.replication.storage import frames

    head = frames._HEAD.unpack(os.pread(fd, frames._HEAD.size, at))
    found = original(fd, at, size, head[1], head[2]) if any(head[1]) else None
    return found._replace(number=number) if found is not None else None


_STORAGE: Final = "smq.replication.storage"
# By rule
IMAGE_BUGS: Final[dict[str, Replacement]] = {
    "1: acknowledged before it is durable": replace(f"{_STORAGE}.node_log:_opened", by=_without_sync),
    "2: named before it is durable": replace(f"{_STORAGE}.node_log:NodeLog.publish", by=_named_too_early),
    "3: the place before the rows": replace(f"{_STORAGE}.index:Index.apply", by=_place_before_rows),
}
REPLAY_BUGS: Final[dict[str, Replacement]] = {
    "4: a torn round is taken": replace(f"{_STORAGE}.frames:Frame.are_values_whole", by=returns(True)),
    "5: rounds of any generation": replace(f"{_STORAGE}.frames:read_frame", by=_of_any_generation),
}
OTHER_BUGS: Final[dict[str, Replacement]] = {
    "4: rot is taken for the end": replace(f"{_STORAGE}.frames:_refuse_later", by=nothing),
    "6: used again under a reader": replace(f"{_STORAGE}.node_log:Pins.has_ended", by=returns(True)),
    "7: no file is reserved": replace(f"{_STORAGE}.node_log:NodeLog.reserve", by=nothing),
    "8: an unreadable index is not looked for": replace(f"{_STORAGE}.index:unreadable", by=returns("")),
}
