"""`smq offsets ...`: assigns and advances offsets of topics with storage=external.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import click

from smq.clients import OffsetAssigner
from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.cli.common import CALL_TIMEOUT_MS, CONNECT_TIMEOUT_MS, done, json_option, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.parameters import TOPIC


@click.group(cls=CommandGroup)
def offsets() -> None:
    """Assigns offsets in topics with storage=external, whose records are stored elsewhere."""


@offsets.command("assign")
@click.argument("topic", type=TOPIC)
@click.argument("partition", type=int)
@click.option("--count", type=int, default=1, show_default=True, help="How many.")
@click.option("--request-id", metavar="HEX", help="32 hex digits; the same id always gets the same offsets.")
@json_option
@bootstrap_option
def offsets_assign(
    topic: str, partition: int, count: int, request_id: str | None, as_json: bool, bootstrap: str
) -> None:
    """Prints the first and the last of COUNT offsets that no other caller gets.

    Example: smq offsets assign files 0 --count 100
    """
    parsed_id = _request_id(request_id)

    async def work() -> tuple[int, int]:
        async with _assigner(bootstrap) as assigner:
            return await assigner.assign(topic, partition, count, request_id=parsed_id)

    base, last = run(work(), bootstrap)
    done(f"{base} {last}", as_json=as_json, base_offset=base, last_offset=last)


def _request_id(text: str | None) -> bytes | None:
    try:
        found = bytes.fromhex(text) if text is not None else None
    except ValueError:
        found = b""
    if found is not None and len(found) != 16:
        raise click.UsageError(f"{text!r} is not a request id: a request id is 32 hex digits")
    return found


@offsets.command("advance")
@click.argument("topic", type=TOPIC)
@click.argument("partition", type=int)
@click.argument("offset", type=int)
@json_option
@bootstrap_option
def offsets_advance(topic: str, partition: int, offset: int, as_json: bool, bootstrap: str) -> None:
    """Declares everything below OFFSET readable. Prints the high water mark, which never goes back.

    Example: smq offsets advance files 0 100
    """

    async def work() -> int:
        async with _assigner(bootstrap) as assigner:
            return await assigner.advance(topic, partition, offset)

    hwm = run(work(), bootstrap)
    done(str(hwm), as_json=as_json, hwm=hwm)


def _assigner(bootstrap: str) -> OffsetAssigner:
    return OffsetAssigner(bootstrap, timeout_ms=CALL_TIMEOUT_MS, connect_timeout_ms=CONNECT_TIMEOUT_MS)
