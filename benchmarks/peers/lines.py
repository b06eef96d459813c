"""The lines of the comparison: what is measured, by which client, on which systems.

Owns the sizes and what each figure means. A line returns figures by name, with units in the names; the figure that
`judged` names is the one that is compared. It must never start a system.
"""

import json
import re
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks import kafka
from benchmarks.peers.programs import go_program, kafka_jars
from benchmarks.peers.systems import System
from benchmarks.usage import written_below

KAFKA_PROTOCOL: Final = frozenset({"kafka"})
ALL: Final = frozenset({"kafka", "etcd", "nats"})
TAIL_RATE: Final = 100  # records per second
CLIENTS: Final = 100
PARTITIONS: Final = 3
LOAD_S: Final = 300  # no load takes that long

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`run` gets the system, a fresh topic and the share of the full size (1, or less for a trial)."""

    name: str
    drivers: frozenset[str]
    judged: str
    lower_is_better: bool
    run: Callable[[System, str, float], Figures]


def _load(system: System, line: str, topic: str, **options: float) -> Figures:
    command = [str(go_program("load")), "-line", line, "-system", system.driver, "-topic", topic]
    command += ["-servers", ",".join(system.servers)]
    for name, value in options.items():
        command += [f"-{name.replace('_', '-')}", str(value)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LOAD_S)
    if ran.returncode:
        raise RuntimeError(f"the load {line} failed against {system.name}: {ran.stderr.strip()[-500:]}")
    return {name: float(value) for name, value in json.loads(ran.stdout).items()}


def make_topic(system: System, topic: str, partitions: int) -> None:
    _load(system, "make", topic, partitions=partitions)


def _measured(system: System, work: Callable[[], Figures]) -> Figures:
    """Adds what the nodes used: CPU seconds per million records, bytes given to their disk per byte acknowledged."""
    written = written_below(system.root)
    before, client_before, began = system.usage(), _client_cpu_s(), time.perf_counter()
    with system.watch():
        figures = work()
    used, taken = system.usage().since(before), time.perf_counter() - began
    figures["nodes_cores"] = used.cpu_s / taken
    figures["client_cores"] = (_client_cpu_s() - client_before) / taken
    if count := figures.get("count"):
        figures["nodes_cpu_s_per_million"] = used.cpu_s / count * 1e6
        size, now_written = figures.pop("acknowledged_bytes", 0.0), written_below(system.root)
        if size and written is not None and now_written is not None:
            figures["written_per_byte"] = (now_written - written) / size
    return figures


def _client_cpu_s() -> float:
    """Of this process and of the children that have ended: the servers are children that run."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def _single(system: System, topic: str, share: float) -> Figures:
    make_topic(system, topic, 1)

    def work() -> Figures:
        # No warm-up within: what the nodes write is counted from the first record on. The first seconds go elsewhere.
        figures = _load(system, "single", topic, size=100, seconds=10 * share, warm_up=0)
        return figures | {"acknowledged_bytes": figures["count"] * 100}

    _load(system, "single", topic, size=100, seconds=2 * share, warm_up=0)
    return _measured(system, work)


def _tail(system: System, topic: str, share: float) -> Figures:
    make_topic(system, topic, 1)
    return _measured(system, lambda: _load(system, "tail", topic, size=100, rate=TAIL_RATE, seconds=10 * share))


def _commit(system: System, topic: str, share: float) -> Figures:
    make_topic(system, topic, 1)
    return _measured(system, lambda: _load(system, "commit", topic, seconds=8 * share))


def _clients(system: System, topic: str, share: float) -> Figures:
    make_topic(system, topic, PARTITIONS)

    def work() -> Figures:
        figures = _load(system, "clients", topic, size=100, clients=CLIENTS, seconds=8 * share)
        return figures | {"records_per_s": figures["count"] / figures["seconds"]}

    return _measured(system, work)


def _librdkafka(size: int, records: int, linger_ms: float) -> Callable[[System, str, float], Figures]:
    def run(system: System, topic: str, share: float) -> Figures:
        make_topic(system, topic, PARTITIONS)
        servers, count = ",".join(system.servers), int(records * share)
        kafka.produce(servers, topic, count // 10, size, linger_ms)  # warm

        def work() -> Figures:
            began = time.perf_counter()
            kafka.produce(servers, topic, count, size, linger_ms)
            return _rate(count, size, time.perf_counter() - began)

        return _measured(system, work)

    return run


def _rate(count: int, size: int, taken_s: float) -> Figures:
    total = float(count * size)
    return {
        "count": count,
        "records_per_s": count / taken_s,
        "mb_per_s": total / taken_s / 1e6,
        "acknowledged_bytes": total,
    }


def _java(main_class: str, *arguments: str) -> str:
    command = kafka_jars().command(main_class, *arguments, heap="512m")
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LOAD_S)
    if ran.returncode:
        raise RuntimeError(f"{main_class} failed: {(ran.stderr or ran.stdout).strip()[-500:]}")
    return ran.stdout


