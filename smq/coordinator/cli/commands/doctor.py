"""`smq doctor`: examines a cluster, says what is wrong and what to do, and collects it all in a file for others.

Owns the command, and what goes into its bundle: never a secret. `operators.diagnosis` has the rules. `cli.root` loads
it when it is used.
"""

import io
import json
import re
import tarfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from smq import __version__
from smq.clients.types import ClusterSetting
from smq.coordinator.cli.common import counted, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.operators.diagnosis import Finding, Look, findings
from smq.coordinator.operators.formats import size_text
from smq.coordinator.user_errors import EXIT_FAILED, NoAnswer, UserError
from smq.raft_state.errors import SmqError

TIMEOUT_MS: Final = 3_000.0
LOG_BYTES_MAX: Final = 8 << 20  # of each log: its end
_SECRET: Final = re.compile(rb"""(?i)((?:password|passwd|secret|token|credential|private_key)\w*["']?\s*[=:]\s*)\S.*""")
_PEM: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


@click.command()
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write it all, with settings, configurations and logs, to this .tar.gz, without secrets.",
)
@click.option(
    "--file",
    "files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A node.toml or a log of this machine for the bundle; may be repeated.",
)
@json_option
@bootstrap_option
def doctor(bundle: Path | None, files: tuple[Path, ...], as_json: bool, bootstrap: str) -> None:
    """Examines nodes, quorum, partitions, disks, certificates, clocks, versions and elections. Exit code 1 if something
    is wrong, with what to do next.

    \b
    Examples:
      smq doctor
      smq doctor --bundle smq.tar.gz --file /etc/smq/node.toml --file /var/log/smq.log
    """
    if files and bundle is None:
        raise click.UsageError("--file is for the bundle: name that with --bundle FILE")
    look: Look | None = None
    settings: list[ClusterSetting] = []
    try:
        look, settings = run(_examined(bootstrap), bootstrap)
        found = findings(look)
    except NoAnswer as e:
        found = [Finding(check="nodes", text=str(e))]
    is_well = not any(f.is_bad for f in found)
    document = {"is_well": is_well, "findings": [asdict(f) for f in found]}
    if bundle is not None:
        _write_bundle(bundle, document, look, settings, files)
    if as_json:
        click.echo(json.dumps(document, ensure_ascii=False))
    else:
        _print(look, found)
        if bundle is not None:
            click.echo(f"wrote {bundle} ({size_text(bundle.stat().st_size)}): look into it before you pass it on")
    if not is_well:
        raise SystemExit(EXIT_FAILED)


async def _examined(bootstrap: str) -> tuple[Look, list[ClusterSetting]]:
    async with open_admin(bootstrap, TIMEOUT_MS) as admin:
        look = await Look.of(admin)
        return look, await admin.cluster_config() if look.has_leader else []


def _print(look: Look | None, found: Iterable[Finding]) -> None:
    if look is not None:
        ready = sum(s.is_ready for s in look.statuses)
        lag = sum(max(r.hwm - r.verified_end, 0) for s in look.statuses for r in s.replicas)
        topics, partitions = len(look.cluster.topics), sum(len(t.partitions) for t in look.cluster.topics)
        click.echo(
            f"cluster {look.cluster.cluster_id}: {ready} of {counted(len(look.answers), 'node')} ready,"
            f" {counted(topics, 'topic')}, {counted(partitions, 'partition')},"
            f" replicas {counted(lag, 'offset')} behind"
        )
        for s in look.statuses:
            free = f"{size_text(s.disk_free_bytes)} of {size_text(s.disk_total_bytes)} free"
            click.echo(f"node {s.node}: smq {s.version or 'unknown'}, {free}")
    for f in found:
        click.echo(f"{'BAD ' if f.is_bad else 'note'}  {f.check}: {f.text}")
        if f.next:
            click.echo(f"      next: {f.next}")
    if not any(f.is_bad for f in found):
        click.echo("nothing is wrong")


# --------------------------------------------------------------------------------------------------------- bundle
def _write_bundle(
    path: Path, document: dict[str, Any], look: Look | None, settings: list[ClusterSetting], files: Iterable[Path]
) -> None:
    parts: dict[str, bytes] = {
        "doctor.json": _json(document | {"smq": __version__, "at_ms": time.time_ns() // 1_000_000})
    }
    if look is not None:
        statuses = {
            node: {"error": str(a.status)} if isinstance(a.status, SmqError) else asdict(a.status)
            for node, a in look.answers.items()
        }
        parts["cluster.json"] = _json(asdict(look.cluster))
        parts["nodes.json"] = _json(statuses)
        parts["settings.json"] = _json([asdict(s) for s in settings])
    for number, file in enumerate(files, 1):
        parts[f"files/{number}-{file.name}"] = without_secrets(_end_of(file))
    try:
        with tarfile.open(path, "w:gz") as archive:
            for name, data in parts.items():
                entry = tarfile.TarInfo(f"smq-doctor/{name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from e


def _end_of(file: Path) -> bytes:
    try:
        with file.open("rb") as source:
            source.seek(max(0, file.stat().st_size - LOG_BYTES_MAX))
            return source.read(LOG_BYTES_MAX)
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e.strerror or e}") from e


def without_secrets(data: bytes) -> bytes:
    """Private keys, and what stands behind a word such as password or token, to the end of the line."""
    return _SECRET.sub(rb"\1[removed]", _PEM.sub(b"[removed: a private key]", data))


def _json(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, indent=1, default=lambda b: b.hex()).encode()
