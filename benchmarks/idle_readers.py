"""The memory of a node whose subscribers do not read: 24 of them, and a batch that takes 120 MB decompressed.

    python -m benchmarks.idle_readers

Owns the subscribers, in a process of their own, and reports the node's resident memory before and with them.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.config.addresses import format_address
from smq.records import NewRecord, encode_batch
from smq.testing.served import Served, served_node

READERS: Final = 24
RECORDS: Final = 1_200
RECORD_BYTES: Final = 100_000
WAIT_S: Final = 20.0


def _resident_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10


async def _measure() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with served_node(Path(directory)) as served:
            await _node(served)


async def _node(served: Served) -> None:
    await served.create()
    batch = encode_batch([NewRecord(None, bytes(RECORD_BYTES), 0)] * RECORDS, codec="zstd")
    (answer,) = await served.publish(pb.PublishRecordRequest(topic="t", partition=0, batch=batch))
    assert not answer.HasField("error"), answer
    before_mib = _resident_mib()
    address = format_address(served.server.grpc_address)
    readers = subprocess.Popen([sys.executable, "-m", "benchmarks.idle_readers", address])  # noqa: ASYNC220 - it takes milliseconds, and nothing else runs yet
    peak_mib = mib = 0
    try:
        for _ in range(int(WAIT_S / 0.05)):
            await asyncio.sleep(0.05)
            mib = _resident_mib()
            peak_mib = max(peak_mib, mib)
    finally:
        readers.kill()
        readers.wait()
    print(f"{READERS} readers that do not read: {before_mib} MiB before, {peak_mib} at most, {mib} in the end")


async def _readers(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        agent: Any = smq_pb2_grpc.AgentStub(channel)
        calls = []
        for number in range(READERS):
            call = agent.SubscribeRecord()
            init = pb.SubscribeInit(
                subscription_id=f"s{number}", topic="t", partition=0, offset_type=pb.RESET_TO_EARLIEST
            )
            await call.write(pb.SubscribeRecordRequest(init=init))
            calls.append(call)
        await asyncio.sleep(2 * WAIT_S)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_readers(sys.argv[1]))
    else:
        uvloop.run(_measure())
