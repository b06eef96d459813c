"""What a server process is to its machine: its log, its end on a fatal error, the files it may open, its memory.

Owns structlog's configuration: to stderr, for a person if that is a terminal, otherwise one JSON object per line. A
line that cannot be written is lost. It must never end what logged it: a callback that ends halfway leaves an unknown
state.

Owns the division of the file descriptors that this process may open: the disk and the other nodes come first, and
clients share the rest. Otherwise clients could take every descriptor, the node could neither open its journal nor
answer a peer, and the cluster would lose it.

Owns the settings of glibc's allocator. By default, glibc maps each block above 128 KiB separately and unmaps it when
it is freed, so the kernel clears pages for every block: for a batch of a megabyte that takes longer than copying it.
glibc raises the limit to the size of a block that was freed, but then returns the end of the heap after nearly every
one. Without glibc nothing changes.

Only `composition` imports it; all others ask structlog for a logger.
"""

import ctypes
import logging
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from typing import Final, NoReturn, TextIO, cast

import structlog

from smq.coordinator import limits
from smq.coordinator.user_errors import EXIT_FATAL, StartError
from smq.raft_state.ids import NodeId
from smq.replication.net.acceptor import AcceptLimits
from smq.replication.nodes.identity import StartRefused
from smq.replication.ports import DataDamaged
from smq.replication.storage.hang import DiskHung

MAPPED_MIN_BYTES: Final = 16 << 20  # blocks of this size are returned immediately: no frame or fetch is that large
KEPT_BYTES: Final = 32 << 20  # the free memory at the end of a heap above which it is returned
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>

log = structlog.get_logger(__name__)


# ------------------------------------------------------------------------------------------------------------------ log
def configure_logs(node_id: NodeId, level: int = logging.INFO) -> None:
    """For the whole process. Libraries' own loggers (aiohttp, asyncio, grpc) write to stderr from WARNING up."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    rendered: list[structlog.types.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    if sys.stderr.isatty():
        rendered = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _with_node(node_id),
            *rendered,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Unfailing(sys.stderr))),
        cache_logger_on_first_use=True,
    )


class _Unfailing:
    """A stream without its errors: its disk may be full, or its reader gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def _with_node(node_id: NodeId) -> structlog.types.Processor:
    def add(
        _logger: structlog.types.WrappedLogger, _method: str, event: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        event.setdefault("node", node_id)
        return event

    return add


# -------------------------------------------------------------------------------------------------- the end on an error
def die(error: BaseException) -> NoReturn:
    """The node's state, or the content of its disk, is no longer known: nothing may be sent after this.

    An error that the operator must fix is logged as its message; a fault of ours is logged with its traceback. The
    process ends whatever becomes of the log, which may be on the disk that failed or hangs.
    """
    try:
        with suppress(RuntimeError, MemoryError):  # no further thread may be possible
            Timer(limits.LAST_WORDS_S, os._exit, (EXIT_FATAL,)).start()
        if isinstance(error, DataDamaged | StartRefused | DiskHung):
            log.critical("fatal", error=str(error))
        else:
            log.critical("fatal", error=repr(error), exc_info=error)
        sys.stderr.flush()
    finally:
        os._exit(EXIT_FATAL)


# ----------------------------------------------------------------------------------------------------- file descriptors
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionCaps:
    """The most connections of clients, per port. `descriptor_max` is the first descriptor number beyond theirs."""

    grpc: int
    kafka: int
    http: int
    descriptor_max: int

    @property
    def grpc_limits(self) -> AcceptLimits:
        """Of all gRPC ports together."""
        per_address = min(limits.GRPC_CONNECTIONS_PER_ADDRESS_MAX, self.grpc)
        return AcceptLimits(connections_max=self.grpc, per_address_max=per_address, descriptor_max=self.descriptor_max)

    def kafka_limits(self, ports: int) -> AcceptLimits:
        """Of each of several ports: an equal part."""
        most = max(1, self.kafka // max(1, ports))
        per_address = min(limits.KAFKA_CONNECTIONS_PER_ADDRESS_MAX, most)
        return AcceptLimits(connections_max=most, per_address_max=per_address, descriptor_max=self.descriptor_max)

    @property
    def http_limits(self) -> AcceptLimits:
        per_address = min(limits.HTTP_CONNECTIONS_PER_ADDRESS_MAX, self.http)
        return AcceptLimits(connections_max=self.http, per_address_max=per_address, descriptor_max=self.descriptor_max)


def divide(descriptors: int) -> ConnectionCaps:
    """StartError if there are too few. If the caps do not all fit, each is cut in the same proportion."""
    if descriptors < limits.DESCRIPTORS_MIN:
        raise StartError(
            f"this process may open only {descriptors} files, and a node needs {limits.DESCRIPTORS_MIN} plus one per "
            "client connection: raise the limit (ulimit -n, LimitNOFILE= of systemd)"
        )
    rest = descriptors - limits.DESCRIPTORS_RESERVED
    caps = (limits.GRPC_CONNECTIONS_MAX, limits.KAFKA_CONNECTIONS_MAX, limits.HTTP_CONNECTIONS_MAX)
    scale = min(1.0, rest / sum(caps))
    grpc, kafka, http = (max(1, int(cap * scale)) for cap in caps)
    return ConnectionCaps(grpc=grpc, kafka=kafka, http=http, descriptor_max=rest)


def take_descriptors() -> ConnectionCaps:
    """Raises this process's limit as far as allowed, and divides it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _descriptors_needed()
    if soft < needed:
        soft = min(needed, hard) if hard != resource.RLIM_INFINITY else needed
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    caps = divide(soft)
    if soft < needed:
        log.warning(
            "few_file_descriptors",
            limit=soft,
            needed=needed,
            grpc_connections_max=caps.grpc,
            kafka_connections_max=caps.kafka,
            advice="raise the hard limit of open files (ulimit -Hn, LimitNOFILE= of systemd) for more connections",
        )
    return caps


def _descriptors_needed() -> int:
    caps = limits.GRPC_CONNECTIONS_MAX + limits.KAFKA_CONNECTIONS_MAX + limits.HTTP_CONNECTIONS_MAX
    return caps + limits.DESCRIPTORS_RESERVED


# --------------------------------------------------------------------------------------------------------------- memory
def keep_freed_memory() -> bool:
    """Lets the process keep the memory that it frees, within bounds. Returns whether the allocator took the settings.
    If the environment sets one, both stay."""
    tunables = os.getenv("GLIBC_TUNABLES", "")
    is_set = any(f"MALLOC_{of}_THRESHOLD_" in os.environ for of in ("MMAP", "TRIM")) or "_threshold" in tunables
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_set or mallopt is None:
        return False
    return all((mallopt(_M_MMAP_THRESHOLD, MAPPED_MIN_BYTES), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)))
