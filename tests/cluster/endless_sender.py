"""A process that never stops sending: `endless_sender.py ADDRESS STREAMS`.

It publishes 8 MiB of garbage on each of many streams of one connection until it is killed. It prints one line per
stream when its first request has left, and reads no answers. It takes the time that the node leaves: clients of a
real cluster run on machines of their own.
"""

import asyncio
import os
import sys

import grpc

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb.smq_pb2_grpc import AgentStub

RESTART_S = 0.1
WASTE = pb.PublishRecordRequest(partition=0, topic="big", batch=os.urandom((8 << 20) - 1000))


async def pour(channel: grpc.aio.Channel) -> None:
    """A stream that breaks begins again: on a busy machine a connection may time out, which does not end a flood."""
    has_poured = False
    while True:
        call = AgentStub(channel).PublishRecord(None)
        try:
            while True:
                await call.write(WASTE)
                if not has_poured:
                    has_poured = True
                    sys.stdout.write("pours\n")
                    sys.stdout.flush()
        except (grpc.RpcError, asyncio.InvalidStateError):
            await asyncio.sleep(RESTART_S)


async def main(address: str, streams: int) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await asyncio.gather(*(pour(channel) for _ in range(streams)))


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