def _java_produce(system: System, topic: str, share: float) -> Figures:
    make_topic(system, topic, PARTITIONS)
    count, size = int(300_000 * share), 1000

    def work() -> Figures:
        printed = _java(
            "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", str(count),
            "--record-size", str(size), "--throughput", "-1", "--warmup-records", str(count // 5),
            "--command-property", f"bootstrap.servers={','.join(system.servers)}", "acks=all",
        )  # fmt: skip
        steady = re.findall(r"([\d.]+) records/sec .*?([\d.]+) ms avg latency.*?(\d+) ms 99th", printed)[-1]
        rate = float(steady[0])
        return {
            "count": count,
            "records_per_s": rate,
            "mb_per_s": rate * size / 1e6,
            "p99_ms": float(steady[2]),
            "acknowledged_bytes": float(count * size),
        }

    return _measured(system, work)


def _filled(system: System, topic: str, share: float) -> tuple[int, int]:
    """A topic to consume: the number of its records, and their size."""
    make_topic(system, topic, PARTITIONS)
    count, size = int(600_000 * share), 1000
    kafka.produce(",".join(system.servers), topic, count, size, 50)
    return count, size


def _consume(system: System, topic: str, share: float) -> Figures:
    count, size = _filled(system, topic, share)

    def work() -> Figures:
        figures = _load(system, "consume", topic, count=count)
        return _rate(count, size, figures["seconds"])

    return _without_writes(_measured(system, work))


def _librdkafka_consume(system: System, topic: str, share: float) -> Figures:
    count, size = _filled(system, topic, share)

    def work() -> Figures:
        began = time.perf_counter()
        kafka.consume(",".join(system.servers), topic, count, kafka.WITHOUT_PAUSES)
        return _rate(count, size, time.perf_counter() - began)

    return _without_writes(_measured(system, work))


def _java_consume(system: System, topic: str, share: float) -> Figures:
    count, size = _filled(system, topic, share)

    def work() -> Figures:
        printed = _java(
            "org.apache.kafka.tools.ConsumerPerformance", "--bootstrap-server", ",".join(system.servers),
            "--topic", topic, "--num-records", str(count), "--timeout", "60000",
        )  # fmt: skip
        row = next(line for line in printed.splitlines() if re.match(r"\d{4}-", line)).split(", ")
        header = next(line for line in printed.splitlines() if line.startswith("start.time")).split(", ")
        found = dict(zip(header, row, strict=True))
        return _rate(int(found["data.consumed.in.nMsg"]), size, float(found["fetch.time.ms"]) / 1000)

    return _without_writes(_measured(system, work))


def _without_writes(figures: Figures) -> Figures:
    figures.pop("written_per_byte", None)
    return figures


def gap(system: System, topic: str, share: float) -> Figures:
    """Kills the leader with SIGKILL in the middle. The system must be stopped afterwards."""
    make_topic(system, topic, 1)
    command = [str(go_program("load")), "-line", "gap", "-system", system.driver, "-topic", topic]
    command += ["-servers", ",".join(system.servers), "-seconds", str(max(15 * share, 10))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as load:
        assert load.stderr is not None
        named = load.stderr.readline().split()
        if len(named) != 2 or named[0] != "leader":
            raise RuntimeError(f"the load gap failed against {system.name}: {' '.join(named)} {load.stderr.read()}")
        time.sleep(2)
        system.kill(int(named[1]))
        printed, said = load.communicate(timeout=LOAD_S)
    if load.returncode:
        raise RuntimeError(f"the load gap failed against {system.name}: {said[-500:]}")
    return {"gap_ms": float(json.loads(printed)["gap_ms"])}


def _line(name: str, drivers: frozenset[str], judged: str, run: Callable[[System, str, float], Figures]) -> Line:
    return Line(name=name, drivers=drivers, judged=judged, lower_is_better=judged.endswith("_ms"), run=run)


SINGLE: Final = "one record of 100 B at a time"
TAIL: Final = f"produce to consume, {TAIL_RATE} records of 100 B per second"
MANY_CLIENTS: Final = f"{CLIENTS} clients, one record of 100 B in flight each"
JAVA_PRODUCES: Final = "Java produces 1 KB as it is by default"
LINES: Final = (
    _line(SINGLE, ALL, "p50_ms", _single),
    _line(TAIL, ALL, "p50_ms", _tail),
    _line("commit of a group's offset, one at a time", KAFKA_PROTOCOL, "p50_ms", _commit),
    _line(MANY_CLIENTS, ALL, "records_per_s", _clients),
    _line("librdkafka produces 100 B", KAFKA_PROTOCOL, "records_per_s", _librdkafka(100, 2_000_000, 5)),
    _line("librdkafka produces 1 KB, linger 50 ms", KAFKA_PROTOCOL, "mb_per_s", _librdkafka(1000, 400_000, 50)),
    _line(JAVA_PRODUCES, KAFKA_PROTOCOL, "records_per_s", _java_produce),
    _line("franz-go consumes 1 KB", KAFKA_PROTOCOL, "mb_per_s", _consume),
    _line("librdkafka consumes 1 KB", KAFKA_PROTOCOL, "mb_per_s", _librdkafka_consume),
    _line("Java consumes 1 KB", KAFKA_PROTOCOL, "mb_per_s", _java_consume),
    _line("longest gap after kill -9 of the leader", ALL, "gap_ms", gap),
)  # the gap is the last: it leaves two nodes
