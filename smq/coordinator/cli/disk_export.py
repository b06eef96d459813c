"""`smq disk export`: writes what a stopped node's directory holds to files, without a cluster.

Owns the files, which of them a record goes to, and the report. `replication.salvage` judges what is known to be
committed. Memory is bounded by a batch and the replicated state; a file of records is complete, or absent.
`commands.disk` alone imports it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from smq.clients import ConsumerRecord
from smq.clients.types import ISOLATIONS
from smq.coordinator.cli.commands.disk import directory_argument, opened
from smq.coordinator.cli.common import counted, json_option
from smq.coordinator.cli.export import Advance, progress
from smq.coordinator.cli.export_files import AtomicFile, RecordFile, record_file
from smq.coordinator.cli.tables import Table as TextTable
from smq.coordinator.cli.tables import print_table
from smq.coordinator.user_errors import EXIT_FAILED, Interrupted, UserError
from smq.raft_state.command_codec import UpgradeNeeded
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Offset, PartitionId, split_partition_id
from smq.raft_state.state import ClusterState, GroupState, TopicState
from smq.records import BatchError, parse_header
from smq.replication.log.decoding import decode_bounded
from smq.replication.nodes.identity import CLUSTER_KEY, NODE_KEY
from smq.replication.ports import DataDamaged, Disk, Table
from smq.replication.salvage import Fate, FoundBatch, FoundState, Missing, found_in, partitions_on, read_state

CHUNK_RECORDS: Final = 1_000  # decoded, and then written
_SHOWN_MAX: Final = 20  # stretches that are missing, in the text: the report has them all
_UNCERTAIN: Final = "uncertain"


@dataclass(slots=True, kw_only=True)
class ExportedPartition:
    """`topic` is an id if the state does not have the partition. The numbers are of records; `aborted` ones were left
    out, unless they were asked for."""

    topic: str
    partition: int
    records: int = 0
    uncertain: int = 0
    aborted: int = 0
    missing: list[Missing] = field(default_factory=list)

    @property
    def missing_offsets(self) -> int:
        return sum(gap.hi - gap.lo for gap in self.missing)


@click.command("export")
@directory_argument
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="A new or empty directory for the files.",
)
@click.option("--topic", "topics", multiple=True, help="Only the records of this one; may be repeated.")
@click.option(
    "--isolation",
    type=click.Choice(tuple(ISOLATIONS)),
    default="read_committed",
    show_default=True,
    help="read_uncommitted: the records of aborted transactions, too.",
)
@json_option
def disk_export(directory: Path, output: Path, topics: tuple[str, ...], isolation: str, as_json: bool) -> None:
    """Writes the topics, records and groups' offsets in DIRECTORY to files, as far as they can be read.

    For the only disk that is left: no other node is needed, and DIRECTORY keeps its rows. Under "A lone disk",
    docs/operations.md says what is in which file. The exit code is 1 if committed records are missing.

    Example: smq disk export /var/lib/smq --output /backup/smq
    """
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} exists and is not empty: name a new directory for the files")
    with opened(directory) as disk:
        try:
            found = read_state(disk)
        except UpgradeNeeded as e:
            raise UserError(f"{directory} cannot be read: {e}") from e
        export = _Export(disk, found, output, set(topics), with_aborted=isolation == "read_uncommitted")
        try:
            export.run()
        except (UserError, OSError) as e:
            problem = e if isinstance(e, UserError) else f"{e.filename or output} cannot be written: {e.strerror or e}"
            raise UserError(f"{problem}. {export.progress_text()}") from e
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted. {export.progress_text()}") from None
    click.echo(json.dumps(export.report())) if as_json else export.show()
    if export.is_incomplete:
        raise SystemExit(EXIT_FAILED)


class _Export:
    def __init__(self, disk: Disk, found: FoundState, output: Path, topics: set[str], *, with_aborted: bool) -> None:
        self._disk = disk
        self._found = found
        self._output = output
        self._topics = topics
        self._with_aborted = with_aborted
        self._done: list[ExportedPartition] = []
        node = disk.get(Table.META, NODE_KEY) or b"?"
        self._node, self._cluster = node.decode(), (disk.get(Table.META, CLUSTER_KEY) or b"?").decode()
        self._damage = [found.damage] if found.damage else []
        self._elsewhere = 0  # partitions without a replica on this disk
        self._count = 0  # of partitions to be written

    @property
    def is_incomplete(self) -> bool:
        return bool(self._damage) or any(p.missing for p in self._done)

    def run(self) -> None:
        pids = self._partitions()
        self._count = len(pids)
        state = self._found.state
        self._output.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write("topics.json", [_topic_json(topic) for _, topic in sorted(state.topics.items())])
        self._write("groups.json", [_group_json(state, group) for _, group in sorted(state.groups.items())])
        parts = [part for pid in pids if (part := state.partition(pid)) is not None]
        with progress(sum(part.hwm - part.log_start for part in parts)) as advance:
            for pid in pids:
                self._done.append(self._export(pid, advance))
        self._write("report.json", self.report())

    def _partitions(self) -> list[PartitionId]:
        """Those of the state that have a replica here, and those of which there is a log."""
        state = self._found.state
        wanted = set[PartitionId]()
        try:
            wanted.update(partitions_on(self._disk))
        except DataDamaged as e:
            self._damage.append(str(e))
        for part in (part for topic in state.topics.values() for part in topic.partitions):
            if self._node in map(str, part.replicas):
                wanted.add(part.pid)
            elif part.pid not in wanted and not part.is_external:
                self._elsewhere += 1
        named = {pid: _place(state, pid) for pid in wanted}
        chosen = [pid for pid, (topic, _) in named.items() if not self._topics or topic in self._topics]
        return sorted(chosen, key=named.__getitem__)

    def _export(self, pid: PartitionId, advance: Advance) -> ExportedPartition:
        topic, number = _place(self._found.state, pid)
        made = ExportedPartition(topic=topic, partition=number)
        with ExitStack() as files:
            opened_files: dict[str, RecordFile] = {}

            def file(suffix: str) -> RecordFile:
                if suffix not in opened_files:
                    path = self._output / "records" / topic / f"{number}{suffix}.jsonl"
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    opened_files[suffix] = files.enter_context(record_file(path, "jsonl"))
                return opened_files[suffix]

            for item in found_in(self._disk, pid, self._found.state):
                if isinstance(item, Missing):
                    made.missing.append(item)
                    continue
                advance(item.stored.end - item.first)
                if item.is_control:
                    continue
                if item.fate is Fate.ABORTED and not self._with_aborted:
                    made.aborted += parse_header(item.stored.batch).count
                    continue
                is_uncertain = item.fate is Fate.UNCERTAIN
                for chunk in self._decoded(made, item):
                    file(f".{_UNCERTAIN}" if is_uncertain else "").write(chunk)
                    made.records += 0 if is_uncertain else len(chunk)
                    made.uncertain += len(chunk) if is_uncertain else 0
        return made

    def _decoded(self, made: ExportedPartition, found: FoundBatch) -> Iterator[list[ConsumerRecord]]:
        """What does not decode is missing; the rest of the partition is not."""
        base, end, _, ts_ns, _ = found.stored
        at = found.first
        records = (
            ConsumerRecord(
                made.topic,
                made.partition,
                r.offset,
                ts_ns + r.offset - base,
                r.timestamp_ms,
                r.key,
                r.value,
                r.headers,
            )
            for r in decode_bounded(found.stored.batch)
            if r.offset >= found.first
        )
        try:
            while chunk := list(islice(records, CHUNK_RECORDS)):
                yield chunk
                at = Offset(chunk[-1].offset + 1)
        except (BatchError, SmqError) as e:
            made.missing.append(Missing(at, end, str(e)))

    def _write(self, name: str, document: object) -> None:
        with AtomicFile(self._output / name) as out:
            out.write(json.dumps(document, indent=2).encode() + b"\n")

    # ------------------------------------------------------------------------------------------------ report
    def report(self) -> dict[str, Any]:
        found = self._found
        return {
            "cluster_id": self._cluster,
            "node": self._node,
            "raft_index": found.index,
            "raft_entries_unknown": found.unknown,
            "damage": self._damage,
            "partitions_elsewhere": self._elsewhere,
            "partitions": [asdict(p) | {"missing": [gap._asdict() for gap in p.missing]} for p in self._done],
        }

    def progress_text(self) -> str:
        done = f"{len(self._done)} of {counted(self._count, 'partition')}"
        return (
            f"{self._output} has the records of {done}, each complete, and no report.json. Continue in another "
            "directory with --topic"
            if self._done
            else f"No records were written to {self._output}"
        )

    def show(self) -> None:
        found, totals = self._found, Counter[str]()
        table = TextTable("topic", "partitions", "records", _UNCERTAIN, "aborted", "missing offsets")
        rows: dict[str, list[int]] = {}
        for p in self._done:
            row = rows.setdefault(p.topic, [0] * 5)
            for i, number in enumerate((1, p.records, p.uncertain, p.aborted, p.missing_offsets)):
                row[i] += number
            totals.update(records=p.records, uncertain=p.uncertain)
        for topic, row in rows.items():
            table.add_row(topic, *(f"{number:,}" for number in row))
        print_table(table)
        gaps = [(p, gap) for p in self._done for gap in p.missing]
        for p, gap in gaps[:_SHOWN_MAX]:
            click.echo(f"missing: {p.topic}/{p.partition} [{gap.lo}, {gap.hi}): {gap.why}")
        if len(gaps) > _SHOWN_MAX:
            click.echo(f"missing: {len(gaps) - _SHOWN_MAX} more, in {self._output / 'report.json'}")
        for damage in self._damage:
            click.echo(f"damaged: {damage}")
        click.echo(
            f"cluster {self._cluster}, as node {self._node} knew it at Raft entry {found.index:,}; its journal has "
            f"{found.unknown:,} more, which may have been committed"
        )
        if self._elsewhere:
            click.echo(f"{counted(self._elsewhere, 'partition')} had no replica on this disk")
        click.echo(
            f"{self._output} holds {counted(totals['records'], 'record')}, and {totals['uncertain']:,} that may have "
            "been committed (*.uncertain.jsonl)"
        )


def _place(state: ClusterState, pid: PartitionId) -> tuple[str, int]:
    """Of a topic that the state does not have, its id."""
    topic_id, number = split_partition_id(pid)
    return state.topic_names.get(topic_id, topic_id.hex()), number


def _topic_json(topic: TopicState) -> dict[str, Any]:
    """As `smq topic list --json`, as far as a disk knows it."""
    return {
        "name": topic.name,
        "topic_id": topic.topic_id.hex(),
        "replication_factor": topic.replication_factor,
        "config": topic.config,
        "created_ms": topic.created_ms,
        "partitions": [
            {"partition": p.index, "replicas": p.replicas, "epoch": p.epoch, "log_start": p.log_start, "hwm": p.hwm}
            for p in topic.partitions
        ],
    }


def _group_json(state: ClusterState, group: GroupState) -> dict[str, Any]:
    """As `smq group export` writes it."""
    offsets = []
    for pid, committed in sorted(group.offsets.items(), key=lambda item: _place(state, item[0])):
        if committed.position is not None:
            topic, number = _place(state, pid)
            row = {"topic": topic, "partition": number, "offset": committed.offset, "metadata": committed.metadata}
            offsets.append(row)
    return {"group": group.name, "offsets": offsets}
