"""What a client that sends as much as it can costs another: the other's p99 without it, with it, and with its quota.

    python -m benchmarks.greedy_client [rounds]

Owns both clients, in processes of their own, and the node. The three cases alternate, and each has a median over all
rounds: the ratio of the last to the first is what quotas are for.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import confluent_kafka
import uvloop

from smq.coordinator.config.addresses import format_address
from smq.raft_state.commands import AlterQuotas, Quota
from smq.raft_state.handlers.quotas import CLIENT_ID, THOUSAND, Key
from smq.testing.served import Served, served_node

PERIOD_S: Final = 0.01  # between two records of the client that is measured
SETTLE_S: Final = 3.0  # the quota's window is used up by then
MEASURE_S: Final = 8.0
RATE: Final = 500_000  # bytes per second of the greedy client; it sends some hundred times as many without a quota
PERCENT: Final = 5  # and of the loop's time
CASES: Final = {"alone": (False, False), "greedy": (True, False), "greedy with a quota": (True, True)}


async def _measure(rounds: int) -> None:
    found: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as directory:
        async with served_node(Path(directory), kafka_address=("127.0.0.1", 0)) as served:
            await served.create("modest")
            await served.create("greedy")
            for _ in range(rounds):
                for case, (is_greedy, is_limited) in CASES.items():
                    await _limit(served, is_limited=is_limited)
                    found[case].append(await _p99_ms(served, is_greedy=is_greedy))
                    print(f"{case}: {found[case][-1]:.2f} ms", flush=True)
    alone = statistics.median(found["alone"])
    for case, values in found.items():
        median = statistics.median(values)
        print(f"{case}: p99 {median:.2f} ms, {median / alone:.2f} times ({' '.join(f'{v:.2f}' for v in values)})")


async def _limit(served: Served, *, is_limited: bool) -> None:
    entity, on = ((CLIENT_ID, "greedy"),), int(is_limited)
    limits = {Key.PRODUCED: RATE * on, Key.REQUESTS: PERCENT * on}
    quotas = tuple(Quota(entity=entity, key=key, thousandths=THOUSAND * value) for key, value in limits.items())
    done = asyncio.Event()
    served.server.node.propose(AlterQuotas(quotas=quotas), 5_000, lambda _: done.set())
    await done.wait()


async def _p99_ms(served: Served, *, is_greedy: bool) -> float:
    assert served.server.kafka_address is not None
    address = format_address(served.server.kafka_address)
    me = (sys.executable, "-m", "benchmarks.greedy_client")
    greedy = await asyncio.create_subprocess_exec(*me, "greedy", address) if is_greedy else None
    try:
        await asyncio.sleep(SETTLE_S)
        modest = await asyncio.create_subprocess_exec(*me, "modest", address, stdout=subprocess.PIPE)
        out, _ = await modest.communicate()
    finally:
        if greedy is not None:
            greedy.kill()
            await greedy.wait()
    return float(out)


def _greedy(address: str) -> None:
    config = {"bootstrap.servers": address, "client.id": "greedy", "acks": "all"}
    producer = confluent_kafka.Producer(config | {"queue.buffering.max.kbytes": 20_000})
    value = bytes(1_000)
    while True:
        try:
            producer.produce("greedy", value)
            producer.poll(0)
        except BufferError:
            producer.poll(0.1)


def _modest(address: str) -> None:
    config = {"bootstrap.servers": address, "client.id": "modest", "acks": "all", "linger.ms": 0}
    producer, took_ms = confluent_kafka.Producer(config), list[float]()
    end = time.monotonic() + MEASURE_S
    while time.monotonic() < end:
        began = time.monotonic()
        producer.produce("modest", b"x" * 100)
        producer.flush()
        took_ms.append((time.monotonic() - began) * 1_000)
        time.sleep(max(0.0, PERIOD_S - (time.monotonic() - began)))
    print(statistics.quantiles(took_ms[10:], n=100)[98])


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("greedy", "modest"):
        (_greedy if sys.argv[1] == "greedy" else _modest)(sys.argv[2])
    else:
        uvloop.run(_measure(int(sys.argv[1]) if sys.argv[1:] else 5))
