"""A network on loopback: every pair of nodes connects through our proxy, which can block, delay, reset and damage.

Owns the proxies and the thread they run in. Works anywhere and needs no rights. What it cannot do is what happens
below TCP (loss, reordering, duplicates): `namespaces` does. A blocked direction keeps its bytes and delivers them
after the heal, as TCP's retransmission would; clients reach the nodes directly.
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from chaos_tests.live.environment.links import Links, Pair
from smq.coordinator.config.node_toml import load_config, write_config
from smq.raft_state.ids import NodeId

T = TypeVar("T")
_CHUNK_BYTES: Final = 1 << 16
_QUEUE_CHUNKS: Final = 256  # held on a delayed or blocked direction; beyond it the sender gets backpressure
_LINGER_RESET: Final = struct.pack("ii", 1, 0)  # close sends RST


@dataclass(eq=False, slots=True)
class _Tunnel:
    """One connection that a node has made to another, and the one that the proxy made for it."""

    pair: Pair  # (dialler, listener)
    writers: list[asyncio.StreamWriter]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class ProxyNetwork:
    """Implements network.Network."""

    name = "loopback proxies"
    can = frozenset({"block", "delay", "reset", "damage"})

    def __init__(self, seed: int) -> None:
        self._links = Links()
        self._changed = asyncio.Event()  # of the rules: set once, then replaced
        self._rng = random.Random(seed)
        self._tunnels: set[_Tunnel] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------------- port
    def prepare(self, configs: list[Path]) -> None:
        loaded = {path: load_config(path) for path in configs}
        real = {config.node_id: config.peers[config.node_id] for config in loaded.values()}
        for path, config in loaded.items():
            peers = dict(real)
            for peer, address in real.items():
                if config.node_id < peer:  # the node with the lower id dials
                    peers[peer] = self._open((config.node_id, peer), address)
            write_config(replace(config, peers=peers, data_dir=Path(config.data_dir.name)), path)

    def command(self, node: int, command: list[str]) -> list[str]:
        return command

    def impose(self, links: Links) -> None:
        async def swap() -> None:
            self._links = links
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

        self._run(swap())

    def reset(self, node: int) -> None:
        """Breaks every connection between this node and the others, as a rebooting router does."""

        async def break_all() -> None:
            for tunnel in [t for t in self._tunnels if node in t.pair]:
                for writer in tunnel.writers:
                    sock = writer.get_extra_info("socket")
                    if sock is not None:
                        with suppress(OSError):
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
                    writer.transport.abort()

        self._run(break_all())

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            tasks = [task for tunnel in self._tunnels for task in tunnel.tasks]
            for tunnel in list(self._tunnels):
                for writer in tunnel.writers:
                    writer.transport.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ----------------------------------------------------------------------------------------------- proxies
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _open(self, pair: tuple[NodeId, NodeId], address: tuple[str, int]) -> tuple[str, int]:
        async def serve() -> tuple[str, int]:
            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._tunnel(pair, address, reader, writer)

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            self._servers.append(server)
            return "127.0.0.1", int(server.sockets[0].getsockname()[1])

        return self._run(serve())

    async def _tunnel(
        self, pair: Pair, address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*address)
        except OSError:
            writer.transport.abort()  # the node is down: its kernel would have refused
            return
        dialler, listener = pair
        tunnel = _Tunnel(pair, [writer, far_writer])
        tunnel.tasks = [
            self._loop.create_task(self._pump(reader, far_writer, dialler, listener)),
            self._loop.create_task(self._pump(far_reader, writer, listener, dialler)),
        ]
        self._tunnels.add(tunnel)
        try:
            await asyncio.wait(tunnel.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._tunnels.discard(tunnel)
            for task in tunnel.tasks:
                task.cancel()
            for end in tunnel.writers:
                end.transport.abort()

    def _flipped(self, data: bytes) -> bytes:
        """As a bad cable or switch does where TCP's checksum does not notice."""
        flipped = bytearray(data)
        bit = self._rng.randrange(8 * len(flipped))
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sender: int, receiver: int
    ) -> None:
        """One direction: a reader that stamps each chunk with the time it may arrive, and a writer that waits."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE_CHUNKS)

        async def read() -> None:
            due = 0.0
            while data := await reader.read(_CHUNK_BYTES):
                link = self._links.of(sender, receiver)
                wait_ms = link.delay_ms + self._rng.random() * link.jitter_ms
                if link.damage and self._rng.random() < link.damage:
                    data = self._flipped(data)
                due = max(due, self._loop.time() + wait_ms / 1000)  # a stream never overtakes itself
                await held.put((due, data))
            await held.put((due, b""))

        reading = self._loop.create_task(read())
        try:
            while True:
                due, data = await held.get()
                if (wait := due - self._loop.time()) > 0:
                    await asyncio.sleep(wait)
                while self._links.of(sender, receiver).blocked:
                    await self._changed.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            return
        finally:
            reading.cancel()
