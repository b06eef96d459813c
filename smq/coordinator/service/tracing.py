"""Whether records are traced, and the parent that a caller has named in its metadata.

Owns the switch, which is OpenTelemetry's own: OTEL_TRACES_EXPORTER names an exporter. Without it nothing of
OpenTelemetry is loaded, and no request meets any of it. With it, the services work with a node whose `produce` and
`fetch` are traced (`tracing_otel`). Only the composition root and the gRPC services import it.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Final

import structlog

from smq.replication.api import NodeApi

_log = structlog.get_logger(__name__)

PARENT: Final[ContextVar[str]] = ContextVar("traceparent", default="")  # of the gRPC call that is being served
_HEADER: Final = "traceparent"


def note_parent(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Of the call whose task this is."""
    for key, value in metadata or ():
        if key == _HEADER and isinstance(value, str):
            PARENT.set(value)


def is_enabled(environment: Mapping[str, str]) -> bool:
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    return exporter not in ("", "none") and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"


def traced(node: NodeApi, cluster_id: str) -> tuple[NodeApi, Callable[[], None]]:
    """The node as services see it, and what sends the last spans when they have stopped."""
    if not is_enabled(os.environ):
        return node, _nothing
    try:
        from smq.coordinator.service import tracing_otel
    except ImportError as e:
        advice = "install smq with its extra otel, or unset OTEL_TRACES_EXPORTER"
        _log.warning("not_tracing", reason=str(e), advice=advice)
        return node, _nothing
    return tracing_otel.traced(node, cluster_id, os.environ, PARENT.get)


def _nothing() -> None:
    """There is nothing to send."""
