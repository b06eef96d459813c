"""How a server process logs: one JSON object per line, to stderr.

Owns structlog's configuration. Only the composition root imports it; all others ask structlog for a logger. A line that
cannot be written is lost. It must never end what logged it: a callback that ends halfway leaves an unknown state.
"""

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog

from smq.raft_state.ids import NodeId


def configure_logs(node_id: NodeId, level: int = logging.INFO) -> None:
    """For the whole process. Libraries' own loggers (aiohttp, asyncio, grpc) write to stderr from WARNING up."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _with_node(node_id),
            structlog.processors.JSONRenderer(),
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
